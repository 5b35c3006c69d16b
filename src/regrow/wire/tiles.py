"""How an array is cut into tiles and which shard holds which tile: XLA's `OpSharding`, in Python.

The head has no XLA, so the arithmetic of `xla::HloSharding` is done here. A tiled sharding lays a
grid of tiles over the array. The *tile assignment* names a shard for each place of the grid, either
one by one or as a reshaped and transposed count (an "iota"). Dimensions of the grid behind those of
the array are subgroups, whose shards all hold the same part of the array.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, final

import numpy as np
from google.protobuf.message import DecodeError

from regrow.errors import Code, StatusError
from regrow.wire import schema

Shape = tuple[int, ...]
Region = tuple[slice, ...]

CACHED_TILINGS: Final = 1024
CACHED_SHAPES: Final = 128  # of one tiling

# xla.OpSharding.Type
_REPLICATED: Final = 0
_MAXIMAL: Final = 1
_TUPLE: Final = 2
_OTHER: Final = 3
_MANUAL: Final = 4
_UNREDUCED: Final = 6

_MAX_RANK: Final = 64  # of a numpy array


def _invalid(message: str) -> StatusError:
    return StatusError(Code.INVALID_ARGUMENT, f"sharding: {message}")


def _unimplemented(message: str) -> StatusError:
    return StatusError(Code.UNIMPLEMENTED, f"sharding: {message}")


class Tiling(Protocol):
    """The way an array is cut, apart from the devices that hold the pieces."""

    @property
    def count(self) -> int:
        """The number of shards."""

    @property
    def fully_replicated(self) -> bool:
        """Whether each shard is the whole array."""

    def indices(self, shape: Shape) -> tuple[Region, ...]:
        """The part of the array that each shard holds, with explicit start and stop.

        Raises:
            StatusError: This is not known, or `shape` cannot be cut so.
        """

    def shard_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """The shape of each shard.

        Raises:
            StatusError: This is not known, or `shape` cannot be cut so.
        """


@final
@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """A tiling by a grid, or into full copies.

    Attributes:
        count: The number of shards.
        tiles: The number of tiles along each dimension of the array; None for full copies of an
            array of any rank.
        order: The shard numbers tile by tile, tiles in row-major order; `replicas` for each tile.
        replicas: How many shards hold the same tile.
        partial: Shards of one tile may hold different values, each a part of a sum or under the
            program's own control, so no shard can stand in for another.
    """

    count: int
    tiles: tuple[int, ...] | None
    order: tuple[int, ...]
    replicas: int
    partial: bool = False
    _indices: dict[Shape, tuple[Region, ...]] = field(default_factory=dict, repr=False)
    _shapes: dict[Shape, tuple[Shape, ...]] = field(default_factory=dict, repr=False)

    @property
    def fully_replicated(self) -> bool:
        """Whether each shard is the whole array, with equal values."""
        return self.count == self.replicas and not self.partial

    def tiles_for(self, shape: Shape) -> tuple[int, ...]:
        """The number of tiles along each dimension of an array of this shape.

        Raises:
            StatusError: The grid is for another rank.
        """
        if self.tiles is None:
            return (1,) * len(shape)
        if len(self.tiles) != len(shape):
            raise _invalid(f"made for rank {len(self.tiles)}, used for shape {list(shape)}")
        return self.tiles

    def tile_sizes(self, shape: Shape) -> Shape:
        """The shape of a tile; the last tiles of a dimension may be smaller, or empty."""
        return tuple(
            -(-size // tiles) for size, tiles in zip(shape, self.tiles_for(shape), strict=True)
        )

    def indices(self, shape: Shape) -> tuple[Region, ...]:
        """The part of the array that each shard holds (see `Tiling`)."""
        known = self._indices.get(shape)
        if known is None:
            known = self._compute_indices(shape)
            _remember(self._indices, shape, known)
        return known

    def _compute_indices(self, shape: Shape) -> tuple[Region, ...]:
        cuts = [
            [slice(min(i * step, size), min((i + 1) * step, size)) for i in range(tiles)]
            for size, tiles, step in zip(
                shape, self.tiles_for(shape), self.tile_sizes(shape), strict=True
            )
        ]
        result: list[Region] = [()] * self.count
        places = iter(self.order)
        for region in itertools.product(*cuts):
            for shard in itertools.islice(places, self.replicas):
                result[shard] = region
        return tuple(result)

    def shard_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """The shape of each shard (see `Tiling`)."""
        known = self._shapes.get(shape)
        if known is None:
            known = tuple(
                tuple(part.stop - part.start for part in region) for region in self.indices(shape)
            )
            _remember(self._shapes, shape, known)
        return known


@final
@dataclass(frozen=True, slots=True, eq=False)
class KnownShapes:
    """A tiling of one shape, of which only the shapes of the shards are known.

    Attributes:
        count: The number of shards.
        shape: The shape of the array.
        shapes: The shape of each shard.
    """

    count: int
    shape: Shape
    shapes: tuple[Shape, ...]

    @property
    def fully_replicated(self) -> bool:
        """Whether each shard is the whole array; not known, so no."""
        return False

    def indices(self, shape: Shape) -> tuple[Region, ...]:
        """Not known (see `Tiling`)."""
        raise _unimplemented(f"which part of shape {list(shape)} a shard holds is not known")

    def shard_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """The shape of each shard (see `Tiling`)."""
        if shape != self.shape:
            raise _invalid(f"made for shape {list(self.shape)}, used for {list(shape)}")
        return self.shapes


@final
@dataclass(frozen=True, slots=True, eq=False)
class Unknown:
    """A tiling of which nothing but the number of shards is known."""

    count: int

    @property
    def fully_replicated(self) -> bool:
        """Whether each shard is the whole array; not known, so no."""
        return False

    def indices(self, shape: Shape) -> tuple[Region, ...]:
        """Not known (see `Tiling`)."""
        raise _unimplemented(f"which part of shape {list(shape)} a shard holds is not known")

    def shard_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """Not known (see `Tiling`)."""
        raise _unimplemented(f"the shard shapes of shape {list(shape)} are not known")


def _remember(cache: dict[Shape, Any], shape: Shape, value: object) -> None:
    if len(cache) >= CACHED_SHAPES:
        cache.clear()
    cache[shape] = value


@functools.lru_cache(CACHED_TILINGS)
def copies(count: int) -> Grid:
    """The tiling where each of `count` shards is the whole array."""
    return Grid(count, None, tuple(range(count)), count)


@functools.lru_cache(CACHED_TILINGS)
def known_shapes(shape: Shape, shapes: tuple[Shape, ...]) -> KnownShapes:
    """The tiling of one shape of which only the shapes of the shards are known."""
    return KnownShapes(len(shapes), shape, shapes)


@functools.lru_cache(CACHED_TILINGS)
def from_op_sharding(serialized: bytes, count: int) -> Grid:
    """The tiling of a serialized `xla.OpSharding` over `count` shards.

    Raises:
        StatusError: It is not valid for that number of shards, or of a kind that is not supported.
    """
    try:
        message = schema.xla.OpSharding.FromString(serialized)
    except DecodeError:
        raise _invalid("no valid OpSharding message") from None
    return _from_message(message, count)


def _from_message(message: Any, count: int) -> Grid:
    if message.HasField("named_sharding"):
        # Released clients abort when they see one, so none may come in either.
        raise _unimplemented("the form named_sharding is not supported")
    kind = message.type
    if kind == _TUPLE:
        if len(message.tuple_shardings) != 1 or message.tuple_shardings[0].type == _TUPLE:
            raise _unimplemented("a tuple of shardings is not the sharding of one array")
        return _from_message(message.tuple_shardings[0], count)
    if kind in (_REPLICATED, _MAXIMAL):  # JAX reads the sharding on one device as full copies
        return copies(count)
    if kind in (_MANUAL, _UNREDUCED):
        return Grid(count, None, tuple(range(count)), count, partial=count > 1)
    if kind != _OTHER:
        raise _unimplemented(f"type {kind} of OpSharding is not supported")
    return _tiled(message, count)


def _tiled(message: Any, count: int) -> Grid:
    dims = tuple(message.tile_assignment_dimensions)
    subgroups = tuple(message.last_tile_dims)
    if not set(subgroups) <= {_REPLICATED, _MANUAL, _UNREDUCED}:
        raise _unimplemented(f"subgroups of the types {list(subgroups)} are not supported")
    trailing = len(subgroups) or int(message.replicate_on_last_tile_dim)
    if trailing > len(dims) or len(dims) > _MAX_RANK or min(dims, default=1) < 1:
        raise _invalid(f"tile assignment dimensions {list(dims)} are not valid")
    if math.prod(dims) != count:
        raise _invalid(f"{math.prod(dims)} tiles over {count} devices")
    rank = len(dims) - trailing
    sizes = tuple(zip(dims[rank:], subgroups, strict=False))
    return Grid(
        count,
        dims[:rank],
        _order(message, count),
        math.prod(dims[rank:]),
        partial=any(size > 1 and kind != _REPLICATED for size, kind in sizes),
    )


def _order(message: Any, count: int) -> tuple[int, ...]:
    if not message.iota_reshape_dims:
        order = tuple(message.tile_assignment_devices)
        if len(order) != count or sorted(order) != list(range(count)):
            raise _invalid(f"the tile assignment does not name each of {count} devices once")
        return order
    dims: Sequence[int] = tuple(message.iota_reshape_dims)
    transpose: Sequence[int] = tuple(message.iota_transpose_perm)
    if len(dims) > _MAX_RANK or min(dims) < 1 or math.prod(dims) != count:
        raise _invalid(f"iota dimensions {list(dims)} are not {count} devices")
    if sorted(transpose) != list(range(len(dims))):
        raise _invalid(f"iota permutation {list(transpose)} is not valid")
    numbers: list[int] = np.arange(count).reshape(dims).transpose(transpose).ravel().tolist()
    return tuple(numbers)
