"""Training with a rank on every host of a TPU, and checkpoints: what `run_autoresume.py` runs by default.

Plain multi-controller JAX, data parallel over the hosts and tensor parallel within each. Whenever it is
started it goes on from the latest checkpoint in the directory of its attempt; a step's batch depends on
the number of the step alone, so the losses are the same however often it was started. The model is in
`../byte_model.py`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from byte_model import ModelSize, StandardLibrary, init_state, make_train_step
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from regrow.ray import AttemptId, current_attempt

PyTree = Any
OPTIMIZER = optax.adamw(2e-3, weight_decay=0.01)
REPORT_EVERY = 10


class Checkpoints:
    """The checkpoints of a job. Only the present attempt writes them: the next one waits for the block."""

    def __init__(self, attempt: AttemptId, every: int) -> None:
        self._attempt, self._every = attempt, every
        options = ocp.CheckpointManagerOptions(save_interval_steps=every, max_to_keep=2)
        with attempt.writing():  # it removes what an attempt has left unfinished
            self.manager = ocp.CheckpointManager(
                Path(attempt.directory) / "checkpoints", options=options
            )

    def latest(self, state: PyTree) -> tuple[PyTree, int]:
        """The state of the latest checkpoint and its step, or the given state and 0."""
        step = self.manager.latest_step()
        if step is None:
            return state, 0
        return self.manager.restore(step, args=ocp.args.StandardRestore(state)), step

    def save(self, step: int, state: PyTree, *, last: bool) -> None:
        """Writes a checkpoint if it is time for one."""
        if step % self._every and not last:
            return
        with self._attempt.writing():
            self.manager.save(step, args=ocp.args.StandardSave(state), force=True)
            self.manager.wait_until_finished()
        tell(f"checkpoint at step {step}")


def train(given: argparse.Namespace, attempt: AttemptId) -> None:
    """Trains to the last step."""
    mesh = Mesh(np.reshape(jax.devices(), (jax.process_count(), -1)), ("replica", "model"))
    size = ModelSize(given.layers, given.width, 4, given.context)
    windows = grain.MapDataset.source(StandardLibrary(size.context + 1)).seed(0).shuffle().repeat()
    batches = windows.batch(given.batch)
    by_replica = NamedSharding(mesh, PartitionSpec("replica"))
    train_step = make_train_step(mesh, OPTIMIZER)
    checkpoints = Checkpoints(attempt, given.checkpoint_every)
    state, first = checkpoints.latest(init_state(mesh, size, OPTIMIZER))
    tell(f"Starting training from step: {first} across {jax.device_count()} devices globally")
    for step in range(first + 1, given.steps + 1):
        batch = batches[step]
        placed = jax.make_array_from_callback(batch.shape, by_replica, batch.__getitem__)
        state, loss = train_step(state, placed)
        if step % REPORT_EVERY == 0 or step == first + 1:
            tell(f"{time.strftime('%H:%M:%S')} step {step} loss {float(loss):.4f}")
        checkpoints.save(step, state, last=step == given.steps)
        if step == given.steps:
            tell(f"final loss: {float(loss):.6f} ({float(loss).hex()})")
    checkpoints.manager.close()


def tell(text: str) -> None:
    """Prints on one host only."""
    if jax.process_index() == 0:
        print(text, flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Joins the other hosts and trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--batch", type=int, default=16, help="records, over all hosts")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--context", type=int, default=16)
    given = parser.parse_args(arguments)
    attempt = current_attempt()
    # A later attempt need not compile again.
    jax.config.update("jax_compilation_cache_dir", str(Path(attempt.directory) / "compilations"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.distributed.initialize()
    train(given, attempt)


if __name__ == "__main__":
    main()
