"""Buffers: what lives on which hosts, until when, and whether it is lost.

A `Buffer` is a number that every host which owns a part of it knows. An `Array` is what a client's
handle stands for: a whole buffer, or single shards of buffers. To take an array apart and to put one
together is bookkeeping here; hosts hear of it only when a program needs the result as one buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, final

from regrow.channel.commands import Take, pack
from regrow.errors import Code, SliceLostError, StatusError
from regrow.head.links import Link
from regrow.head.topology import Topology
from regrow.wire.shardings import Sharding

Piece: TypeAlias = "tuple[Buffer, int]"


@final
class Placement:
    """A sequence of devices, and the hosts and slices that they belong to.

    Which hosts these are changes where slices come back with another number of them.

    Attributes:
        devices: Logical ids, one for each shard.
        hosts: The hosts, in the order of their first shard.
        slices: The slices.
        local: For each shard its host, and its position in the part of that host.
        shards: For each host the numbers of its shards.
        spans: Whether there is more than one host.
    """

    __slots__ = ("devices", "hosts", "local", "shards", "slices", "spans")

    def __init__(self, devices: tuple[int, ...], topology: Topology) -> None:
        self.devices = devices
        self.slices = tuple(sorted({topology.slice_of(device) for device in devices}))
        self.arrange(topology)

    def arrange(self, topology: Topology) -> None:
        """Finds the hosts."""
        self.shards: dict[int, list[int]] = {}
        local = []
        for shard, device in enumerate(self.devices):
            mine = self.shards.setdefault(topology.host_of(device), [])
            local.append((topology.host_of(device), len(mine)))
            mine.append(shard)
        self.local = tuple(local)
        self.hosts = tuple(self.shards)
        self.spans = len(self.hosts) > 1


@final
class Buffers:
    """Makes buffers, and knows what is lost.

    Attributes:
        links: The link of each host that is up, by host.
        losses: How many slices have been lost so far; a buffer remembers the count at its birth.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.links: dict[int, Link] = {}
        self.losses = 0
        self._lost_at = [0] * topology.slices
        self._errors: dict[int, SliceLostError] = {}
        self._placements: dict[tuple[int, ...], Placement] = {}
        self._next = 1

    def placement(self, devices: tuple[int, ...]) -> Placement:
        """The placement of these devices.

        Raises:
            StatusError: There is no such device.
        """
        placement = self._placements.get(devices)
        if placement is None:
            for device in devices:
                if not 0 <= device < self.topology.devices:
                    raise StatusError.user(
                        Code.INVALID_ARGUMENT,
                        f"there is no device {device}; the cluster has {self.topology.devices}",
                    )
            placement = self._placements[devices] = Placement(devices, self.topology)
        return placement

    def regroup(self, hosts_per_slice: int) -> None:
        """Slices have so many hosts from now on; there are none at the moment."""
        self.topology.hosts_per_slice = hosts_per_slice
        for placement in self._placements.values():
            placement.arrange(self.topology)

    def new(self, placement: Placement) -> Buffer:
        """A new buffer on live hosts.

        Raises:
            SliceLostError: One of its slices is not there.
        """
        self.check_live(placement)
        return Buffer(self.number(), placement, self)

    @property
    def latest(self) -> int:
        """The number of the buffer or program that was made last."""
        return self._next

    def number(self) -> int:
        """A number that no buffer or program has."""
        self._next += 1
        return self._next

    def check_live(self, placement: Placement) -> None:
        """Checks that all hosts of a placement are there.

        Raises:
            SliceLostError: One is not.
        """
        links = self.links
        for host in placement.hosts:
            if host not in links:
                raise self.error_of(self.topology.slice_of_host(host)).fresh()

    def error_of(self, slice_index: int) -> SliceLostError:
        """The error of a slice that is not there."""
        error = self._errors.get(slice_index)
        return error or SliceLostError(slice_index, 0, "is not there: it has not come up yet")

    def slice_lost(self, slice_index: int, error: SliceLostError) -> None:
        """A slice is lost: whatever was born before and has a shard on it is lost with it."""
        self.losses += 1
        self._lost_at[slice_index] = self.losses
        self._errors[slice_index] = error

    def lost(self, slice_index: int, born: int) -> SliceLostError | None:
        """The error of something that was born at that count and needs this slice, if lost."""
        return self._errors[slice_index] if self._lost_at[slice_index] > born else None


