"""From the loss of a slice to the first step without it, where the program for that is not there.

    first_step.py ahead|not VICTIM…

Kills one slice after the other, each when the one before has returned. Prints a JSON list: for each
loss the milliseconds from the kill to the end of the first step, those of them in which programs were
traced, lowered and compiled, and how many were compiled. The loop is that of the documentation, the model that of
`examples/byte_model.py`.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from byte_model import ModelSize, init_state, make_train_step

from regrow.control import request
from regrow.elastic import Snapshotter, at_step, manager

AHEAD = sys.argv[1] == "ahead"
VICTIMS = [int(word) for word in sys.argv[2:]]
CONTROL = str(
    Path(os.environ["JAX_BACKEND_TARGET"].removeprefix("grpc://unix:")).parent / "control.sock"
)
OPTIMIZER = optax.adamw(2e-3, weight_decay=0.01)
SIZE = ModelSize()
ROWS = 12
STEPS = 6

logging.getLogger("regrow.elastic").setLevel(logging.ERROR)
elastic_manager = manager.Manager()
snapshotter = Snapshotter()
found: list[dict[str, float]] = []
killed: dict[str, Any] = {}


def mesh_of(chosen: list[jax.Device]) -> Mesh:
    slices = len({device.slice_index for device in chosen})
    return Mesh(np.array(chosen).reshape(slices, -1), ("replica", "model"))


def abstract(state: Any) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


shapes = abstract(init_state(mesh_of(jax.devices()), SIZE, OPTIMIZER))


def on(mesh: Mesh) -> Any:
    """The state's shapes on a mesh."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, x.sharding.spec)
        ),
        shapes,
    )


@elastic_manager.compile_ahead
def train_step(chosen: list[jax.Device]) -> Any:
    mesh = mesh_of(chosen)
    rows = jax.ShapeDtypeStruct((ROWS, SIZE.context + 1), np.int32)
    return make_train_step(mesh, OPTIMIZER).lower(on(mesh), rows).compile()


def kill(victim: int) -> None:
    status = request(CONTROL, "status")
    killed.update(index=victim, compiled=status["compiled"], at=time.perf_counter())
    os.kill(status["slices"][victim]["hosts"][0]["pid"], signal.SIGKILL)


def took() -> None:
    """The first step after a loss has ended."""
    wall_s = time.perf_counter() - killed["at"]
    time.sleep(0.3)  # The head hears of the step's end by itself.
    status = request(CONTROL, "status")
    parts = status["timeline"]["events"][-1]["parts"]
    found.append(
        {
            "ms": 1e3 * wall_s,
            "compile_ms": 1e3 * parts["compile"],
            "compiled": status["compiled"] - killed["compiled"],
        }
    )
    request(CONTROL, "restore", index=killed["index"])
    request(CONTROL, "wait_healthy", timeout_s=60)
    killed.clear()


@elastic_manager.elastic_retry(minimum_slice_count=1, poll_interval=60, timeout=60)
def loop() -> None:
    mesh = mesh_of(elastic_manager.active_devices)
    batch = np.ones((ROWS, SIZE.context + 1), np.int32)
    if snapshotter.latest is None:
        state = init_state(mesh, SIZE, OPTIMIZER)
    else:
        state = snapshotter.load(on(mesh))
    step = train_step()
    for number in range(STEPS):
        at_step(number)
        state, loss = step(state, batch)
        loss.block_until_ready()
        if killed:
            took()
            raise manager.ScaleUpSignalError
    snapshotter.save(0, state)
    snapshotter.join(60)
    assert train_step.wait(120)
    if VICTIMS:
        kill(VICTIMS.pop(0))
        while True:
            state, loss = step(state, batch)
            loss.block_until_ready()


if not AHEAD:
    train_step.close()
loop()
print(json.dumps(found))
