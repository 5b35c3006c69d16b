"""Which pieces to copy when an array goes from one sharding to another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, final

from regrow.errors import Code, StatusError
from regrow.wire.shardings import Sharding
from regrow.wire.tiles import Grid, Region, Shape


@final
class Piece(NamedTuple):
    """One rectangle to copy.

    Attributes:
        dst_shard: The number of the shard that receives it.
        src_shard: The number of a shard that has it.
        region: Where it is in the whole array, with explicit start and stop.
    """

    dst_shard: int
    src_shard: int
    region: Region


_SAME_DEVICE: Final = 0
_SAME_HOST: Final = 1
_ELSEWHERE: Final = 2


def overlaps(
    src: Sharding,
    dst: Sharding,
    shape: Shape,
    same_host: Callable[[int, int], bool] | None = None,
) -> list[Piece]:
    """The copies that make an array of sharding `dst` out of one of sharding `src`.

    The pieces of a destination shard cover it exactly and do not overlap. There is one for each
    source tile that it meets. Among the copies of a source tile, the one on the destination's own
    device is taken, else one on its host, else any, the one that has sent the least so far.

    Args:
        src: The sharding that the array has.
        dst: The sharding that it is to have.
        shape: The shape of the whole array.
        same_host: Whether two devices are on one host; left out, none are.

    Raises:
        StatusError: UNIMPLEMENTED if it is not known which part a shard holds, or if shards that
            hold the same part may differ; INVALID_ARGUMENT if `shape` does not fit a sharding.
    """
    source, _ = _grid(src), _grid(dst)
    counts = source.tiles_for(shape)
    steps = source.tile_sizes(shape)
    sent = [0] * source.count
    pieces = []
    for dst_shard, wanted in enumerate(dst.indices(shape)):
        device = dst.devices[dst_shard]
        for tile, region in _tiles_met(wanted, counts, steps):
            holders = source.order[tile * source.replicas : (tile + 1) * source.replicas]
            if len(holders) == 1:
                src_shard = holders[0]
            else:
                src_shard = _nearest(src, holders, device, same_host, sent)
            if src.devices[src_shard] != device:
                sent[src_shard] += math.prod(part.stop - part.start for part in region)
            pieces.append(Piece(dst_shard, src_shard, region))
    return pieces


def relative(region: Region, origin: Region) -> Region:
    """`region` counted from the corner of `origin`, the part of the array that a shard holds."""
    return tuple(
        slice(part.start - base.start, part.stop - base.start)
        for part, base in zip(region, origin, strict=True)
    )


def _grid(sharding: Sharding) -> Grid:
    tiling = sharding.tiling
    if not isinstance(tiling, Grid):
        raise StatusError(Code.UNIMPLEMENTED, "cannot reshard: the shards' places are not known")
    if tiling.partial:
        raise StatusError(
            Code.UNIMPLEMENTED, "cannot reshard: shards of the same part may hold different values"
        )
    return tiling


def _tiles_met(
    wanted: Region, counts: tuple[int, ...], steps: Shape
) -> Iterator[tuple[int, Region]]:
    """The tiles (by row-major number) that `wanted` meets, and the part of it in each."""
    along: list[list[tuple[int, slice]]] = []
    for part, step in zip(wanted, steps, strict=True):
        if part.start >= part.stop:
            return  # an empty shard needs nothing
        first, last = part.start // step, (part.stop - 1) // step
        along.append(
            [
                (i, slice(max(part.start, i * step), min(part.stop, (i + 1) * step)))
                for i in range(first, last + 1)
            ]
        )
    for cuts in itertools.product(*along):
        number = 0
        for (i, _), count in zip(cuts, counts, strict=True):
            number = number * count + i
        yield number, tuple(cut for _, cut in cuts)


def _nearest(
    src: Sharding,
    holders: tuple[int, ...],
    device: int,
    same_host: Callable[[int, int], bool] | None,
    sent: list[int],
) -> int:
    def cost(shard: int) -> tuple[int, int]:
        there = src.devices[shard]
        if there == device:
            return _SAME_DEVICE, 0
        near = same_host is not None and same_host(there, device)
        return _SAME_HOST if near else _ELSEWHERE, sent[shard]

    return min(holders, key=cost)
