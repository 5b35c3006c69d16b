"""The loop of the Pathways documentation with our parts, over 4 -> 3 -> 4 slices."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from cases import run_cases
from elastic_rig import DEVICES, LOST, case, kill, logged, mesh_of, restore, stop, there, whole
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from regrow.elastic import (
    ConstantGlobalBatch,
    GrainLoader,
    ScaledGlobalBatch,
    Snapshotter,
    at_step,
    manager,
    settle_checkpoints,
    snapshots,
)
from regrow.elastic.batches import Batch, BatchPolicy

RECORDS, WIDTH, TOTAL = 720, 8, 4
RNG = np.random.default_rng(5)
INPUTS = RNG.normal(size=(RECORDS, WIDTH)).astype(np.float32)
WANTED = (INPUTS @ RNG.normal(size=WIDTH)).astype(np.float32)
LEARNING_RATE = 0.05


class Source:
    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": np.int32(index), "x": INPUTS[index], "y": WANTED[index]}


def dataset() -> grain.MapDataset:
    return grain.MapDataset.source(Source()).seed(1).shuffle()


@jax.jit
def train_step(state: Any, batch: Any, rate: Any) -> tuple[Any, jax.Array]:
    def loss_of(w: jax.Array) -> jax.Array:
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(state["w"])
    momentum = 0.5 * state["momentum"] + gradient
    return {"w": state["w"] - rate * momentum, "momentum": momentum}, loss


@dataclass
class Run:
    """One training: what it is to do at which step, and what came of it."""

    policy: BatchPolicy
    steps: int
    acts: dict[int, Callable[[], None]] = field(default_factory=dict)
    waits: dict[int, Callable[[manager.Manager], bool]] = field(default_factory=dict)
    minimum: int | None = 1
    interval: int = 3
    checkpoints: Any = None
    losses: dict[int, float] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    slices: list[int] = field(default_factory=list)
    state: Any = None

    def train(self) -> Run:
        """Trains to the end."""
        self.manager = manager.Manager()
        self.snapshotter = Snapshotter()

        @self.manager.elastic_retry(
            minimum_slice_count=self.minimum,
            poll_interval=0.1,
            timeout=60,
            retry_policy=manager.ElasticRetryLimit(max_attempts=6),
            on_elastic_event_callback=self._settle if self.checkpoints else None,
        )
        def loop() -> Any:
            return self._loop()

        self.state = jax.device_get(loop())
        self.snapshotter.join(60)
        return self

    def _settle(self) -> None:
        settle_checkpoints(self.checkpoints)

    def _begin(self) -> tuple[Mesh, Any, Any, Batch, GrainLoader]:
        active = self.manager.active_slice_count
        self.slices.append(active)
        mesh = Mesh(
            np.asarray(self.manager.active_devices).reshape(active, -1), ("replica", "model")
        )
        everywhere = NamedSharding(mesh, P())
        zeros = np.zeros(WIDTH, np.float32)
        state = jax.device_put({"w": zeros, "momentum": zeros}, everywhere)
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), state
        )
        batch = self.policy.batch(active, TOTAL)
        return mesh, state, abstract, batch, GrainLoader(dataset(), batch.records)

    def _loop(self) -> Any:
        mesh, state, abstract, batch, loader = self._begin()
        step = 0
        if self.snapshotter.latest is not None:
            self.snapshotter.join(60)
            got = self.snapshotter.load({"state": abstract, "step": 0, "data": loader.get_state()})
            state, step = got["state"], got["step"] + 1
            loader.set_state(got["data"])
        while step < self.steps:
            at_step(step)
            self.acts.pop(step, lambda: None)()
            rows = jax.device_put(next(loader), NamedSharding(mesh, P("replica")))
            state, loss = train_step(state, rows, LEARNING_RATE * batch.learning_rate_factor)
            self.losses[step] = float(loss)
            self.ids[step] = rows_ids = np.asarray(rows["id"]).tolist()
            assert [int(dataset()[i]["id"]) for i in loader.record_ids] == rows_ids
            if step % self.interval == 0:
                self.snapshotter.save(
                    step, {"state": state, "step": step, "data": loader.get_state()}
                )
                # Which snapshot is the latest at a kill must not be a matter of luck here.
                self.snapshotter.join(60)
            if self.checkpoints is not None:
                self.checkpoints.save(step, args=ocp.args.StandardSave(state))
            self._wait(step)
            if self.manager.available_inactive_slices:
                self.manager.active_slice_indices |= self.manager.available_inactive_slices
                position = loader.get_state()
                loader.close()
                mesh, _, abstract, batch, loader = self._begin()
                loader.set_state(position)
                state = jax.device_put(state, jax.tree.map(lambda x: x.sharding, abstract))
            step += 1
        loader.close()
        return state

    def _wait(self, step: int) -> None:
        until = self.waits.pop(step, lambda _: True)
        deadline = time.monotonic() + 60
        while not until(self.manager):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def used(self) -> list[int]:
        """The records of all steps that count, in order."""
        return [number for step in sorted(self.ids) for number in self.ids[step]]


def all_back(of: manager.Manager) -> bool:
    return of.active_slice_count + len(of.available_inactive_slices) == TOTAL


def order() -> list[int]:
    return [int(dataset()[place]["id"]) for place in range(RECORDS)]


@case
def the_constant_batch_over_4_3_4_slices_equals_the_undisturbed_run() -> None:
    plain = Run(ConstantGlobalBatch.at_least(10, TOTAL), steps=14).train()
    assert plain.slices == [4]
    run = Run(
        ConstantGlobalBatch(12),
        steps=14,
        acts={5: lambda: kill(2), 9: lambda: restore(2)},
        waits={10: all_back},
    ).train()
    assert run.slices == [4, 3, 4]
    assert run.ids == plain.ids, "each batch has the same records"
    assert run.used() == order()[: 14 * 12], "no record is left out or used twice"
    for step, loss in plain.losses.items():
        # Only the order in which four numbers are added has changed.
        assert np.isclose(run.losses[step], loss, rtol=1e-5), (step, run.losses[step], loss)
    assert run.losses[13] < 0.5 * run.losses[0]


def kill_and_restore(index: int) -> None:
    kill(index)
    restore(index)


@case
def a_pause_gives_the_same_bits() -> None:
    plain = Run(ConstantGlobalBatch(12), steps=8).train()
    acts = {5: lambda: kill_and_restore(1)}
    run = Run(ConstantGlobalBatch(12), steps=8, acts=acts, minimum=None).train()
    assert run.slices == [4, 4]
    assert run.ids == plain.ids
    assert run.losses == plain.losses
    for name in ("w", "momentum"):
        assert run.state[name].tobytes() == plain.state[name].tobytes()


@case
def the_scaled_batch_uses_each_record_once() -> None:
    run = Run(
        ScaledGlobalBatch(3),
        steps=14,
        acts={5: lambda: kill(3), 9: lambda: restore(3)},
        waits={10: all_back},
    ).train()
    assert run.slices == [4, 3, 4]
    sizes = [len(run.ids[step]) for step in range(14)]
    assert sizes == [12] * 4 + [9] * 7 + [12] * 3
    assert run.used() == order()[: sum(sizes)]


@case
def a_second_slice_dies_in_the_middle_of_the_recovery() -> None:
    stock = snapshots.moved
    calls = iter(range(100))

    def moved(*args: Any) -> Any:
        if next(calls) == 0:
            kill(0)
        return stock(*args)

    snapshots.moved = moved
    try:
        with logged() as log:
            run = Run(ConstantGlobalBatch(12), steps=10, acts={5: lambda: kill(2)}).train()
    finally:
        snapshots.moved = stock
    assert run.slices == [4, 3, 2]
    assert run.used() == order()[: 10 * 12]
    assert "attempt 1 of at most 6 ended: slice 2, incarnation" in log.text
    assert "was lost in step 5 (step)" in log.text
    assert "attempt 2 of at most 6 ended: slice 0, incarnation" in log.text
    assert "was lost in step 5 (load)" in log.text


def checkpoint_manager(folder: str) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(
        save_interval_steps=1, max_to_keep=3, enable_async_checkpointing=True
    )
    return ocp.CheckpointManager(folder, options=options)


def computed(mesh: Mesh, shift: float) -> dict[str, jax.Array]:
    """A state that only the slices have: nothing of it is in this process."""
    state = {name: there(np.zeros((64, 64), np.float32), mesh, None, None) for name in "abcdef"}
    add = jax.jit(lambda tree: jax.tree.map(lambda x: x + shift, tree))
    return jax.block_until_ready(add(state))


def restored(checkpoints: ocp.CheckpointManager, mesh: Mesh) -> float:
    everywhere = NamedSharding(mesh, P())
    target = {
        name: jax.ShapeDtypeStruct((64, 64), np.float32, sharding=everywhere) for name in "abcdef"
    }
    got = checkpoints.restore(checkpoints.latest_step(), args=ocp.args.StandardRestore(target))
    values = {float(np.unique(np.asarray(x)).item()) for x in got.values()}
    assert len(values) == 1
    return values.pop()


def save_and_lose(checkpoints: ocp.CheckpointManager, state: Any, moment: str) -> bool:
    """Begins the checkpoint of step 1 and kills slice 0 at that moment; whether it was completed."""
    if moment == "before":
        kill(0)
    elif moment == "during":
        stop(0)
        threading.Timer(0.5, kill, (0,)).start()
    with contextlib.suppress(LOST):
        checkpoints.save(1, args=ocp.args.StandardSave(state))
        if moment == "after":
            kill(0)
        checkpoints.wait_until_finished()
        return True
    return False


@case
def a_slice_lost_in_the_middle_of_a_checkpoint_leaves_the_former() -> None:
    for moment in ("before", "during", "after"):
        whole()
        with tempfile.TemporaryDirectory() as folder, checkpoint_manager(folder) as checkpoints:
            mesh, rest = mesh_of(0, 1, 2, 3), mesh_of(1, 2, 3)
            checkpoints.save(0, args=ocp.args.StandardSave(computed(mesh, 1.0)))
            checkpoints.wait_until_finished()
            completed = save_and_lose(checkpoints, computed(mesh, 2.0), moment)
            # What was read from the slices before the loss is written out after it.
            assert completed == (moment == "after"), moment
            assert settle_checkpoints(checkpoints) == int(completed)
            assert restored(checkpoints, rest) == (2.0 if completed else 1.0)
            assert checkpoints.save(2, args=ocp.args.StandardSave(computed(rest, 3.0)))
            checkpoints.wait_until_finished()
            assert checkpoints.latest_step() == 2
            assert restored(checkpoints, rest) == 3.0


@case
def checkpoints_beside_snapshots() -> None:
    with tempfile.TemporaryDirectory() as folder, checkpoint_manager(folder) as checkpoints:
        run = Run(
            ConstantGlobalBatch(12), steps=8, acts={5: lambda: kill(0)}, checkpoints=checkpoints
        ).train()
        checkpoints.wait_until_finished()
        assert run.slices == [4, 3]
        assert run.used() == order()[: 8 * 12]
        assert checkpoints.latest_step() == 7
        got = checkpoints.restore(7, args=ocp.args.StandardRestore())
        assert np.array_equal(got["w"], run.state["w"])
    assert len(DEVICES) == TOTAL


if __name__ == "__main__":
    sys.exit(run_cases())
