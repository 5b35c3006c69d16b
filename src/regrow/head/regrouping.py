"""Slices that come back with another number of hosts than they left with.

What is on storage names devices and no hosts, so it is only told anew which host reads what. Handles,
buffers and programs in the head stay as they are; their placements find their hosts again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from regrow.errors import ControlError
from regrow.head.buffers import Buffer, Placement
from regrow.head.saving import Stored
from regrow.head.topology import Topology
from regrow.suspend import PartEntry, ShardEntry

_Held: TypeAlias = "ShardEntry | tuple[int, str] | None"


def regrouped(stored: Stored, buffers: Iterable[Buffer], topology: Topology) -> Stored:
    """What slices have saved, by the hosts that they are to have.

    Args:
        stored: What they have saved, by the hosts that they had.
        buffers: Those that there are.
        topology: With the hosts that they are to have.

    Raises:
        ControlError: A host would have a part that holds an error and a value.
    """
    found: Stored = {
        index: {host: {} for host in _hosts_of(index, topology)} for index in sorted(stored)
    }
    for buffer in buffers:
        placement = Placement(buffer.placement.devices, topology)
        for index in found.keys() & set(placement.slices):
            held = _held(stored[index], buffer)
            for host in found[index].keys() & placement.shards.keys():
                of_host = [held.get(placement.devices[shard]) for shard in placement.shards[host]]
                part = _part(buffer.aid, of_host, index)
                if part is not None:
                    found[index][host][buffer.aid] = part
    return found


def _hosts_of(index: int, topology: Topology) -> range:
    count = topology.hosts_per_slice
    return range(index * count, (index + 1) * count)


def _held(parts: dict[int, dict[int, PartEntry]], buffer: Buffer) -> dict[int, _Held]:
    """What of a buffer each device of a slice has saved: a shard, or an error."""
    held: dict[int, _Held] = {}
    for host, of_host in parts.items():
        part = of_host.get(buffer.aid)
        if part is None:
            continue
        held |= {shard.device: shard for shard in part.shards}
        if part.error is not None:
            placement = buffer.placement
            shards = placement.shards[host]
            held |= {placement.devices[shard]: part.error for shard in shards}
    return held


def _part(aid: int, held: Sequence[_Held], index: int) -> PartEntry | None:
    shards = tuple(one for one in held if isinstance(one, ShardEntry))
    errors = [one for one in held if isinstance(one, tuple)]
    if len(shards) == len(held):
        return PartEntry(aid, shards)
    if len(errors) == len(held):
        return PartEntry(aid, (), errors[0])
    if not shards and not errors:
        return None
    raise ControlError(
        f"slice {index} has an array with an error on one host and a value on another, which have to "
        "come back on two hosts"
    )
