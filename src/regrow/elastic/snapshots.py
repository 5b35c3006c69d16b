"""One snapshot: made from a state, verified, and put back onto a mesh. See `Snapshotter`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from regrow.elastic.causes import explain
from regrow.elastic.digests import digest
from regrow.elastic.health import is_slice_down
from regrow.elastic.replicas import PINNED, Capture, Group, capture, device_memory, moved
from regrow.elastic.trees import Tree, own_copy
from regrow.errors import SnapshotError, UsageError

_logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state in host memory.

    Attributes:
        step: Its step.
        shape: The state; of its arrays only shape and dtype, of other leaves a copy.
        groups: The copies of its arrays.
    """

    step: int
    shape: Tree
    groups: tuple[Group, ...]

    @property
    def replicas(self) -> int:
        """How many copies of the arrays there are."""
        return len(self.groups[0].copies) if self.groups else 0


@final
@dataclass(frozen=True, slots=True)
class Begun:
    """A snapshot that is being made.

    Attributes:
        step: Its step.
        shape: What the snapshot keeps beside the copies of its arrays.
        captures: The copies of its arrays that are being made.
    """

    step: int
    shape: Tree
    captures: tuple[Capture, ...]

    def finished(self) -> Snapshot:
        """The snapshot when all of it is there.

        Raises:
            JaxRuntimeError: A slice was lost before it was.
        """
        groups = tuple(capture.finished() for capture in self.captures)
        for group in groups:
            _tell_divergence(self.step, group)
        return Snapshot(self.step, self.shape, groups)


def begin(step: int, state: Any, axis_index: int) -> Begun:
    """Begins a snapshot of a state; nothing is waited for, and the state may be given away then.

    Raises:
        UsageError: The state cannot be saved; names the leaf by its path.
    """
    tree = Tree.of(state)
    arrays = {
        place: (path, _data(path, leaf))
        for place, (path, leaf) in enumerate(zip(tree.paths, tree.leaves, strict=True))
        if isinstance(leaf, jax.Array)
    }
    captures = capture(arrays, axis_index)
    alone = (
        {} if captures else {place: jax.device_get(array) for place, (_, array) in arrays.items()}
    )
    leaves = [
        _abstract(leaf, alone.get(place)) if place in arrays else own_copy(path, leaf)
        for place, (path, leaf) in enumerate(zip(tree.paths, tree.leaves, strict=True))
    ]
    return Begun(step, Tree(tree.paths, tuple(leaves), tree.structure), captures)


def sound_replicas(snapshot: Snapshot) -> list[int]:
    """The replicas of which every array is there and has the contents that were saved.

    Raises:
        SnapshotError: There is none; says why of each.
    """
    sound = list(range(snapshot.replicas))
    reasons: dict[int, str] = {}
    for group in snapshot.groups:
        hashes = {replica: _begin_hashes(group, replica) for replica in sound}
        for replica in tuple(sound):
            reason = _fault(group, replica, hashes[replica])
            if reason is not None:
                sound.remove(replica)
                reasons[replica] = reason
                _logger.warning("snapshot of step %d: %s", snapshot.step, reason)
    if snapshot.groups and not sound:
        told = "; ".join(reasons.values())
        raise SnapshotError(f"no replica of the snapshot of step {snapshot.step} is left: {told}")
    return sound


def restore(
    snapshot: Snapshot, replicas: Sequence[int], target: Tree, axis_index: int | None
) -> tuple[Any, Snapshot | None]:
    """Puts a snapshot onto the target's shardings, from these replicas of it, chunk by chunk.

    Nothing of the snapshot is given away.

    Args:
        snapshot: The snapshot.
        replicas: Which replicas of it to read.
        target: Abstract arrays with shardings in place of the arrays.
        axis_index: Which mesh axis is that of the replicas, for a new snapshot of what was
            restored; None: none is wanted.

    Returns:
        The state, and its snapshot; None also where the target's layout allows none.

    Raises:
        JaxRuntimeError: A slice was lost meanwhile; the snapshot is as good as before.
    """
    pinned: dict[int, jax.Array] = {}
    restored: dict[int, jax.Array] = {}
    for group in snapshot.groups:
        for part in group.chunks:
            joined = group.joined(replicas, part)
            shardings = [
                _target_sharding(target.leaves[place], array)
                for place, array in zip(group.places[part], joined, strict=True)
            ]
            on_host = moved(joined, [one.with_memory_kind(PINNED) for one in shardings])
            on_device = jax.device_put(on_host, shardings, may_alias=False)
            jax.block_until_ready(on_device)  # type: ignore[no-untyped-call]
            restored |= zip(group.places[part], on_device, strict=True)
            if axis_index is not None:
                pinned |= zip(group.places[part], on_host, strict=True)
    again = None if axis_index is None else _anew(snapshot, restored, pinned, axis_index)
    leaves = [_concrete(snapshot, target, place, restored) for place in range(len(target.leaves))]
    return target.tree(leaves), again


