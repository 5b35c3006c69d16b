"""Elastic training: slices may die and return, and the training goes on.

    regrow run --slices 3 --devices-per-slice 2 --chaos kill:1@25s examples/elastic_training.py

The loop is the one of the Pathways documentation with its blanks filled in. It knows nothing of what
is going to happen to the slices: `elastic_retry` starts it again on those that are left, Orbax's
`Snapshotter` holds the training state in the memory of every slice, and grain's `ElasticIterator`
holds one position in the data that is good for any number of slices. The model is in `byte_model.py`
and what you see is in `training_report.py`.
"""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pathwaysutils
from byte_model import ModelSize, init_state, make_iterator, make_train_step
from pathwaysutils.elastic import manager
from training_report import TrainingReport

from regrow.elastic import record

OPTIMIZER = optax.adamw(2e-3, weight_decay=0.01)


@dataclass(frozen=True)
class Settings:
    """What the command line decides."""

    steps: int
    snapshot_interval: int
    poll_interval_s: float
    batch: int
    size: ModelSize


def active_devices(elastic_manager: manager.Manager) -> list[jax.Device]:
    """The devices of the active slices in order of slices (newer pathwaysutils have this as an attribute)."""
    return [
        device
        for index in sorted(elastic_manager.active_slice_indices)
        for device in elastic_manager.slice_to_devices[index]
    ]


def create_mesh(elastic_manager: manager.Manager, devices_per_slice: int) -> jax.sharding.Mesh:
    """One replica a slice; the model is split over the devices of a slice."""
    device_array = np.asarray(active_devices(elastic_manager)).reshape(
        (elastic_manager.active_slice_count, devices_per_slice)
    )
    return jax.sharding.Mesh(device_array, axis_names=("replica", "model"))


def position(data_iterator: Any) -> int:
    """The number of the next record in the data."""
    return int(data_iterator.get_state()["global_next_index"])


def initialize_training_loop(
    mesh: jax.sharding.Mesh, settings: Settings
) -> tuple[Any, Any, Callable[..., Any], Any]:
    """The first state, its shapes and shardings, the compiled step and the data, for a mesh."""
    state = init_state(mesh, settings.size, OPTIMIZER)
    abstract_state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    data_iterator = make_iterator(settings.size.context, settings.batch)
    return state, abstract_state, make_train_step(mesh, OPTIMIZER), data_iterator


def train(
    elastic_manager: manager.Manager,
    devices_per_slice: int,
    settings: Settings,
    report: TrainingReport,
) -> Any:
    """Trains to the last step, whatever happens to the slices; returns the final state."""
    snapshotter = ocp.v1.training.pathways.Snapshotter(replica_axis_index=0)
    retry_limit = manager.ElasticRetryLimit(max_attempts=10)

    def retry_policy(attempt: int, error: Exception) -> bool:
        report.slice_lost(error)
        return retry_limit(attempt, error)

    @elastic_manager.elastic_retry(
        minimum_slice_count=1,
        poll_interval=settings.poll_interval_s,
        timeout=300,
        retry_policy=retry_policy,
    )
    def run_training_loop() -> Any:
        report.slices(elastic_manager.active_slice_indices)
        mesh = create_mesh(elastic_manager, devices_per_slice)
        state, abstract_state, jitted_train_step, data_iterator = initialize_training_loop(
            mesh, settings
        )
        step = 0

        # Restore from the latest in-memory snapshot after a slice failure.
        if snapshotter.latest is not None:
            snapshotter.join()
            restored = snapshotter.load(
                {
                    "state": abstract_state,
                    "step": step,
                    "iterator_state": data_iterator.get_state(),
                }
            )
            state = restored["state"]
            step = int(restored["step"]) + 1
            data_iterator.set_state(restored["iterator_state"])
            report.restored(step)

        while step < settings.steps:
            first = position(data_iterator)
            batch = next(data_iterator)
            state, loss = jitted_train_step(state, batch)
            # Reading the loss waits for the step: here a slice that died becomes an error.
            report.step(step, float(loss))
            # Only for whoever wants to compare runs (`regrow prove`).
            record(step, loss, state, range(first, position(data_iterator)))

            if step % settings.snapshot_interval == 0:
                snapshotter.save(
                    step,
                    {
                        "state": state,
                        "step": step,
                        "iterator_state": data_iterator.get_state(),
                    },
                )

            # If replacement slices are healthy, place the state onto the larger mesh.
            if elastic_manager.available_inactive_slices:
                report.slices_back(elastic_manager.available_inactive_slices)
                elastic_manager.active_slice_indices |= elastic_manager.available_inactive_slices
                mesh = create_mesh(elastic_manager, devices_per_slice)
                iterator_state = data_iterator.get_state()
                _, abstract_state, jitted_train_step, data_iterator = initialize_training_loop(
                    mesh, settings
                )
                data_iterator.set_state(iterator_state)
                state_shardings = jax.tree.map(lambda x: x.sharding, abstract_state)
                state = jax.device_put(state, state_shardings)
                report.slices(elastic_manager.active_slice_indices)

            step += 1

        return state

    state = run_training_loop()
    snapshotter.join()
    return state


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Trains a byte-level transformer elastically.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--snapshot-interval", type=int, default=10, help="in steps")
    parser.add_argument("--poll-interval", type=float, default=0.5, help="of slices, in seconds")
    parser.add_argument("--batch", type=int, default=12, help="rounded up to suit any slice count")
    parser.add_argument("--layers", type=int, default=ModelSize.layers)
    parser.add_argument("--width", type=int, default=ModelSize.width)
    parser.add_argument("--context", type=int, default=ModelSize.context)
    parser.add_argument("--out", type=Path, default=Path("training-output"), help="a folder")
    return parser.parse_args()


def main() -> None:
    """Trains, then draws and tells how it went."""
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    # What the libraries log of an elastic event is long; it is kept, but not on the screen.
    logging.basicConfig(
        filename=arguments.out / "log.txt", filemode="w", level=logging.INFO, force=True
    )
    pathwaysutils.initialize()

    elastic_manager = manager.Manager()
    slice_count = elastic_manager.total_slice_count
    # Every number of live slices has to be able to share the batch evenly.
    shares = math.lcm(*range(1, slice_count + 1))
    settings = Settings(
        steps=arguments.steps,
        snapshot_interval=arguments.snapshot_interval,
        poll_interval_s=arguments.poll_interval,
        batch=-(-arguments.batch // shares) * shares,
        size=ModelSize(arguments.layers, arguments.width, 4, arguments.context),
    )
    with TrainingReport(settings.steps, elastic_manager.all_slice_indices) as report:
        train(elastic_manager, jax.device_count() // slice_count, settings, report)
    elastic_manager.close()
    report.summarize(arguments.out)


if __name__ == "__main__":
    main()
