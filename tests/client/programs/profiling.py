"""Traces of all hosts, with pathwaysutils and without it, also when a slice is lost meanwhile.

argv: a directory, and "pathwaysutils" or "plain". Says "tracing" when a slice is to be killed, and goes
on after a line.
"""

import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

out, with_pathwaysutils = Path(sys.argv[1]), sys.argv[2] == "pathwaysutils"
if with_pathwaysutils:
    import pathwaysutils

    pathwaysutils.initialize()


@jax.jit
def traced_step(x):
    return (x @ x.T).sum()


def step(devices):
    spread = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
    traced_step(jax.device_put(np.ones((64, 64), np.float32), spread)).block_until_ready()


step(jax.devices())
with jax.profiler.trace(out / "all"):
    step(jax.devices())

if not with_pathwaysutils:
    jax.profiler.start_trace(out / "perfetto", create_perfetto_trace=True)
    step(jax.devices())
    jax.profiler.stop_trace()

jax.profiler.start_trace(out / "lost")
step(jax.devices())
print("tracing", flush=True)
sys.stdin.readline()
jax.profiler.stop_trace()

step(jax.devices()[:1])
with jax.profiler.trace(out / "again"):
    step(jax.devices()[:1])
# Whoever ends within a trace leaves it all the same.
jax.profiler.start_trace(out / "left")
step(jax.devices()[:1])
print("done", flush=True)
