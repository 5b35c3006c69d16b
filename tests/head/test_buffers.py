"""What is lost with a slice, what is not, and what hosts hear of it."""

from __future__ import annotations

import numpy as np
import pytest
from head_world import F32, Answer, World, assert_same, one, replicated, run, tiled

from regrow.channel import commands as c
from regrow.errors import Code, SliceLostError, StatusError
from regrow.head.buffers import Array, join


def put(world: World, sharding: object, rows: int = 4) -> Array:
    value = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)
    shape = value.shape
    buffer = world.runtime.transfers.put(value.tobytes(), F32, shape, None, sharding)  # type: ignore[arg-type]
    return Array(F32, shape, sharding, whole=buffer)  # type: ignore[arg-type]


def test_placements() -> None:
    async def main(world: World) -> None:
        buffers = world.runtime.buffers
        placement = buffers.placement((5, 0, 4, 1))
        assert buffers.placement((5, 0, 4, 1)) is placement
        assert placement.hosts == (2, 0)
        assert placement.slices == (0, 1)
        assert placement.local == ((2, 0), (0, 0), (2, 1), (0, 1))
        assert placement.shards == {2: [0, 2], 0: [1, 3]}
        assert placement.spans
        assert not buffers.placement((2, 3)).spans
        for wrong in (-1, 8):
            with pytest.raises(
                StatusError, match=f"no device {wrong}; the cluster has 8"
            ) as caught:
                buffers.placement((0, wrong))
            assert caught.value.code is Code.INVALID_ARGUMENT

    run(main, slices=2, hosts=2, devices=4)


def test_numbers_are_never_used_twice() -> None:
    async def main(world: World) -> None:
        buffers = world.runtime.buffers
        seen = {buffers.number() for _ in range(5)}
        seen |= {buffers.new(buffers.placement((0,))).aid for _ in range(5)}
        assert len(seen) == 10

    run(main)


def test_the_last_reference_frees_a_buffer_on_its_hosts() -> None:
    async def main(world: World) -> None:
        array = put(world, tiled((0, 2), (2, 1)))
        aid = array.whole().aid
        await world.settle()
        assert aid in world.hosts[0].parts
        assert aid in world.hosts[1].parts
        array.delete()
        await world.check_nothing_left()
        assert c.Free((aid,)) in world.sent(0, c.Free)
        assert c.Free((aid,)) in world.sent(1, c.Free)

    run(main)


def test_a_slice_that_is_not_there() -> None:
    async def main(world: World) -> None:
        buffers = world.runtime.buffers
        with pytest.raises(
            SliceLostError, match="slice 1 is not there: it has not come up"
        ) as caught:
            buffers.new(buffers.placement((2, 0)))
        assert caught.value.code is Code.DATA_LOSS
        world.up(0)
        buffers.new(buffers.placement((0,)))
        world.up(1)
        buffers.new(buffers.placement((0, 2)))
        lost = world.lose(1)
        with pytest.raises(SliceLostError) as caught:
            buffers.new(buffers.placement((0, 2)))
        assert_same(caught.value, lost)

    run(main, up=False)


def test_a_loss_is_sticky_and_what_is_born_later_lives() -> None:
    async def main(world: World) -> None:
        old = put(world, tiled((0, 2), (2, 1))).whole()
        away = put(world, one(0)).whole()
        lost = world.lose(1)
        between = put(world, one(1)).whole()
        for _ in range(2):
            with pytest.raises(SliceLostError) as caught:
                old.check()
            assert_same(caught.value, lost)
            old.check_shard(0)
            with pytest.raises(SliceLostError):
                old.check_shard(1)
            away.check()
            between.check()
            world.up(1)
        reborn = put(world, tiled((0, 2), (2, 1))).whole()
        reborn.check()
        reborn.check_shard(1)
        second = world.lose(1, "exit status 1")
        with pytest.raises(SliceLostError) as caught:
            reborn.check()
        assert_same(caught.value, second)
        assert (second.incarnation, second.slice_index) == (3, 1)

    run(main)


