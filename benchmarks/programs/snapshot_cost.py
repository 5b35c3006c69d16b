"""What snapshots cost a training step of about 50 ms, at several intervals. Prints a JSON object.

    snapshot_cost.py WIDTH SECONDS

Blocks of steps with snapshots at each interval and without any take turns, so that a busy machine
disturbs all alike. A block ends an interval after its last snapshot, when that has been taken.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from regrow.control import request
from regrow.elastic import Snapshotter

WIDTH, SECONDS = int(sys.argv[1]), float(sys.argv[2])
INTERVALS = (0, 1, 5, 20)
STEPS, LAYERS, BATCH = 20, 4, 64

logging.getLogger("regrow.elastic").setLevel(logging.ERROR)
slices = 1 + max(device.slice_index for device in jax.devices())
mesh = Mesh(np.array(jax.devices()).reshape(slices, -1), ("replica", "model"))
weights, rows = NamedSharding(mesh, P(None, "model")), NamedSharding(mesh, P("replica", None))
snapshotter = Snapshotter()


def loss(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = jnp.tanh(x @ w) + x
    return (x**2).mean()


@partial(jax.jit, donate_argnums=0)
def step(params: Any, x: jax.Array) -> Any:
    value, grads = jax.value_and_grad(loss)(params, x)
    return [w - 0.01 * g for w, g in zip(params, grads, strict=True)], value


rng = np.random.default_rng(0)
params = [
    jax.device_put(rng.random((WIDTH, WIDTH), np.float32) / WIDTH, weights) for _ in range(LAYERS)
]
x = jax.device_put(rng.random((BATCH, WIDTH), np.float32), rows)
nbytes = sum(w.nbytes for w in params)
taken = skipped = 0
CONTROL = str(
    Path(os.environ["JAX_BACKEND_TARGET"].removeprefix("grpc://unix:")).parent / "control.sock"
)
status = request(CONTROL, "status")
PIDS = [os.getpid(), status["pid"], *(one["hosts"][0]["pid"] for one in status["slices"])]
TICK_MS = 1e3 / os.sysconf("SC_CLK_TCK")


def processor_ms() -> float:
    """What client, head and workers have used."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in PIDS]
    return TICK_MS * sum(int(one[11]) + int(one[12]) for one in fields)


def block(interval: int) -> tuple[float, float]:
    """Milliseconds for a step, by the clock and of processors."""
    global params, taken, skipped
    began, used = time.perf_counter(), processor_ms()
    for number in range(STEPS):
        params, value = step(params, x)
        value.block_until_ready()
        if interval and number % interval == 0:
            saved = snapshotter.save(number, params)
            taken, skipped = taken + saved, skipped + (not saved)
    snapshotter.join(60)
    wall_ms = (time.perf_counter() - began) * 1e3
    return wall_ms / STEPS, (processor_ms() - used) / STEPS


for interval in INTERVALS:
    block(interval)
taken = skipped = 0
times: dict[int, list[tuple[float, float]]] = {interval: [] for interval in INTERVALS}
began = time.monotonic()
while time.monotonic() < began + SECONDS:
    for interval in INTERVALS:
        times[interval].append(block(interval))
figures: dict[str, float] = {"state_mb": nbytes / 2**20, "taken": taken, "skipped": skipped}
figures["rounds"] = len(times[0])
for interval, found in times.items():
    figures[f"step_ms_{interval}"] = statistics.median(wall for wall, _ in found)
    for which, name in enumerate(("percent", "cpu_percent")):
        ratios = [one[which] / two[which] for one, two in zip(found, times[0], strict=True)]
        figures[f"{name}_{interval}"] = 100 * (statistics.median(ratios) - 1)
print(json.dumps(figures))
