"""Elastic training: slices may die and return, and the training goes on.

    regrow run --slices 3 --devices-per-slice 2 --chaos kill:1@25s examples/elastic_training.py

The loop in `train` is the one of the Pathways documentation with its blanks filled in. It knows nothing
of what is going to happen to the slices: `elastic_retry` starts it again on those that are left, Orbax's
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


def create_mesh(elastic_manager: manager.Manager) -> jax.sharding.Mesh:
    """One replica a slice; the model is split over the devices of a slice."""
    slices = elastic_manager.active_slice_count
    device_array = np.asarray(active_devices(elastic_manager)).reshape((slices, -1))
    return jax.sharding.Mesh(device_array, axis_names=("replica", "model"))


def abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    """What an array is like, without what is in it."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


@dataclass
class Training:
    """A training as it is laid out over a mesh."""

    step: int
    state: Any
    train_step: Callable[..., Any]
    data: Any

    @classmethod
    def first(cls, mesh: jax.sharding.Mesh, settings: Settings) -> Training:
        """One that has not taken a step."""
        return cls(
            step=0,
            state=init_state(mesh, settings.size, OPTIMIZER),
            train_step=make_train_step(mesh, OPTIMIZER),
            data=make_iterator(settings.size.context, settings.batch),
        )

    def take_step(self) -> float:
        """Trains on one batch; returns the loss."""
        first = self.position()
        self.state, loss = self.train_step(self.state, next(self.data))
        # Reading the loss waits for the step: here a slice that died becomes an error.
        value = float(loss)
        # Only for whoever wants to compare runs (`regrow prove`).
        record(self.step, loss, self.state, range(first, self.position()))
        return value

    def position(self) -> int:
        """The number of the next record in the data."""
        return int(self.data.get_state()["global_next_index"])

    def snapshot(self) -> dict[str, Any]:
        """What brings it back after the loss of a slice."""
        return {"state": self.state, "step": self.step, "iterator_state": self.data.get_state()}

    def restore(self, snapshotter: Any) -> None:
        """Goes on after the step of the latest snapshot, whose state is laid out as the present one."""
        snapshotter.join()
        restored = snapshotter.load(self.snapshot() | {"state": jax.tree.map(abstract, self.state)})
        self.state = restored["state"]
        self.step = int(restored["step"]) + 1
        self.data.set_state(restored["iterator_state"])

    def move_to(self, mesh: jax.sharding.Mesh, settings: Settings) -> Training:
        """The same training on another mesh, no step lost."""
        moved = Training.first(mesh, settings)
        moved.step = self.step
        moved.state = jax.device_put(self.state, jax.tree.map(lambda x: x.sharding, moved.state))
        moved.data.set_state(self.data.get_state())
        return moved


def train(elastic_manager: manager.Manager, settings: Settings, report: TrainingReport) -> Any:
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
        training = Training.first(create_mesh(elastic_manager), settings)

        # After the loss of a slice: go on from the latest snapshot, on the slices that are left.
        if snapshotter.latest is not None:
            training.restore(snapshotter)
            report.restored(training.step)

        while training.step < settings.steps:
            loss = training.take_step()
            report.step(training.step, loss)
            if training.step % settings.snapshot_interval == 0:
                snapshotter.save(training.step, training.snapshot())

            # Slices that were lost are healthy again: take them back.
            if returned := elastic_manager.available_inactive_slices:
                report.slices_back(returned)
                elastic_manager.active_slice_indices |= returned
                training = training.move_to(create_mesh(elastic_manager), settings)
                report.slices(elastic_manager.active_slice_indices)

            training.step += 1
        return training.state

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
    # Every number of live slices has to be able to share the batch evenly.
    shares = math.lcm(*range(1, elastic_manager.total_slice_count + 1))
    settings = Settings(
        steps=arguments.steps,
        snapshot_interval=arguments.snapshot_interval,
        poll_interval_s=arguments.poll_interval,
        batch=-(-arguments.batch // shares) * shares,
        size=ModelSize(arguments.layers, arguments.width, 4, arguments.context),
    )
    with TrainingReport(settings.steps, elastic_manager.all_slice_indices) as report:
        train(elastic_manager, settings, report)
    elastic_manager.close()
    report.summarize(arguments.out)


if __name__ == "__main__":
    main()
