"""Replicas of snapshots for slices that take the place of lost ones.

A snapshot is made by a program that hashes arrays and copies them to host memory (`head.digests`). When
its hashes are there, the hosts write one replica of the copies into shared memory, each slice its share.
New hosts of a lost slice take that memory, in place, as their shards of the copies, under the same
numbers: the snapshot is whole again before the client hears of the new hosts. Whether it is what was
saved the client sees from the hashes, as of any replica.

A replica lives as long as the copies that it is one of. The memory has no name, so nothing of it outlives
the processes.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, final

from regrow.channel.commands import HostShard, Put
from regrow.errors import Code, ResourceError, StatusError
from regrow.head.buffers import Array, Buffer, Buffers, Piece
from regrow.head.links import Lease, gather
from regrow.head.transfers import Transfers
from regrow.wire.dtypes import numpy_dtype

log = logging.getLogger(__name__)

# Memory that begins at such an address is used by XLA as it is.
_ALIGNMENT: Final = 64


class _Place(NamedTuple):
    """Where a shard is in a replica."""

    offset: int
    dims: tuple[int, ...]


class _Copy(NamedTuple):
    """One of the copies, and where each of its shards is."""

    buffer: weakref.ref[Buffer]
    kind: int
    memory_kind: str
    places: list[_Place]


class _Source(NamedTuple):
    """A shard that is to be written."""

    piece: Piece
    offset: int
    size: int


@final
class _Replica:
    """Each different shard of all copies once.

    Attributes:
        size: How many bytes they are.
        lease: The memory, once all of it is written.
    """

    def __init__(self, copies: Sequence[Array]) -> None:
        """Lays it out.

        Raises:
            StatusError: It is not known how an array is cut.
        """
        self.size = 0
        self.lease: Lease | None = None
        self.copies: list[_Copy] = []
        self.sources: list[_Source] = []
        for array in copies:
            self._add(array, array.whole())

    def _add(self, array: Array, buffer: Buffer) -> None:
        itemsize = numpy_dtype(array.kind).itemsize
        shapes = array.sharding.shard_shapes(array.shape)
        holders: dict[Any, list[int]] = {}
        for shard, region in enumerate(array.sharding.indices(array.shape)):
            holders.setdefault(tuple((one.start, one.stop) for one in region), []).append(shard)
        places: dict[int, _Place] = {}
        for shards in holders.values():
            place = _Place(self.size, shapes[shards[0]])
            places |= dict.fromkeys(shards, place)
            size = math.prod(place.dims) * itemsize
            # Each holder in its turn, so that slices share the work.
            source = shards[len(self.sources) % len(shards)]
            self.sources.append(_Source((buffer, source), self.size, size))
            self.size += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.copies.append(
            _Copy(
                weakref.ref(buffer),
                array.kind,
                array.sharding.memory_kind or "device",
                [places[shard] for shard in range(len(shapes))],
            )
        )

    def written(self, lease: Lease) -> None:
        """All of it is there; it stays as long as one of the copies."""
        self.lease = lease
        for copy in self.copies:
            buffer = copy.buffer()
            if buffer is not None:
                buffer.kept = self


@final
class SpareSnapshots:
    """The replicas of all snapshots that clients have."""

    def __init__(self, buffers: Buffers, transfers: Transfers, warn: Callable[[str], None]) -> None:
        """Begins without any.

        Args:
            buffers: Where the copies are.
            transfers: Moves their bytes.
            warn: Told, once, why snapshots have no replica.
        """
        self._buffers = buffers
        self._transfers = transfers
        self._warn = warn
        self._warned = False
        self._made = 0
        self._replicas: weakref.WeakSet[_Replica] = weakref.WeakSet()

    def describe(self) -> dict[str, int]:
        """What there is to know, as JSON values."""
        leases = [replica.lease for replica in self._replicas]
        sizes = [lease.block.size for lease in leases if lease is not None]
        return {"made": self._made, "kept": len(sizes), "bytes": sum(sizes)}

    def keep(self, hashes: Array, *copies: Array) -> None:
        """Begins to make a replica of copies that are being made; if that fails it is only told."""
        try:
            # It holds on to the buffers: the arrays may be given away before the hashes are there.
            replica = _Replica(copies)
        except StatusError as error:
            self._failed(error)
            return

        def hashed(error: StatusError | None, _: Any) -> None:
            if error is None and replica.size:
                self._write(replica)

        self._transfers.ready(hashes.pieces(), hashed)

    def _write(self, replica: _Replica) -> None:
        try:
            lease = self._transfers.room_to_keep(replica.size)
        except ResourceError as error:
            self._failed(error)
            return

        def written(error: StatusError | None, _: Any) -> None:
            if error is None:
                replica.written(lease)
                self._replicas.add(replica)
                self._made += 1
            elif error.code != Code.DATA_LOSS:  # That a slice is lost is told anyway.
                self._failed(error)

        sources, replica.sources = replica.sources, []
        one = gather(len(sources), written)
        for piece, offset, size in sources:
            self._transfers.write(piece, lease, offset, size, one)

    def _failed(self, error: Exception) -> None:
        log.info("no replica of a snapshot: %s", error)
        if not self._warned:
            self._warned = True
            self._warn(
                "snapshots have no replica for a spare, which copies them from the other slices then: "
                f"{error}"
            )

    def slice_up(self, index: int) -> None:
        """There are new hosts of a slice: they are given what copies had on it."""
        for replica in list(self._replicas):
            lease = replica.lease
            if lease is None:
                continue
            for copy in replica.copies:
                buffer = copy.buffer()
                if buffer is not None and buffer.lost(index) is not None:
                    self._give(index, lease, copy, buffer)
                    buffer.regain(index)

    def _give(self, index: int, lease: Lease, copy: _Copy, buffer: Buffer) -> None:
        placement = buffer.placement
        for host, numbers in placement.shards.items():
            link = self._buffers.links.get(host)
            if link is None or link.slice_index != index:
                continue
            shards = [
                HostShard(placement.devices[number], *copy.places[number], None)
                for number in numbers
            ]
            bulk, hold = link.reach(lease), link.hold(lease)
            link.send(Put(buffer.aid, copy.kind, bulk, shards, copy.memory_kind, False, hold, True))

    def drop(self) -> None:
        """Lets go of all replicas: the slices leave with their state saved."""
        for replica in self._replicas:
            replica.lease = None
        self._transfers.keep_no_room()
