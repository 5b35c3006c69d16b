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

from regrow.channel.digests import COPIES_IN
from regrow.elastic.digests import copied, different, digest
from regrow.elastic.libraries import pathwaysutils
from regrow.errors import UsageError

CHUNK_BYTES: Final = 128 << 20
PINNED: Final = COPIES_IN

Arrays: TypeAlias = tuple[jax.Array, ...]


@final
@dataclass(frozen=True, slots=True)
class Capture:
    """Copies of all arrays of one mesh that are being made.

    Attributes:
        axis: The replica axis of the mesh.
        paths: Where each array is in the state.
        places: The number of each array among the arrays of the state.
        copies: The arrays in host memory, on the whole mesh.
        hashes: Those of the arrays, see `digest`.
    """

    axis: str
    paths: tuple[str, ...]
    places: tuple[int, ...]
    copies: list[jax.Array]
    hashes: jax.Array

    def finished(self) -> Group:
        """The copies of each replica, when they are there.

        Raises:
            JaxRuntimeError: A slice was lost before they were.
        """
        mesh: Mesh = self.copies[0].sharding.mesh  # type: ignore[attr-defined]
        # There are no hashes before there is what they are made of, so nothing else is waited for.
        hashes = np.asarray(self.hashes)
        number = mesh.axis_names.index(self.axis)
        by_device = hashes.reshape(*mesh.devices.shape, *hashes.shape[1:])
        by_replica = tuple(
            part.reshape(-1, *hashes.shape[1:]) for part in np.moveaxis(by_device, number, 0)
        )
        copies = _split(self.copies, self.axis)
        return Group(mesh, self.axis, self.paths, self.places, copies, by_replica)


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
        hashes: The hashes of each replica's arrays.
    """

    mesh: Mesh
    axis: str
    paths: tuple[str, ...]
    places: tuple[int, ...]
    copies: tuple[Arrays, ...]
    hashes: tuple[Any, ...]

    @property
    def chunks(self) -> Iterator[slice]:
        """The arrays that are worked on at a time, about `CHUNK_BYTES` of them."""
        begin, size = 0, 0
        for number, array in enumerate(self.copies[0], 1):
            size += array.nbytes
            if size >= CHUNK_BYTES or number == len(self.paths):
                yield slice(begin, number)
                begin, size = number, 0

    def different(self, replica: int, hashes: Any) -> list[str]:
        """The arrays whose hashes are not those of the replica."""
        return [self.paths[number] for number in different(self.hashes[replica], hashes)]

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
) -> tuple[Capture, ...]:
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
        there = [_laid_out(arrays[place][1], shardings[place] or spread) for place in places]
        if pinned is None:
            copies, hashes = copied(there)
        else:
            on_host = [array.sharding.with_memory_kind(PINNED) for array in there]
            copies = jax.device_put([pinned[place] for place in places], on_host, may_alias=True)
            hashes = digest(copies)
        paths = tuple(arrays[place][0] for place in places)
        axis = mesh.axis_names[axis_index]
        groups.append(Capture(axis, paths, tuple(places), copies, hashes))
    return tuple(groups)


def _laid_out(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    return array if array.sharding == sharding else jax.device_put(array, sharding)


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
