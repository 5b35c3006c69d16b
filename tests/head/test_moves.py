"""Arrays that change devices, checked against numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from head_world import F32, Answer, World, assert_same, one, replicated, run, tiled
from hypothesis import given, settings
from hypothesis import strategies as st
from moved_arrays import BIG, check, check_failed, fail_part, put, shards_of

from regrow.channel import commands as c
from regrow.errors import Code, SliceLostError, StatusError
from regrow.head.buffers import Array
from regrow.head.links import Lease
from regrow.wire import shardings
from regrow.wire.shardings import Sharding


def test_a_failed_part_of_a_reshard_leaves_no_memory_behind() -> None:
    async def main(world: World) -> None:
        array = put(world, np.zeros((2, BIG), np.float32), tiled((0, 2), (2, 1)))
        await world.settle()
        fail_part(world, 1, array)
        moved = world.runtime.moves.move(array, tiled((0, 2), (1, 2)))
        await check_failed(world, moved)
        del array, moved
        await world.check_nothing_left()

    run(main)


def test_a_move_to_where_it_is_costs_nothing() -> None:
    async def main(world: World) -> None:
        array = put(world, np.zeros((4, 2), np.float32), tiled((0, 2), (2, 1)))
        await world.settle()
        before = len(world.hosts[0].channel.payloads)
        moved = world.runtime.moves.move(array, tiled((0, 2), (2, 1), "device"))
        await world.settle()
        assert moved.pieces() == array.pieces()
        assert len(world.hosts[0].channel.payloads) == before
        copied = world.runtime.moves.move(array, array.sharding, copy=True)
        await world.settle()
        assert len(world.sent(0, c.Copy)) == len(world.sent(1, c.Copy)) == 1
        assert copied.pieces() != array.pieces()

    run(main)


def test_a_move_within_a_host_is_a_copy_and_across_hosts_a_promise() -> None:
    async def main(world: World) -> None:
        whole = np.arange(8, dtype=np.float32)
        array = put(world, whole, tiled((0, 2), (2,)))
        target = tiled((1, 0), (2,), "pinned_host")
        moved = world.runtime.moves.move(array, target)
        await world.settle()
        (copy,) = world.sent(0, c.Copy)
        assert (copy.sources, copy.devices) == (((array.whole().aid, 0),), (1,))
        assert copy.memory_kind == "pinned_host"
        (expect,) = world.sent(0, c.Expect)
        assert (expect.devices, expect.memory_kind) == ((0,), "pinned_host")
        check(await shards_of(world, moved), whole, target)

    run(main)


def test_what_a_new_tiling_leaves_on_its_host_is_copied_there() -> None:
    """As a snapshot is loaded: from the slice that has it onto that one and another."""

    async def main(world: World) -> None:
        whole = np.arange(1 << 16, dtype=np.float32).reshape(4, -1)
        array = put(world, whole, tiled((0, 1), (1, 2), "pinned_host"))
        target = tiled((0, 2, 1, 3), (1, 2), "pinned_host")
        moved = world.runtime.moves.move(array, target)
        await world.settle()
        (copy,) = world.sent(0, c.Copy)
        assert copy.sources == ((array.whole().aid, 0), (array.whole().aid, 1))
        assert copy.devices == (0, 1)
        assert not world.sent(0, c.Expect)
        (expect,) = world.sent(1, c.Expect)
        assert expect.devices == (2, 3)
        check(await shards_of(world, moved), whole, target)
        del array, moved
        await world.check_nothing_left()

    run(main)


def test_a_move_to_a_slice_that_is_not_there() -> None:
    async def main(world: World) -> None:
        array = put(world, np.zeros(4, np.float32), one(0))
        lost = world.lose(1)
        for target in (one(2), tiled((0, 2), (2,))):
            with pytest.raises(SliceLostError) as caught:
                world.runtime.moves.move(array, target)
            assert_same(caught.value, lost)
        world.up(1)
        gone = put(world, np.zeros(4, np.float32), one(2))
        await world.settle()
        lost = world.lose(1)
        with pytest.raises(SliceLostError) as caught:
            world.runtime.moves.move(gone, one(0))
        assert_same(caught.value, lost)

    run(main)


def test_a_source_that_is_lost_during_a_move_is_what_the_target_tells() -> None:
    async def main(world: World) -> None:
        array = put(world, np.zeros((2, BIG), np.float32), tiled((2, 0), (2, 1)))
        await world.settle()
        single = world.runtime.moves.move(
            Array(F32, (1, BIG), one(2), pieces=[array.piece(0)]), one(1)
        )
        cut = world.runtime.moves.move(array, tiled((0, 1), (1, 2)))
        lost = world.lose(1)
        for moved in (single, cut):
            waited = Answer()
            world.runtime.transfers.ready(moved.pieces(), waited)
            await world.settle()
            assert waited.error is not None
            assert (waited.error.code, waited.error.message) == (Code.DATA_LOSS, lost.message)
        del array, single, cut, moved
        await world.check_nothing_left()

    run(main)


def test_a_target_that_is_lost_during_a_move_is_lost() -> None:
    async def main(world: World) -> None:
        array = put(world, np.zeros(BIG, np.float32), one(0))
        moved = world.runtime.moves.move(array, one(2))
        lost = world.lose(1)
        world.up(1)
        await world.settle()
        assert not world.sent(1, c.Fill)
        with pytest.raises(SliceLostError) as caught:
            moved.check()
        assert_same(caught.value, lost)
        del array, moved
        await world.check_nothing_left()

    run(main)


def test_no_room_for_a_transfer_is_what_the_target_tells() -> None:
    async def main(world: World) -> None:
        array = put(world, np.zeros((4, 1 << 17), np.float32), tiled((0, 1), (2, 1)))
        await world.settle()
        blocks = [Lease(world.runtime.arena, 1 << 20) for _ in range(4)]
        move = world.runtime.moves.move
        moved = [move(array, tiled(d, (1, 4))) for d in ((0, 1, 2, 3), (3, 2, 1, 0))]
        moved.append(move(array, tiled((2, 3), (2, 1))))
        answers = [Answer() for _ in moved]
        for each, answer in zip(moved, answers, strict=True):
            world.runtime.transfers.ready(each.pieces(), answer)
        await world.settle()
        assert [answer.error.code for answer in answers if answer.error is not None] == [
            Code.RESOURCE_EXHAUSTED
        ] * 3
        del array, blocks, moved, each
        await world.check_nothing_left()

    run(main, arena_bytes=5 << 20)


# --- properties -----------------------------------------------------------------------------------

DEVICES = 8  # two slices of two hosts with two devices each


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> Sharding:
    kind = draw(st.sampled_from(["device", "pinned_host", None]))
    form = draw(st.integers(0, 5))
    devices = draw(st.permutations(range(DEVICES)))
    if form == 0:
        return one(devices[0], kind)
    if form == 1:
        return replicated(devices[: draw(st.integers(1, 4))], kind)
    tiles = [draw(st.sampled_from([1, 2, 2, 3])) for _ in shape]
    while math.prod(tiles) > DEVICES:
        tiles[tiles.index(max(tiles))] = 1
    count = math.prod(tiles) * draw(st.integers(1, DEVICES // math.prod(tiles)))
    return tiled(devices[:count], tiles, kind, draw(st.permutations(range(count))))


@st.composite
def journeys(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Sharding], int]:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    stops = draw(st.lists(tilings(shape), min_size=2, max_size=4))
    return shape, stops, draw(st.integers(0, 1 << 30))


def begun(
    journey: tuple[tuple[int, ...], list[Sharding], int],
) -> tuple[list[Sharding], np.random.Generator, np.ndarray[Any, Any]]:
    """The stops of a journey, its dice, and the values that are on it."""
    shape, stops, seed = journey
    random = np.random.default_rng(seed)
    whole = random.permutation(math.prod(shape)).astype(np.int32).reshape(shape)
    return stops, random, whole


@settings(max_examples=60, deadline=None)
@given(journeys())
def test_any_journey_of_an_array(journey: tuple[tuple[int, ...], list[Sharding], int]) -> None:
    """Whatever the shardings and the order in which hosts work: the values are right."""
    stops, random, whole = begun(journey)

    def choose(count: int) -> int:
        return int(random.integers(count))

    async def main(world: World) -> None:
        array = put(world, whole, stops[0])
        for stop in stops[1:]:
            array = world.runtime.moves.move(array, stop)
            if random.integers(2):
                await world.settle(choose)
            if random.integers(3) == 0:
                array.whole()
        check(await shards_of(world, array, choose), whole, stops[-1])
        del array
        await world.check_nothing_left()

    run(main, hosts=2, devices=4)


@settings(max_examples=40, deadline=None)
@given(journeys(), st.integers(0, 1), st.booleans())
def test_any_journey_with_a_loss(
    journey: tuple[tuple[int, ...], list[Sharding], int], slice_index: int, reborn: bool
) -> None:
    """Each value is right or the loss; nothing is waited for in vain, nothing is left behind."""
    stops, random, whole = begun(journey)

    def choose(count: int) -> int:
        return int(random.integers(count))

    async def main(world: World) -> None:
        array = put(world, whole, stops[0])
        fall = int(random.integers(len(stops)))
        error: StatusError | None = None
        try:
            for number, stop in enumerate(stops[1:]):
                array = world.runtime.moves.move(array, stop)
                if number == fall:
                    await world.settle(choose, turns=int(random.integers(6)))
                    world.lose(slice_index)
                    if reborn:
                        world.up(slice_index)
            waited = Answer()
            world.runtime.transfers.ready(array.pieces(), waited)
            await world.settle(choose)
            error = waited.error
        except StatusError as raised:
            error = raised.fresh()
        if error is None:
            check(await shards_of(world, array, choose), whole, stops[-1])
        else:
            assert error.code is Code.DATA_LOSS
            assert error.message.startswith(f"slice {slice_index} ")
        del array
        await world.check_nothing_left()

    run(main, hosts=2, devices=4)


def test_opaque_shardings_cannot_be_cut_anew() -> None:
    async def main(world: World) -> None:
        array = put(world, np.zeros((4, 4), np.float32), tiled((0, 1), (2, 1)))
        unknown = shardings.even((0, 1), None, (4, 4), (4, 2), False)
        with pytest.raises(StatusError) as caught:
            world.runtime.moves.move(array, unknown)
        assert caught.value.code is Code.UNIMPLEMENTED
        del array, caught
        await world.check_nothing_left()

    run(main)