def test_the_loss_of_each_slice_is_its_own() -> None:
    async def main(world: World) -> None:
        array = put(world, tiled((0, 2, 4), (1, 1))).whole()
        first = world.lose(2)
        with pytest.raises(SliceLostError) as caught:
            array.check()
        assert_same(caught.value, first)
        world.lose(0)
        with pytest.raises(SliceLostError) as caught:
            array.check_shard(2)
        assert_same(caught.value, first)
        array.check_shard(1)

    run(main, slices=3)


def test_freeing_a_buffer_of_a_lost_slice_tells_the_survivors_only() -> None:
    async def main(world: World) -> None:
        array = put(world, tiled((0, 2), (2, 1)))
        await world.settle()
        world.lose(1)
        world.up(1)
        array.delete()
        await world.check_nothing_left()
        # Its successor hears of a number that it does not know, and does not mind.
        assert not world.sent(1, c.Put)

    run(main)


def test_join_is_a_take_on_each_host() -> None:
    async def main(world: World) -> None:
        singles = [put(world, one(device)).whole() for device in (3, 0, 1)]
        whole = join([(single, 0) for single in singles])
        aids = [single.aid for single in singles]
        assert whole.placement.devices == (3, 0, 1)
        await world.settle()
        assert world.sent(1, c.Take) == [c.Take(whole.aid, ((aids[0], 0),))]
        assert world.sent(0, c.Take) == [c.Take(whole.aid, ((aids[1], 0), (aids[2], 0)))]
        world.lose(1)
        with pytest.raises(SliceLostError):
            join([(whole, 0), (whole, 1)])
        join([(whole, 1), (whole, 2)])

    run(main)


def test_join_names_positions_in_the_part_of_each_host() -> None:
    async def main(world: World) -> None:
        source = put(world, tiled((2, 0, 3, 1), (4, 1))).whole()
        whole = join([(source, 3), (source, 2), (source, 1)])
        await world.settle()
        assert world.sent(0, c.Take) == [c.Take(whole.aid, ((source.aid, 1), (source.aid, 0)))]
        assert world.sent(1, c.Take) == [c.Take(whole.aid, ((source.aid, 1),))]

    run(main)


def test_an_array_of_pieces_is_joined_once() -> None:
    async def main(world: World) -> None:
        singles = [put(world, one(device), 2).whole() for device in (0, 1)]
        array = Array(F32, (4, 2), tiled((0, 1), (2, 1)), pieces=[(s, 0) for s in singles])
        assert array.pieces() == [(singles[0], 0), (singles[1], 0)]
        whole = array.whole()
        assert array.whole() is whole
        assert array.piece(1) == (whole, 1)
        await world.settle()
        assert len(world.sent(0, c.Take)) == 1
        answer = Answer()
        world.runtime.transfers.get(array.piece(1), F32, (2, 2), None, answer)
        await world.settle()
        assert np.frombuffer(answer.value, np.float32).tolist() == [0, 1, 2, 3]

    run(main)


def test_a_deleted_array_is_an_error_and_not_a_loss() -> None:
    async def main(world: World) -> None:
        array = put(world, replicated((0, 2)))
        array.delete()
        array.delete()
        assert array.deleted
        world.lose(1)
        for use in (array.whole, array.pieces, array.check, lambda: array.piece(0)):
            with pytest.raises(StatusError) as caught:
                use()
            assert caught.value.code is Code.INVALID_ARGUMENT
            assert "deleted" in caught.value.message

    run(main)


def test_an_array_whose_shard_is_lost() -> None:
    async def main(world: World) -> None:
        array = put(world, tiled((0, 2), (2, 1)))
        pieces = Array(F32, (4, 2), array.sharding, pieces=array.pieces())
        lost = world.lose(1)
        for each in (array, pieces):
            with pytest.raises(SliceLostError) as caught:
                each.check()
            assert_same(caught.value, lost)
            with pytest.raises(SliceLostError):
                each.whole()
        assert len(pieces.pieces()) == 2

    run(main)
