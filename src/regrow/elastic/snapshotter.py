"""`Snapshotter`: the training state in the host memory of every slice."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import jax

from regrow.elastic import progress, snapshots
from regrow.elastic.causes import explain
from regrow.elastic.snapshot_slot import SnapshotSlot, Ticket
from regrow.elastic.snapshots import Begun, Snapshot
from regrow.elastic.trees import Tree, check_target
from regrow.errors import SnapshotError, UsageError, WaitTimeout

_logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True)
class SnapshotMetadata:
    """What is known of a snapshot; has the fields of Orbax's `CheckpointMetadata`.

    Attributes:
        step: The step that it was saved with.
        path: Empty: it is in memory.
        metadata: None.
    """

    step: int
    path: Path = Path()
    metadata: None = None


@final
class Snapshotter:
    """Keeps the latest state in pinned host memory, a whole copy in each replica.

    A drop-in for `ocp.v1.training.pathways.Snapshotter`. What it does differently:

    * `load` gives nothing away until what it restored is committed: whatever is lost in the middle
      of it, the next `load` finds the snapshot as it was;
    * each replica is verified by content hashes, and one that is corrupt or lost yields to another;
    * state and target are compared leaf by leaf, before anything moves;
    * leaves on one device, PRNG keys and leaves that are no arrays are saved, too;
    * there are never more than two snapshots, the latest and the one that is being made.

    Its methods may be called from any thread.
    """

    def __init__(self, *, replica_axis_index: int = 0) -> None:
        """Makes one without a snapshot.

        Args:
            replica_axis_index: Which axis of the mesh has one index for each replica; usually a
                replica is a slice. Negative: from the end. Arrays must not be sharded over it.

        Raises:
            UsageError: It is no whole number.
        """
        if type(replica_axis_index) is not int:
            raise UsageError(
                f"replica_axis_index is {replica_axis_index!r}; it must be a whole number"
            )
        self.replica_axis_index = replica_axis_index
        self._slot: SnapshotSlot[Snapshot] = SnapshotSlot()
        self._skipped_said = 0

    @property
    def skipped(self) -> int:
        """How many saves were skipped because one was being made."""
        return self._slot.skipped

    @property
    def latest(self) -> SnapshotMetadata | None:
        """The snapshot that `load` would restore; None if there is none."""
        latest = self._slot.latest
        return None if latest is None else SnapshotMetadata(latest[0])

    def save(self, step: int, state: Any) -> bool:
        """Begins to copy a state to host memory, and returns; the state may be donated at once.

        When all of it is there, in every replica, it becomes the latest; if a slice is lost before,
        the former one stays.

        Args:
            step: The training step that it belongs to, a whole number (an array of one is waited for).
            state: A tree of arrays and other leaves. Arrays have a `NamedSharding` over a mesh, or
                lie on one device.

        Returns:
            False: one is being made, so this one is skipped. The log says so of the first; `join`
            says how many there were.

        Raises:
            UsageError: The state cannot be saved; names the leaf by its path. Or the step is no number.
            JaxRuntimeError: A slice that is needed is lost.
        """
        # Before anything has begun: a step that is an array may be on a lost slice.
        step = progress.whole(step)
        ticket = self._slot.begin(step)
        if ticket is None:
            self._say_skipped(step)
            return False
        try:
            progress.at_snapshot(step)
            with progress.phase("snapshot"):
                begun = snapshots.begin(step, state, self.replica_axis_index)
            # Not a daemon: one that is inside of JAX when the interpreter ends brings it down.
            threading.Thread(
                target=self._finish, args=(ticket, begun), name="regrow-snapshot", daemon=False
            ).start()
        except BaseException:
            self._slot.give_up(ticket)
            raise
        return True

    def load(self, abstract_state: Any, *, reset_snapshot_state: bool = True) -> Any:
        """Restores the latest snapshot.

        Args:
            abstract_state: The tree that was saved, with a `jax.ShapeDtypeStruct` with a sharding
                (or an array) in place of each array, and anything in place of other leaves.
            reset_snapshot_state: Whether the snapshot is laid out anew, too, so that each replica of
                the new mesh has a copy. A save that is under way then is dropped.

        Returns:
            The state on the shardings of `abstract_state`, complete.

        Raises:
            SnapshotError: There is no snapshot, or no replica of it is left (a `RuntimeError`).
            UsageError: It does not fit `abstract_state`; names the first leaf that differs.
            JaxRuntimeError: A slice was lost meanwhile. The snapshot is as good as before.
        """
        latest = self._slot.latest
        if latest is None:
            raise SnapshotError("No snapshots available to restore from.")
        step, snapshot = latest
        target = Tree.of(abstract_state)
        check_target(snapshot.shape, target)
        with progress.phase("load"):
            replicas = snapshots.sound_replicas(snapshot)
            axis = self.replica_axis_index if reset_snapshot_state else None
            state, again = snapshots.restore(snapshot, replicas, target, axis)
        if reset_snapshot_state:
            self._slot.replace(step, again or snapshot)
        progress.restored(step)
        return state

    def join(self, timeout: float | None = None) -> None:
        """Waits until no snapshot is being made.

        Args:
            timeout: How long, in seconds; None: until it has succeeded or failed.

        Raises:
            WaitTimeout: One is still being made.
        """
        if not self._slot.wait(timeout):
            raise WaitTimeout(f"the snapshot of step {self._slot.making}", timeout or 0.0)
        skipped = self.skipped
        if skipped > self._skipped_said:
            self._skipped_said = skipped
            _logger.warning(
                "%d snapshots were skipped so far: each takes longer than the time between two saves",
                skipped,
            )

    def _say_skipped(self, step: int) -> None:
        making, first = self._slot.making, self._skipped_said == 0
        self._skipped_said = self._skipped_said or 1
        _logger.log(
            logging.WARNING if first else logging.DEBUG,
            "no snapshot of step %d: that of step %s is being made; others are only counted",
            step,
            making,
        )

    def _finish(self, ticket: Ticket, begun: Begun) -> None:
        try:
            done = begun.finished()
        except jax.errors.JaxRuntimeError as error:
            self._slot.give_up(ticket)
            cause = explain(error) or str(error).splitlines()[0]
            latest = self._slot.latest
            stays = "there is none" if latest is None else f"that of step {latest[0]} stays"
            _logger.warning("no snapshot of step %d, %s: %s", ticket.step, stays, cause)
        except BaseException:
            self._slot.give_up(ticket)
            _logger.exception("the snapshot of step %d failed", ticket.step)
        else:
            if not self._slot.commit(ticket, done):
                _logger.info("the snapshot of step %d was overtaken by a load", ticket.step)
