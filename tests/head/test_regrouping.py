"""Saved parts, told anew for other hosts."""

from __future__ import annotations

import pytest
from head_world import World, run

from regrow.errors import ControlError, UsageError
from regrow.head.regrouping import regrouped
from regrow.head.saving import Stored
from regrow.head.topology import Topology
from regrow.suspend import PartEntry, ShardEntry

DEVICES = (6, 1, 4, 3, 0)
ERROR = (9, "of my own")


def shard(device: int) -> ShardEntry:
    return ShardEntry(device, 11, (2,), "device", 8, (str(device),))


def part(aid: int, *devices: int) -> PartEntry:
    return PartEntry(aid, tuple(map(shard, devices)))


def test_each_host_gets_the_shards_of_its_devices_in_their_order() -> None:
    async def main(world: World) -> None:
        buffers = world.runtime.buffers
        buffer = buffers.new(buffers.placement(DEVICES))
        aid = buffer.aid
        # Slices of four devices on two hosts; the second slice is not suspended.
        stored: Stored = {0: {0: {aid: part(aid, 1, 0)}, 1: {aid: part(aid, 3)}}}
        one = regrouped(stored, [buffer], Topology(2, 1, 4))
        assert one == {0: {0: {aid: part(aid, 1, 3, 0)}}}
        four = regrouped(stored, [buffer], Topology(2, 4, 4))
        alone = {0: {aid: part(aid, 0)}, 1: {aid: part(aid, 1)}, 3: {aid: part(aid, 3)}}
        assert four == {0: {**alone, 2: {}}}
        placement = buffer.placement
        buffers.regroup(4)
        assert buffer.placement is placement is buffers.placement(DEVICES)
        assert placement.hosts == DEVICES
        assert placement.local == tuple((device, 0) for device in DEVICES)
        assert regrouped(four, [buffer], Topology(2, 2, 4)) == stored
        buffers.regroup(1)
        assert placement.shards == {1: [0, 2], 0: [1, 3, 4]}

    run(main, slices=2, hosts=2, devices=4)


def test_an_error_stays_on_its_hosts() -> None:
    async def main(world: World) -> None:
        buffers = world.runtime.buffers
        buffer = buffers.new(buffers.placement((0, 1, 2, 3)))
        aid = buffer.aid
        broken = PartEntry(aid, (), ERROR)
        stored: Stored = {0: {0: {aid: broken}, 1: {aid: part(aid, 2, 3)}}}
        four = regrouped(stored, [buffer], Topology(1, 4, 4))[0]
        assert [four[host][aid].error for host in range(4)] == [ERROR, ERROR, None, None]
        with pytest.raises(ControlError, match="an error on one host and a value on another"):
            regrouped(stored, [buffer], Topology(1, 1, 4))
        both: Stored = {0: {0: {aid: broken}, 1: {aid: broken}}}
        assert regrouped(both, [buffer], Topology(1, 1, 4)) == {0: {0: {aid: broken}}}

    run(main, slices=1, hosts=2, devices=4)


@pytest.mark.parametrize("hosts", [0, -1, 3, 8])
def test_hosts_that_devices_cannot_be_divided_among(hosts: int) -> None:
    with pytest.raises(UsageError, match=rf"of a slice \(4\) cannot be divided among {hosts}"):
        Topology(2, 1, 4).check_hosts(hosts)
