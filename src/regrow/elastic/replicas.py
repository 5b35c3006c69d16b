"""Copies of a state's arrays in host memory, one for each replica, and the way back.

A replica is one index of the replica axis of a mesh; its copy lies on the devices of that index only,
so it outlives all others. Arrays of one mesh form a group, which is worked on in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from regrow.elastic.digests import different, digest, fetched, pieces
from regrow.elastic.libraries import pathwaysutils
from regrow.errors import UsageError

CHUNK_BYTES: Final = 128 << 20
PINNED: Final = "pinned_host"

Arrays: TypeAlias = tuple[jax.Array, ...]
Hashes: TypeAlias = tuple[Any, ...]


@final
@dataclass(frozen=True, slots=True)
class Group:
    """The copies of all arrays of one mesh.

    Attributes:
        mesh: The mesh.
        axis: Its replica axis.
        paths: Where each array is in the state.
        places: The number of each array among the arrays of the state.
        copies: The arrays of each replica, in host memory.
        hashes: For each replica and each piece the hashes of its arrays; not computed yet, perhaps.
    """

    mesh: Mesh
    axis: str
    paths: tuple[str, ...]
    places: tuple[int, ...]
    copies: tuple[Arrays, ...]
    hashes: tuple[Hashes, ...]

    @property
    def pieces(self) -> list[slice]:
        """The arrays that are hashed together."""
        return pieces(self.copies[0])

    @property
    def chunks(self) -> Iterator[tuple[slice, range]]:
        """What is worked on at a time, about `CHUNK_BYTES` of arrays; and its pieces."""
        arrays, parts = self.copies[0], self.pieces
        begin, size = 0, 0
        for number, part in enumerate(parts):
            size += sum(array.nbytes for array in arrays[part])
            if size >= CHUNK_BYTES or number == len(parts) - 1:
                yield slice(parts[begin].start, part.stop), range(begin, number + 1)
                begin, size = number + 1, 0

    def finished(self) -> Group:
        """The same when the copies and the hashes are there.

        Raises:
            JaxRuntimeError: A slice was lost before they were.
        """
        # One question for all of them, and one fetch for each device: either costs as much as a MiB.
        jax.block_until_ready(self.copies)  # type: ignore[no-untyped-call]
        hashes = fetched(self.hashes)
        return Group(self.mesh, self.axis, self.paths, self.places, self.copies, hashes)

    def different(self, replica: int, numbers: range, hashes: Sequence[Any]) -> list[str]:
        """The arrays of pieces whose hashes are not those of the replica, or share one with them."""
        parts, found = self.pieces, []
        for number, one in zip(numbers, hashes, strict=True):
            part = parts[number]
            wrong = different(self.copies[replica][part], self.hashes[replica][number], one)
            found += [self.paths[part][place] for place in wrong]
        return found

    def begin_hashes(self, replica: int, numbers: range) -> list[jax.Array]:
        """Begins to hash pieces of a replica anew.

        Raises:
            JaxRuntimeError: Its slice is lost.
        """
        parts = self.pieces
        return [hashed(self.copies[replica][parts[number]]) for number in numbers]

    def joined(self, replicas: Sequence[int], part: slice) -> list[jax.Array]:
        """The arrays of a chunk on the devices of these replicas; shares their memory."""
        if len(replicas) == 1:
            return list(self.copies[replicas[0]][part])
        chosen = [self.copies[replica][part] for replica in replicas]
        devices = [copies[0].sharding.mesh.devices for copies in chosen]  # type: ignore[attr-defined]
        axis = self.mesh.axis_names.index(self.axis)
        mesh = Mesh(
            np.concatenate(devices, axis), self.mesh.axis_names, axis_types=self.mesh.axis_types
        )
        return [_joined(arrays, mesh) for arrays in zip(*chosen, strict=True)]


def capture(
    arrays: Mapping[int, tuple[str, jax.Array]],
    axis_index: int,
    pinned: Mapping[int, jax.Array] | None = None,
) -> tuple[Group, ...]:
    """Begins to copy arrays to host memory, and to hash them. Nothing is waited for.

    Args:
        arrays: The path and the array of each place.
        axis_index: Which axis of a mesh is that of the replicas.
        pinned: The same arrays in host memory, if they are there already.

    Returns:
        Their groups; empty, if no array has a mesh.

    Raises:
        UsageError: An array is not whole in each replica, or meshes differ in their replicas.
    """
    shardings = {
        place: _sharding(path, array, axis_index) for place, (path, array) in arrays.items()
    }
    meshes: list[Any] = list(
        dict.fromkeys(one.mesh for one in shardings.values() if one is not None)
    )
    if not meshes:
        return ()
    _check_counts(meshes, axis_index)
    # What lies on one device only would be lost with it.
    spread = NamedSharding(meshes[0], _spec())
    groups = []
    for mesh in meshes:
        places = [p for p, one in shardings.items() if (one or spread).mesh == mesh]
        wanted = [shardings[place] or spread for place in places]
        there = jax.device_put([arrays[place][1] for place in places], wanted)
        source = None if pinned is None else [pinned[place] for place in places]
        paths = tuple(arrays[place][0] for place in places)
        groups.append(_group(paths, tuple(places), there, source, mesh.axis_names[axis_index]))
    return tuple(groups)


def _group(
    paths: tuple[str, ...],
    places: tuple[int, ...],
    arrays: list[jax.Array],
    pinned: list[jax.Array] | None,
    axis: str,
) -> Group:
    on_host = [array.sharding.with_memory_kind(PINNED) for array in arrays]
    # An array that lies in host memory already must be copied, too: its owner may give it away.
    copies = jax.device_put(pinned or arrays, on_host, may_alias=pinned is not None)
    parts = _split(copies, axis)
    sources = _split(arrays, axis)
    hashes = tuple(tuple(hashed(replica[part]) for part in pieces(parts[0])) for replica in sources)
    mesh = arrays[0].sharding.mesh  # type: ignore[attr-defined]
    return Group(mesh, axis, paths, places, parts, hashes)


def hashed(arrays: Sequence[jax.Array]) -> jax.Array:
    """The hashes of arrays of one mesh, wherever their memory is."""
    in_device_memory = [
        jax.device_put(array, device_memory(array.sharding))
        if array.sharding.memory_kind == PINNED
        else array
        for array in arrays
    ]
    return digest(in_device_memory)


def device_memory(sharding: Any) -> Any:
    """The same sharding in the devices' own memory."""
    return sharding.with_memory_kind(None)