@final
class Buffer:
    """One buffer. The last reference to it frees its parts on the hosts.

    Attributes:
        kept: What is to live as long as it does.
    """

    __slots__ = ("__weakref__", "_regained", "aid", "born", "buffers", "kept", "placement")

    def __init__(self, aid: int, placement: Placement, buffers: Buffers) -> None:
        self.aid = aid
        self.placement = placement
        self.born = buffers.losses
        self.buffers = buffers
        self.kept: object = None
        self._regained: dict[int, int] | None = None

    def __del__(self) -> None:
        links = self.buffers.links
        for host in self.placement.hosts:
            link = links.get(host)
            if link is not None:
                link.free(self.aid)

    def check(self) -> None:
        """Checks that it is not lost as a whole.

        Raises:
            SliceLostError: A slice that it has a shard on was lost since its birth.
        """
        if self.born != self.buffers.losses:
            for index in self.placement.slices:
                error = self.lost(index)
                if error is not None:
                    raise error.fresh()

    def check_shard(self, shard: int) -> None:
        """Checks that one shard of it is not lost.

        Raises:
            SliceLostError: The slice of the shard was lost since the buffer's birth.
        """
        if self.born != self.buffers.losses:
            host = self.placement.local[shard][0]
            error = self.lost(self.buffers.topology.slice_of_host(host))
            if error is not None:
                raise error.fresh()

    def lost(self, slice_index: int) -> SliceLostError | None:
        """The error of its shards on a slice, if they are lost."""
        regained = self._regained
        born = self.born if regained is None else regained.get(slice_index, self.born)
        return self.buffers.lost(slice_index, born)

    def regain(self, slice_index: int) -> None:
        """Its shards on a slice are there again, on the slice's new hosts."""
        self._regained = (self._regained or {}) | {slice_index: self.buffers.losses}


@final
class Array:
    """What a handle stands for.

    Attributes:
        kind: Element type (see `wire.dtypes`).
        shape: The global shape.
        sharding: How it is cut, and where the shards are.
        deleted: The client has deleted it, or given it away to a program.
    """

    __slots__ = ("_pieces", "_whole", "deleted", "kind", "shape", "sharding")

    def __init__(
        self,
        kind: int,
        shape: tuple[int, ...],
        sharding: Sharding,
        whole: Buffer | None = None,
        pieces: Sequence[Piece] | None = None,
    ) -> None:
        self.kind = kind
        self.shape = shape
        self.sharding = sharding
        self.deleted = False
        self._whole = whole
        self._pieces = pieces

    def delete(self) -> None:
        """Lets go of the memory; later uses fail."""
        self.deleted = True
        self._whole = self._pieces = None

    def pieces(self) -> Sequence[Piece]:
        """The shards, each as a shard of some buffer.

        Raises:
            StatusError: The array has been deleted.
        """
        whole = self._whole
        if whole is not None:
            return [(whole, shard) for shard in range(len(whole.placement.devices))]
        if self._pieces is None:
            raise StatusError(Code.INVALID_ARGUMENT, "Array has been deleted.")
        return self._pieces

    def origin(self) -> Buffer | None:
        """The buffer that its last shard belongs to; None once it is deleted."""
        whole = self._whole
        if whole is not None:
            return whole
        return self._pieces[-1][0] if self._pieces else None

    def piece(self, shard: int) -> Piece:
        """One shard, as a shard of some buffer.

        Raises:
            StatusError: The array has been deleted.
        """
        whole = self._whole
        return (whole, shard) if whole is not None else self.pieces()[shard]

    def whole(self) -> Buffer:
        """The array as one buffer over the devices of its sharding, in their order.

        Raises:
            SliceLostError: A shard of it is lost.
            StatusError: The array has been deleted.
        """
        whole = self._whole
        if whole is not None:
            if whole.born != whole.buffers.losses:
                whole.check()
            return whole
        self._whole = whole = join(self.pieces())
        self._pieces = None
        return whole

    def check(self) -> None:
        """Checks that no shard is lost.

        Raises:
            SliceLostError: One is.
            StatusError: The array has been deleted.
        """
        if self._whole is not None:
            self._whole.check()
            return
        for buffer, shard in self.pieces():
            buffer.check_shard(shard)


def join(pieces: Sequence[Piece]) -> Buffer:
    """Single shards as one buffer, without a copy.

    Raises:
        SliceLostError: One of them is lost.
    """
    buffers = pieces[0][0].buffers
    by_host: dict[int, list[tuple[int, int]]] = {}
    for buffer, shard in pieces:
        buffer.check_shard(shard)
        host, position = buffer.placement.local[shard]
        by_host.setdefault(host, []).append((buffer.aid, position))
    devices = tuple(buffer.placement.devices[shard] for buffer, shard in pieces)
    joined = buffers.new(buffers.placement(devices))
    for host, sources in by_host.items():
        buffers.links[host].post(pack(Take(joined.aid, sources)))
    return joined
