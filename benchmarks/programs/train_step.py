"""Milliseconds for a training step of a given size, median. Prints a JSON object.

    train_step.py WIDTH STEPS [COORDINATOR PROCESSES INDEX LOCAL_DEVICES]

With the last four it is one process of plain multi-process JAX.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

width, steps = int(sys.argv[1]), int(sys.argv[2])
if len(sys.argv) > 3:
    coordinator, processes, index, local = sys.argv[3], *map(int, sys.argv[4:7])
    jax.config.update("jax_num_cpu_devices", local)
    jax.distributed.initialize(coordinator, processes, index)

from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

devices = np.array(jax.devices()).reshape(2, -1)
mesh = Mesh(devices, ("replica", "model"))
weights = NamedSharding(mesh, P(None, "model"))
rows = NamedSharding(mesh, P("replica", None))
LAYERS, BATCH = 4, 64


def loss(params, x):
    for w in params:
        x = jnp.tanh(x @ w) + x
    return (x**2).mean()


@partial(jax.jit, donate_argnums=0)
def step(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return [w - 0.01 * g for w, g in zip(params, grads, strict=True)], value


def place(value, sharding):
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


rng = np.random.default_rng(0)
params = [place(rng.random((width, width), np.float32) / width, weights) for _ in range(LAYERS)]
x = place(rng.random((BATCH, width), np.float32), rows)
times = []
for number in range(steps + 5):
    start = time.perf_counter()
    params, value = step(params, x)
    jax.block_until_ready((params, value))
    if number >= 5:
        times.append((time.perf_counter() - start) * 1e3)
# One step ahead, as a loop that shows its loss: with a long queue of collectives plain JAX may stall.
start = time.perf_counter()
for _ in range(steps):
    former = value
    params, value = step(params, x)
    former.block_until_ready()
jax.block_until_ready((params, value))
pipelined = (time.perf_counter() - start) / steps * 1e3
if jax.process_index() == 0:
    print(json.dumps({"step_ms": statistics.median(times), "pipelined_ms": pipelined}))
