"""Replicas of snapshots for slices that take the place of lost ones."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from head_world import F32, World, run, tiled
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.channel import commands as c
from regrow.channel.digests import CopySpec, DigestRequest
from regrow.config import HeadConfig
from regrow.errors import Code, OptionError, StatusError
from regrow.head.buffers import Array
from regrow.head.digests import Digests
from regrow.head.spare_snapshots import SpareSnapshots
from regrow.wire.schema import xla

DEVICES = tuple(range(8))  # Two slices of two hosts with two devices each.
SIZES: dict[str, Any] = {"hosts": 2, "devices": 4}
KEPT: dict[str, Any] = SIZES | {"spare_snapshots": True, "machines_socket": "/machines"}
SHAPE = (8, 3)
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # Each slice has all of an array.
SHARDING = tiled(DEVICES, (4, 1), order=ORDER)
OP_SHARDING = xla.OpSharding(
    type=3,
    tile_assignment_dimensions=[4, 1, 2],
    tile_assignment_devices=ORDER,
    replicate_on_last_tile_dim=True,
).SerializeToString()


def whole(number: int) -> np.ndarray[Any, Any]:
    return np.arange(24, dtype=np.float32).reshape(SHAPE) + 100 * number


def put(world: World, value: np.ndarray[Any, Any]) -> Array:
    buffer = world.runtime.transfers.put(value.tobytes(), F32, SHAPE, None, SHARDING)
    return Array(F32, SHAPE, SHARDING, whole=buffer)


def snapshot(world: World, arrays: Sequence[Array]) -> list[Array]:
    """The hashes and copies of arrays, as a client has them made; a replica is begun."""
    spec = CopySpec(F32, SHAPE, OP_SHARDING)
    request = DigestRequest(DEVICES, len(arrays), (spec,) * len(arrays))
    made = Digests(request.text().encode(), world.runtime.buffers).run(arrays)
    spares(world).keep(*made)
    return made


def spares(world: World) -> SpareSnapshots:
    assert world.runtime.spare_snapshots is not None
    return world.runtime.spare_snapshots


def on_hosts(world: World, array: Array) -> list[Any]:
    """What the hosts have of it, by shard."""
    placement = array.whole().placement
    return [
        world.hosts[host].parts[array.whole().aid][position].value
        for host, position in placement.local
    ]


def is_whole(world: World, array: Array, value: np.ndarray[Any, Any]) -> bool:
    array.check()
    regions = array.sharding.indices(array.shape)
    pairs = zip(on_hosts(world, array), regions, strict=True)
    return all(np.array_equal(shard, value[region]) for shard, region in pairs)


def lost(array: Array) -> bool:
    try:
        array.check()
    except StatusError as error:
        return error.code is Code.DATA_LOSS
    return False


def warnings(world: World) -> list[str]:
    return [text for kind, _, _, text in world.events if kind == "warning"]


@pytest.mark.parametrize("gone", [(0,), (1,), (0, 1)])
def test_new_hosts_get_what_copies_had_on_the_slice(gone: tuple[int, ...]) -> None:
    async def main(world: World) -> None:
        arrays = [put(world, whole(number)) for number in range(3)]
        hashes, *copies = snapshot(world, arrays)
        await world.settle()
        assert spares(world).describe()["made"] == 1
        for host in range(4):
            assert len(world.sent(host, c.Get)) == 3, "all hosts have their share in it"
        for _ in range(2):  # And the next one in that place gets it again.
            for index in gone:
                world.lose(index)
            assert all(map(lost, copies))
            for index in gone:
                world.up(index)
            await world.settle()
            for number, copy in enumerate(copies):
                assert is_whole(world, copy, whole(number))
            assert all(map(lost, [*arrays, hashes])), "only copies come back"
        del arrays, hashes
        assert spares(world).describe()["kept"] == 1
        del copies, copy
        await world.check_nothing_left()
        assert spares(world).describe() == {"made": 1, "kept": 0, "bytes": 0}
        assert not warnings(world)

    run(main, **KEPT)


def test_the_latest_snapshot_takes_the_place_of_the_former() -> None:
    async def main(world: World) -> None:
        array = put(world, whole(0))
        former = snapshot(world, [array])
        await world.settle()
        size = world.runtime.arena.used_bytes
        latest = snapshot(world, [put(world, whole(1))])
        await world.settle()
        assert world.runtime.arena.used_bytes == 2 * size
        del former
        gc.collect()
        assert world.runtime.arena.used_bytes == size
        world.lose(0)
        world.up(0)
        await world.settle()
        assert is_whole(world, latest[1], whole(1))

    run(main, **KEPT)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(0, 60), st.integers(0, 1), st.booleans())
def test_a_loss_at_any_moment(seed: int, turns: int, index: int, again: bool) -> None:
    """A copy is what was saved, or lost; no wait is in vain, nothing is left."""
    random = np.random.default_rng(seed)

    def choose(count: int) -> int:
        return int(random.integers(count))

    async def main(world: World) -> None:
        arrays = [put(world, whole(number)) for number in range(2)]
        _, *copies = snapshot(world, arrays)
        await world.settle(choose, turns=turns)
        made = spares(world).describe()["made"]
        for _ in range(1 + again):
            world.lose(index)
            world.up(index)
        await world.settle(choose)
        for number, copy in enumerate(copies):
            assert lost(copy) != bool(made)
            assert lost(copy) or is_whole(world, copy, whole(number))
        assert not warnings(world)
        del arrays, copies, copy, _
        await world.check_nothing_left()

    run(main, **KEPT)


def test_where_there_is_no_room_it_is_told_once_and_nothing_fails() -> None:
    async def main(world: World) -> None:
        for _ in range(2):
            _, copy, *_ = snapshot(world, [put(world, whole(3))] * 10)
            await world.settle()
            assert is_whole(world, copy, whole(3))
        (text,) = warnings(world)
        assert text.startswith("snapshots have no replica for a spare")
        assert "shared memory for what stays there" in text
        world.lose(1)
        world.up(1)
        assert lost(copy)

    run(main, **KEPT | {"arena_bytes": 4096})


def test_a_snapshot_that_failed_has_none() -> None:
    async def main(world: World) -> None:
        array = put(world, whole(0))
        await world.settle()
        host, position = array.whole().placement.local[0]
        cell = world.hosts[host].parts[array.whole().aid][position]
        cell.error = StatusError(Code.INTERNAL, "broken")
        made = snapshot(world, [array])
        await world.settle()
        assert spares(world).describe()["made"] == 0
        assert not warnings(world)
        del made, array, cell
        await world.check_nothing_left()

    run(main, **KEPT)


def test_a_host_that_cannot_write_fails_nothing_and_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_view(_: Any) -> Any:
        raise ValueError("the segment is not open")

    async def main(world: World) -> None:
        array = put(world, whole(0))
        await world.settle()
        monkeypatch.setattr(world.hosts[0], "view", no_view)
        made = snapshot(world, [array])
        await world.settle()
        assert is_whole(world, made[1], whole(0))
        (text,) = warnings(world)
        assert text.endswith("the segment is not open")
        assert not world.runtime.arena.used_bytes
        del made, array
        await world.check_nothing_left()

    run(main, **KEPT)


def test_slices_that_leave_with_their_state_saved_need_none() -> None:
    async def main(world: World) -> None:
        made = snapshot(world, [put(world, whole(0))])
        await world.settle()
        assert world.runtime.arena.used_bytes
        world.runtime.slice_leaves(0)
        assert not world.runtime.arena.used_bytes
        assert spares(world).describe() == {"made": 1, "kept": 0, "bytes": 0}
        del made

    run(main, **KEPT)


def test_it_is_off_unless_asked_for() -> None:
    async def main(world: World) -> None:
        assert world.runtime.spare_snapshots is None

    run(main, **SIZES)
    with pytest.raises(OptionError, match="spare_snapshots is for jobs of a shared cluster"):
        HeadConfig("test", "run", "/home", "/dir", "/dir", spare_snapshots=True)