def moved(
    arrays: Sequence[jax.Array], shardings: Sequence[jax.sharding.Sharding]
) -> list[jax.Array]:
    """The arrays laid out anew, from slice to slice; the sources stay as they are."""
    reshard: Callable[..., Any] = pathwaysutils("reshard").reshard
    laid_out: list[jax.Array] = reshard(list(arrays), list(shardings), donate=False)
    return laid_out


def _split(arrays: list[jax.Array], axis: str) -> tuple[Arrays, ...]:
    split: Callable[..., Any] = pathwaysutils("experimental.split_by_mesh_axis").split_by_mesh_axis
    return tuple(tuple(part) for part in split(arrays, axis))


def _joined(arrays: Sequence[jax.Array], mesh: Mesh) -> jax.Array:
    spec = arrays[0].sharding.spec  # type: ignore[attr-defined]
    shards = [shard.data for array in arrays for shard in array.addressable_shards]
    sharding = NamedSharding(mesh, spec, memory_kind=PINNED)
    return jax.make_array_from_single_device_arrays(arrays[0].shape, sharding, shards)


def _spec(*axes: Any) -> PartitionSpec:
    return PartitionSpec(*axes)  # type: ignore[no-untyped-call]


def _sharding(path: str, array: jax.Array, axis_index: int) -> NamedSharding | None:
    """The array's sharding over a mesh; None: it lies on one device."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding):
        if len(sharding.device_set) == 1:
            return None
        raise UsageError(
            f"{path}: its sharding is no NamedSharding over a mesh but {sharding}; put it on the "
            "mesh of the others before it is saved"
        )
    axes = sharding.mesh.axis_names
    if not -len(axes) <= axis_index < len(axes):
        if len(sharding.device_set) == 1:
            return None
        raise UsageError(f"{path}: its mesh has the axes {axes}, and none of index {axis_index}")
    axis = axes[axis_index]
    if sharding.mesh.shape[axis] > 1 and axis in _axes_of(sharding.spec):
        raise UsageError(
            f"{path}: it is sharded over the replica axis {axis!r} ({sharding.spec}), so each "
            "slice has a part of it that no other has; replicate it over that axis"
        )
    return sharding


def _axes_of(spec: PartitionSpec) -> set[Any]:
    return {axis for entry in spec for axis in (entry if isinstance(entry, tuple) else (entry,))}


def _check_counts(meshes: Sequence[Mesh], axis_index: int) -> None:
    counts = {mesh.shape[mesh.axis_names[axis_index]] for mesh in meshes}
    if len(counts) > 1:
        raise UsageError(f"the meshes of the state differ in the number of replicas: {counts}")
