"""The plan of copies from one sharding to another, carried out on numpy arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.errors import Code, StatusError
from regrow.wire import regions, schema, shardings
from regrow.wire.shardings import Sharding

OTHER = 3


def grid(devices: list[int], tiles: list[int], *, order: list[int] | None = None) -> Sharding:
    """Tiles of the given numbers; the devices that are left over hold copies."""
    replicas = len(devices) // math.prod(tiles)
    message = schema.xla.OpSharding(
        type=OTHER,
        tile_assignment_dimensions=[*tiles, replicas],
        tile_assignment_devices=order or range(len(devices)),
        replicate_on_last_tile_dim=True,
    )
    return shardings.from_op_sharding(tuple(devices), None, message.SerializeToString())


@st.composite
def grids(draw: st.DrawFn, rank: int) -> Sharding:
    if draw(st.integers(0, 5)) == 0:
        return shardings.single_device(draw(st.integers(0, 89)), None)
    tiles = draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank))
    count = math.prod(tiles) * draw(st.integers(1, 3))
    devices = draw(st.permutations(range(90)))[:count]
    return grid(devices, tiles, order=draw(st.permutations(range(count))))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Sharding, Sharding, tuple[int, ...]]:
    rank = draw(st.integers(0, 3))
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=rank, max_size=rank)))
    return draw(grids(rank)), draw(grids(rank)), shape


def same_host(a: int, b: int) -> bool:
    return a // 4 == b // 4


def rank_of(src: Sharding, shard: int, device: int) -> int:
    there = src.devices[shard]
    return 0 if there == device else 1 if same_host(there, device) else 2


@settings(max_examples=200, deadline=None)
@given(cases())
def test_the_plan_makes_the_array(case: tuple[Sharding, Sharding, tuple[int, ...]]) -> None:
    src, dst, shape = case
    whole = np.arange(math.prod(shape)).reshape(shape)
    source = [whole[region] for region in src.indices(shape)]
    made = [np.full(shard, -1) for shard in dst.shard_shapes(shape)]
    for dst_shard, src_shard, region in regions.overlaps(src, dst, shape, same_host):
        into = made[dst_shard][*regions.relative(region, dst.indices(shape)[dst_shard]), ...]
        piece = source[src_shard][regions.relative(region, src.indices(shape)[src_shard])]
        assert piece.size
        assert into.shape == piece.shape
        assert (into == -1).all(), "two pieces overlap"
        into[...] = piece
    for shard, region in zip(made, dst.indices(shape), strict=True):
        np.testing.assert_array_equal(shard, whole[region])


@settings(max_examples=100, deadline=None)
@given(cases())
def test_the_plan_is_minimal_and_near(case: tuple[Sharding, Sharding, tuple[int, ...]]) -> None:
    src, dst, shape = case
    pieces = regions.overlaps(src, dst, shape, same_host)
    held = [tuple((p.start, p.stop) for p in region) for region in src.indices(shape)]
    for shard in range(len(dst.devices)):
        mine = [piece for piece in pieces if piece.dst_shard == shard]
        assert len({held[piece.src_shard] for piece in mine}) == len(mine)  # one for each tile
        for piece in mine:
            device = dst.devices[shard]
            copies = [i for i, tile in enumerate(held) if tile == held[piece.src_shard]]
            best = min(rank_of(src, i, device) for i in copies)
            assert rank_of(src, piece.src_shard, device) == best


def test_own_device_then_own_host() -> None:
    src = grid([0, 1, 4, 8], [1])
    dst = grid([9, 4, 5, 0], [1])
    pieces = regions.overlaps(src, dst, (6,), same_host)
    assert [src.devices[piece.src_shard] for piece in pieces] == [8, 4, 4, 0]


def test_without_hosts_the_load_is_spread() -> None:
    src = grid([0, 1, 2, 3], [1])
    dst = grid(list(range(10, 22)), [1])
    sent = [piece.src_shard for piece in regions.overlaps(src, dst, (6,))]
    assert [sent.count(shard) for shard in range(4)] == [3, 3, 3, 3]


def test_scalars_and_empty_arrays() -> None:
    src, dst = shardings.single_device(0, None), shardings.single_device(1, None)
    assert regions.overlaps(src, dst, ()) == [(0, 0, ())]
    assert regions.overlaps(src, dst, (3, 0)) == []


def test_equal_shardings_copy_nothing_over() -> None:
    sharding = grid([0, 1, 2, 3], [2, 2])
    pieces = regions.overlaps(sharding, sharding, (5, 4))
    assert [(piece.dst_shard, piece.src_shard) for piece in pieces] == [(i, i) for i in range(4)]


def _partial(kind: int) -> Any:
    data = schema.xla.OpSharding(type=kind).SerializeToString()
    return shardings.from_op_sharding((0, 1), None, data)


@pytest.mark.parametrize(
    "sharding",
    [
        _partial(4),
        _partial(6),
        shardings.even((0, 1), None, (4,), (2,), False),
    ],
)
def test_unknown_or_differing_shards_are_refused(sharding: Sharding) -> None:
    whole = shardings.single_device(0, None)
    for src, dst in [(sharding, whole), (whole, sharding)]:
        with pytest.raises(StatusError, match="cannot reshard") as caught:
            regions.overlaps(src, dst, (4,))
        assert caught.value.code is Code.UNIMPLEMENTED


def test_shape_that_does_not_fit() -> None:
    with pytest.raises(StatusError, match="rank 1") as caught:
        regions.overlaps(grid([0, 1], [2]), shardings.single_device(0, None), (4, 4))
    assert caught.value.code is Code.INVALID_ARGUMENT
