"""Bytes between clients and hosts and between hosts, checked against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from head_world import F32, Answer, World, assert_same, one, replicated, run, tiled
from moved_arrays import BIG, check, check_failed, fail_part, memory_of, put, shards_of

from regrow.channel import commands as c
from regrow.errors import Code, ResourceError, SliceLostError, StatusError
from regrow.head.buffers import Array
from regrow.head.links import Lease
from regrow.head.transfers import INLINE_BYTES, EpochError

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
        moved = world.runtime.moves.move(array, target)
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
        fail_part(world, 0, array)
        answer = Answer()
        world.runtime.transfers.get(array.piece(0), F32, (BIG,), None, answer)
        moved = world.runtime.moves.move(array, one(2))
        await world.settle()
        assert answer.error is not None
        await check_failed(world, moved)
        del array, moved
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
        moved = world.runtime.moves.move(array, one(2))
        array.delete()
        await world.settle()
        assert ready.value is None
        check(await shards_of(world, moved), np.zeros(BIG), one(2))
        del moved
        await world.check_nothing_left()

    run(main)
