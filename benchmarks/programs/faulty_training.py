"""A training that meets faults, by one of two ways of recovery. Prints the time of each step.

    faulty_training.py elastic|restart FOLDER

`elastic` goes on with the slices that are left and the latest snapshot (`regrow.elastic`). `restart`
ends at a loss; whoever started it starts it again, and it waits until all slices are back and loads the
latest checkpoint of Orbax's CheckpointManager from FOLDER. Both save every SAVE_EVERY steps and write a
line `STEP TIME` for each step, TIME by the monotonic clock, until they are ended. The model is that of
`examples/byte_model.py`; the server keeps compiled programs for both.
"""

from __future__ import annotations

import logging
import os
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

SAVE_EVERY = 10
OPTIMIZER = optax.adamw(2e-3, weight_decay=0.01)
SIZE = ModelSize()
ROWS = 12
HOW, FOLDER = sys.argv[1], Path(sys.argv[2])
logging.getLogger("regrow.elastic").setLevel(logging.ERROR)


def mesh_of(chosen: list[jax.Device]) -> Mesh:
    slices = len({device.slice_index for device in chosen})
    return Mesh(np.array(chosen).reshape(slices, -1), ("replica", "model"))


def batch(step: int) -> Any:
    random = np.random.default_rng(step)
    return random.integers(0, 256, (ROWS, SIZE.context + 1), np.int32)


def abstract(state: Any, mesh: Mesh) -> Any:
    def on_mesh(x: Any) -> Any:
        sharding = NamedSharding(mesh, x.sharding.spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(on_mesh, state)


def told(step: int, loss: jax.Array) -> None:
    float(loss)  # Here a lost slice becomes an error.
    print(step, time.monotonic(), flush=True)


def restart() -> None:
    import orbax.checkpoint as ocp

    mesh = mesh_of(jax.devices())
    state = init_state(mesh, SIZE, OPTIMIZER)
    checkpoints = ocp.CheckpointManager(
        FOLDER, options=ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=SAVE_EVERY)
    )
    step = 0
    if checkpoints.latest_step() is not None:
        step = checkpoints.latest_step() + 1
        target = ocp.args.StandardRestore(abstract(state, mesh))
        state = checkpoints.restore(step - 1, args=target)
    train = make_train_step(mesh, OPTIMIZER)
    while True:
        state, loss = train(state, batch(step))
        told(step, loss)
        checkpoints.save(step, args=ocp.args.StandardSave(state))
        step += 1


def elastic() -> None:
    from regrow.elastic import Snapshotter, at_step, manager

    elastic_manager = manager.Manager()
    snapshotter = Snapshotter()
    shapes = init_state(mesh_of(jax.devices()), SIZE, OPTIMIZER)
    shapes = abstract(shapes, mesh_of(jax.devices()))

    @elastic_manager.compile_ahead
    def train_step(chosen: list[jax.Device]) -> Any:
        mesh = mesh_of(chosen)
        return make_train_step(mesh, OPTIMIZER).lower(abstract(shapes, mesh), batch(0)).compile()

    @elastic_manager.elastic_retry(minimum_slice_count=1, poll_interval=0.5, timeout=300)
    def loop() -> None:
        mesh = mesh_of(elastic_manager.active_devices)
        train, step = train_step(), 0
        if snapshotter.latest is None:
            state = init_state(mesh, SIZE, OPTIMIZER)
        else:
            got = snapshotter.load({"state": abstract(shapes, mesh), "step": 0})
            state, step = got["state"], got["step"] + 1
        while True:
            at_step(step)
            state, loss = train(state, batch(step))
            told(step, loss)
            if step % SAVE_EVERY == 0:
                snapshotter.save(step, {"state": state, "step": step})
            if elastic_manager.available_inactive_slices:
                elastic_manager.active_slice_indices |= elastic_manager.available_inactive_slices
                mesh, train = mesh_of(elastic_manager.active_devices), train_step()
                state = jax.device_put(
                    state, jax.tree.map(lambda x: x.sharding, abstract(shapes, mesh))
                )
            step += 1

    loop()


try:
    {"elastic": elastic, "restart": restart}[HOW]()
except jax.errors.JaxRuntimeError as error:
    print(str(error).splitlines()[0][:200], file=sys.stderr)
    os._exit(75)