def _anew(
    snapshot: Snapshot,
    restored: dict[int, jax.Array],
    pinned: dict[int, jax.Array],
    axis_index: int,
) -> Snapshot | None:
    named = {place: (snapshot.shape.paths[place], array) for place, array in restored.items()}
    try:
        captures = capture(named, axis_index, pinned)
    except UsageError as error:
        _logger.info("the former snapshot stays: what was loaded allows no new one (%s)", error)
        return None
    return Begun(snapshot.step, snapshot.shape, captures).finished() if captures else None


def _begin_hashes(group: Group, replica: int) -> Any:
    """Hashes that are being computed, or the error that they cannot be."""
    try:
        return digest(group.copies[replica])
    except jax.errors.JaxRuntimeError as error:
        return error


def _fault(group: Group, replica: int, hashes: Any) -> str | None:
    """Why a replica cannot be used; None: these arrays of it are sound."""
    try:
        if isinstance(hashes, Exception):
            raise hashes
        different = group.different(replica, hashes)
    except jax.errors.JaxRuntimeError as error:
        if not is_slice_down(error):
            raise
        return f"replica {replica} is lost ({explain(error) or str(error).splitlines()[0]})"
    if different:
        return f"replica {replica} is corrupt at {_listed(different)}; it is not used"
    return None


def _listed(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 4} more" if len(paths) > 4 else ""
    return ", ".join(paths[:4]) + more


def _tell_divergence(step: int, group: Group) -> None:
    """Replicas of one state must be equal; that they are not was so before the snapshot."""
    for replica in range(1, len(group.copies)):
        different = group.different(replica, group.hashes[0])
        if different:
            told = _listed(different)
            _logger.error("step %d: replicas 0 and %d differ at %s", step, replica, told)


def _data(path: str, array: jax.Array) -> jax.Array:
    """The array itself, or the numbers behind an array of PRNG keys."""
    if array.is_deleted():
        raise UsageError(f"{path}: the array was donated or deleted before it was saved")
    return jax.random.key_data(array) if _is_key(array) else array


def _is_key(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jax.dtypes.prng_key))


def _abstract(array: jax.Array, value: Any) -> Any:
    """What the snapshot keeps of an array beside its copies; its value, if there are no copies."""
    return _Alone(value, array) if value is not None else jax.typeof(array)


@final
class _Alone:
    """The value of an array without a mesh, in the memory of this process."""

    def __init__(self, value: Any, array: jax.Array) -> None:
        self.value = value
        self.shape, self.dtype = array.shape, array.dtype


def _target_sharding(wanted: Any, array: jax.Array) -> Any:
    sharding = getattr(wanted, "sharding", None)
    if sharding is None:
        return device_memory(array.sharding)
    return sharding


def _concrete(snapshot: Snapshot, target: Tree, place: int, restored: dict[int, jax.Array]) -> Any:
    kept = snapshot.shape.leaves[place]
    array = restored.get(place)
    sharding = getattr(target.leaves[place], "sharding", None)
    if isinstance(kept, _Alone):
        array = jax.device_put(kept.value, sharding)
    elif array is None:
        mine = own_copy(snapshot.shape.paths[place], kept)
        is_numpy = isinstance(kept, np.ndarray) and sharding is not None
        return jax.device_put(mine, sharding) if is_numpy else mine
    return jax.random.wrap_key_data(array, dtype=kept.dtype) if _is_key(kept) else array
