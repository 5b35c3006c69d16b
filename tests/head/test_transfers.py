"""Bytes between clients and hosts and between hosts, checked against numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from head_world import F32, Answer, World, assert_same, one, replicated, run, tiled
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.channel import commands as c
from regrow.errors import Code, ResourceError, SliceLostError, StatusError
from regrow.head.buffers import Array
from regrow.head.links import Lease
from regrow.head.transfers import INLINE_BYTES, EpochError
from regrow.wire import shardings
from regrow.wire.dtypes import kind_of
from regrow.wire.shardings import Sharding

BIG = INLINE_BYTES // 4 + 100  # f32 elements that go through shared memory


def memory_of(world: World, data: bytes) -> Any:
    memory = world.runtime.transfers.room(len(data))
    view = memory.view if isinstance(memory, Lease) else memory
    view[:] = data
    return memory


def put(world: World, value: np.ndarray[Any, Any], sharding: Sharding, **how: Any) -> Array:
    kind = kind_of(value.dtype)
    memory = memory_of(world, value.tobytes())
    strides = how.get("strides")
    buffer = world.runtime.transfers.put(memory, kind, value.shape, strides, sharding)
    return Array(kind, value.shape, sharding, whole=buffer)


async def shards_of(world: World, array: Array, choose: Any = None) -> list[np.ndarray[Any, Any]]:
    """All shards, by way of `get`."""
    dtype = {F32: np.float32}.get(array.kind, np.int32)
    answers = []
    shapes = array.sharding.shard_shapes(array.shape)
    for piece, shape in zip(array.pieces(), shapes, strict=True):
        answer = Answer()
        world.runtime.transfers.get(piece, array.kind, shape, None, answer)
        answers.append(answer)
    await world.settle(*([choose] if choose else []))
    return [
        np.frombuffer(
            a.value.view if isinstance(a.value, Lease) else a.value, dtype, math.prod(shape)
        )
        .reshape(shape)
        .copy()
        for a, shape in zip(answers, shapes, strict=True)
    ]


def check(shards: list[Any], whole: Any, sharding: Sharding) -> None:
    for shard, region in zip(shards, sharding.indices(whole.shape), strict=True):
        np.testing.assert_array_equal(shard, whole[region])


# --- one way --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [6, BIG])
def test_there_and_back(count: int) -> None:
    async def main(world: World) -> None:
        whole = np.arange(count * 2, dtype=np.float32).reshape(2, count)
        for sharding in (
            one(3),
            replicated((0, 2)),
            tiled((2, 0, 1, 3), (2, 1)),
            tiled((0, 3), (1, 2)),
        ):
            array = put(world, whole, sharding)
            check(await shards_of(world, array), whole, sharding)
            del array
        await world.check_nothing_left()

    run(main)


def test_strides_of_the_client() -> None:
    async def main(world: World) -> None:
        whole = np.arange(12, dtype=np.float32).reshape(3, 4)
        transfers = world.runtime.transfers
        for strides, shown in (
            ((4, 12), whole.reshape(4, 3).T),
            ((0, 4), np.tile(whole[0], (3, 1))),
        ):
            sharding = tiled((0, 2), (1, 2))
            buffer = transfers.put(
                memory_of(world, whole.tobytes()), F32, (3, 4), strides, sharding
            )
            array = Array(F32, (3, 4), sharding, whole=buffer)
            check(await shards_of(world, array), shown, sharding)

    run(main)


def test_strides_to_the_client() -> None:
    async def main(world: World) -> None:
        for rows in (3, BIG):
            whole = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
            array = put(world, whole, one(1))
            answer = Answer()
            strides = (4, 4 * rows)
            world.runtime.transfers.get(array.piece(0), F32, whole.shape, strides, answer)
            await world.settle()
            value = answer.value.view if isinstance(answer.value, Lease) else answer.value
            got: Any = np.ndarray(whole.shape, np.float32, value, 0, strides)
            np.testing.assert_array_equal(got, whole)
            del array, answer, value, got
        await world.check_nothing_left()

    run(main)


@pytest.mark.parametrize(
    ("shape", "strides", "size"),
    [
        ((3,), None, 11),
        ((4,), (8,), 16),
        ((2, 2), (4,), 16),
        ((2,), (-4,), 16),
        ((2,), (4, 4), 16),
        ((1 << 62, 1 << 62), None, 16),
        ((2,), (1 << 62,), 16),
        ((-1,), None, 16),
        ((-5, -5), None, 16),
    ],
)
def test_a_buffer_that_does_not_hold_the_array(shape: Any, strides: Any, size: int) -> None:
    async def main(world: World) -> None:
        sharding = one(0)
        with pytest.raises(StatusError, match="array of shape") as caught:
            world.runtime.transfers.put(bytes(size), F32, shape, strides, sharding)
        assert caught.value.code is Code.INVALID_ARGUMENT
        await world.settle()
        assert not world.sent(0, c.Put)

    run(main)


def test_strides_for_the_client_must_fit_the_array() -> None:
    async def main(world: World) -> None:
        array = put(world, np.zeros((2, 3), np.float32), one(0))
        for strides in ((4,), (4, 4, 4), (-12, 4)):
            with pytest.raises(StatusError, match="with strides") as caught:
                world.runtime.transfers.get(array.piece(0), F32, (2, 3), strides, Answer())
            assert caught.value.code is Code.INVALID_ARGUMENT
        with pytest.raises(ResourceError):
            world.runtime.transfers.get(array.piece(0), F32, (2, 3), (1 << 50, 4), Answer())
        await world.settle()

    run(main)


def test_shapes_of_empty_shards() -> None:
    async def main(world: World) -> None:
        sharding = tiled((0, 1, 2, 3), (1, 4))
        buffer = world.runtime.transfers.empty(F32, (0, 8), sharding)
        await world.settle()
        for host in (0, 1):
            (sent,) = world.sent(host, c.Put)
            assert [shard[2] for shard in sent.shards] == [(0, 2), (0, 2)]
        array = Array(F32, (0, 8), sharding, whole=buffer)
        assert [shard.shape for shard in await shards_of(world, array)] == [(0, 2)] * 4

    run(main)


def test_small_bytes_go_inline_and_large_ones_by_reference() -> None:
    async def main(world: World) -> None:
        small = put(world, np.zeros(4, np.float32), replicated((0, 2)))
        large = put(world, np.zeros(BIG, np.float32), replicated((0, 2)))
        await world.settle()
        for host in (0, 1):
            one_put, other = world.sent(host, c.Put)
            assert isinstance(one_put.bulk, bytes)
            assert one_put.lease == 0
            assert not isinstance(other.bulk, bytes)
            assert other.lease
            assert other.keep
        del small, large
        await world.check_nothing_left()

    run(main)


def test_a_host_that_shares_no_memory_gets_bytes() -> None:
    async def main(world: World) -> None:
        for host in world.hosts.values():
            host.link.shares_memory = False
        whole = np.arange(BIG * 2, dtype=np.float32).reshape(2, BIG)
        array = put(world, whole, tiled((0, 2), (2, 1)))
        target = tiled((1, 3), (1, 2))
        moved = world.runtime.transfers.move(array, target)
        check(await shards_of(world, moved), whole, target)
        for host in (0, 1):
            assert not world.sent(host, c.Segment)
        del array, moved
        await world.check_nothing_left()

    run(main)


def test_arrays_may_live_in_shared_memory_while_there_is_much_of_it() -> None:
    async def main(world: World) -> None:
        for host in world.hosts.values():
            host.keeps_leases = True
        arena = world.runtime.arena
        arrays = [put(world, np.zeros(1 << 18, np.float32), one(0)) for _ in range(12)]
        await world.settle()
        kept = [sent.keep for sent in world.sent(0, c.Put)]
        assert kept[0]
        assert not kept[-1]
        assert arena.used_bytes <= arena.limit_bytes * 0.6
        arrays.clear()
        await world.check_nothing_left()

    run(main, arena_bytes=16 << 20)


def test_room() -> None:
    async def main(world: World) -> None:
        transfers = world.runtime.transfers
        assert isinstance(transfers.room(INLINE_BYTES), bytearray)
        with pytest.raises(ResourceError, match="shared memory"):
            transfers.room(1 << 50)
        assert not world.runtime.arena.used_bytes

    run(main)


# --- errors ---------------------------------------------------------------------------------------


def test_a_slice_that_is_lost_while_its_bytes_are_awaited() -> None:
    async def main(world: World) -> None:
        array = put(world, np.zeros(BIG, np.float32), one(2))
        await world.settle()
        get, ready = Answer(), Answer()
        world.runtime.transfers.get(array.piece(0), F32, (BIG,), None, get)
        world.runtime.transfers.ready(array.pieces(), ready)
        lost = world.lose(1)
        assert get.error is lost
        assert ready.error is lost
        with pytest.raises(SliceLostError):
            world.runtime.transfers.get(array.piece(0), F32, (BIG,), None, Answer())
        late = Answer()
        world.runtime.transfers.ready(array.pieces(), late)
        assert_same(late.error, lost)
        del array
        await world.check_nothing_left()

    run(main)


def test_a_value_that_is_an_error_leaves_no_memory_behind() -> None:
    async def main(world: World) -> None:
        array = put(world, np.zeros(BIG, np.float32), one(0))
        await world.settle()
        cell = world.hosts[0].parts[array.whole().aid][0]
        cell.value, cell.error = None, StatusError(Code.UNKNOWN, "a program failed")
        answer = Answer()
        world.runtime.transfers.get(array.piece(0), F32, (BIG,), None, answer)
        moved = world.runtime.transfers.move(array, one(2))
        await world.settle()
        assert answer.error is not None
        waited = Answer()
        world.runtime.transfers.ready(moved.pieces(), waited)
        await world.settle()
        assert waited.error is not None
        assert waited.error.message == "a program failed"
        del array, moved, cell
        await world.check_nothing_left()

    run(main)


def test_a_failed_part_of_a_reshard_leaves_no_memory_behind() -> None:
    async def main(world: World) -> None:
        array = put(world, np.zeros((2, BIG), np.float32), tiled((0, 2), (2, 1)))
        await world.settle()
        cell = world.hosts[1].parts[array.whole().aid][0]
        cell.value, cell.error = None, StatusError(Code.UNKNOWN, "a program failed")
        moved = world.runtime.transfers.move(array, tiled((0, 2), (1, 2)))
        waited = Answer()
        world.runtime.transfers.ready(moved.pieces(), waited)
        await world.settle()
        assert waited.error is not None
        assert waited.error.message == "a program failed"
        del array, moved, cell
        await world.check_nothing_left()

    run(main)


def test_an_error_of_a_program_across_hosts_waits_for_its_verdict() -> None:
    async def main(world: World) -> None:
        array = put(world, np.zeros(4, np.float32), tiled((0, 2), (2,)))
        await world.settle()
        link = world.hosts[0].link
        world.hosts[1].answers_pings = False
        answers = [Answer() for _ in range(2)]
        for answer in answers:
            world.runtime.transfers.ready(array.pieces(), answer)
        # The survivor tells the error of its transport before the loss is known.
        for rid in list(link._waiters):
            world.runtime.report(link, c.Failed(rid, 2, "Connection reset by peer", 1))
        assert not any(answer.there for answer in answers)
        lost = world.lose(1)
        assert [answer.error for answer in answers] == [lost, lost]

    run(main)


def test_an_error_with_an_epoch_knows_it() -> None:
    error = EpochError(Code.UNKNOWN, "text", 3)
    assert (error.code, error.message, error.epoch) == (Code.UNKNOWN, "text", 3)


def test_ready_asks_each_host_once() -> None:
    async def main(world: World) -> None:
        arrays = [put(world, np.zeros(4, np.float32), replicated((0, 1, 2))) for _ in range(3)]
        answer = Answer()
        world.runtime.transfers.ready([p for array in arrays for p in array.pieces()], answer)
        await world.settle()
        assert answer.value is None
        aids = tuple(array.whole().aid for array in arrays)
        assert [ready.aids for ready in world.sent(0, c.Ready)] == [aids]
        assert [ready.aids for ready in world.sent(1, c.Ready)] == [aids]
        nothing = Answer()
        world.runtime.transfers.ready([], nothing)
        assert nothing.value is None

    run(main)


def test_buffers_outlive_what_is_asked_of_them() -> None:
    async def main(world: World) -> None:
        array = put(world, np.zeros(BIG, np.float32), one(0))
        ready = Answer()
        world.runtime.transfers.ready(array.pieces(), ready)
        moved = world.runtime.transfers.move(array, one(2))
        array.delete()
        await world.settle()
        assert ready.value is None
        check(await shards_of(world, moved), np.zeros(BIG), one(2))
        del moved
        await world.check_nothing_left()

    run(main)


# --- between devices ------------------------------------------------------------------------------


def test_a_move_to_where_it_is_costs_nothing() -> None:
    async def main(world: World) -> None:
        array = put(world, np.zeros((4, 2), np.float32), tiled((0, 2), (2, 1)))
        await world.settle()
        before = len(world.hosts[0].channel.payloads)
        moved = world.runtime.transfers.move(array, tiled((0, 2), (2, 1), "device"))
        await world.settle()
        assert moved.pieces() == array.pieces()
        assert len(world.hosts[0].channel.payloads) == before
        copied = world.runtime.transfers.move(array, array.sharding, copy=True)
        await world.settle()
        assert len(world.sent(0, c.Copy)) == len(world.sent(1, c.Copy)) == 1
        assert copied.pieces() != array.pieces()

    run(main)


def test_a_move_within_a_host_is_a_copy_and_across_hosts_a_promise() -> None:
    async def main(world: World) -> None:
        whole = np.arange(8, dtype=np.float32)
        array = put(world, whole, tiled((0, 2), (2,)))
        target = tiled((1, 0), (2,), "pinned_host")
        moved = world.runtime.transfers.move(array, target)
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
        moved = world.runtime.transfers.move(array, target)
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
                world.runtime.transfers.move(array, target)
            assert_same(caught.value, lost)
        world.up(1)
        gone = put(world, np.zeros(4, np.float32), one(2))
        await world.settle()
        lost = world.lose(1)
        with pytest.raises(SliceLostError) as caught:
            world.runtime.transfers.move(gone, one(0))
        assert_same(caught.value, lost)

    run(main)


def test_a_source_that_is_lost_during_a_move_is_what_the_target_tells() -> None:
    async def main(world: World) -> None:
        array = put(world, np.zeros((2, BIG), np.float32), tiled((2, 0), (2, 1)))
        await world.settle()
        single = world.runtime.transfers.move(
            Array(F32, (1, BIG), one(2), pieces=[array.piece(0)]), one(1)
        )
        cut = world.runtime.transfers.move(array, tiled((0, 1), (1, 2)))
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
        moved = world.runtime.transfers.move(array, one(2))
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
        transfers = world.runtime.transfers
        moved = [transfers.move(array, tiled(d, (1, 4))) for d in ((0, 1, 2, 3), (3, 2, 1, 0))]
        moved.append(transfers.move(array, tiled((2, 3), (2, 1))))
        answers = [Answer() for _ in moved]
        for each, answer in zip(moved, answers, strict=True):
            transfers.ready(each.pieces(), answer)
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


@settings(max_examples=60, deadline=None)
@given(journeys())
def test_any_journey_of_an_array(journey: tuple[tuple[int, ...], list[Sharding], int]) -> None:
    """Whatever the shardings and the order in which hosts work: the values are right."""
    shape, stops, seed = journey
    random = np.random.default_rng(seed)
    whole = random.permutation(math.prod(shape)).astype(np.int32).reshape(shape)

    def choose(count: int) -> int:
        return int(random.integers(count))

    async def main(world: World) -> None:
        array = put(world, whole, stops[0])
        for stop in stops[1:]:
            array = world.runtime.transfers.move(array, stop)
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
    shape, stops, seed = journey
    random = np.random.default_rng(seed)
    whole = random.permutation(math.prod(shape)).astype(np.int32).reshape(shape)

    def choose(count: int) -> int:
        return int(random.integers(count))

    async def main(world: World) -> None:
        array = put(world, whole, stops[0])
        fall = int(random.integers(len(stops)))
        error: StatusError | None = None
        try:
            for number, stop in enumerate(stops[1:]):
                array = world.runtime.transfers.move(array, stop)
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
            world.runtime.transfers.move(array, unknown)
        assert caught.value.code is Code.UNIMPLEMENTED
        del array, caught
        await world.check_nothing_left()

    run(main)
