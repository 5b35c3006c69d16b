"""Bytes between clients and hosts.

Client bytes arrive in shared memory and go to local hosts by reference.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final, TypeAlias, final

from regrow.channel.arena import Arena
from regrow.channel.commands import (
    Bulk,
    Get,
    HostShard,
    Put,
    Ready,
)
from regrow.errors import Code, ResourceError, StatusError
from regrow.head.buffers import Buffer, Buffers, Piece
from regrow.head.epochs import Epochs
from regrow.head.extents import c_strides, check_extent, extent
from regrow.head.links import Lease, Link, Waiter, gather
from regrow.wire.dtypes import STRING, numpy_dtype
from regrow.wire.shardings import Sharding

Memory: TypeAlias = "bytes | bytearray | Lease"
"""Bytes of a client: small ones as such, large ones in shared memory."""
Region: TypeAlias = "list[tuple[int, int]]"
"""Begin and end in each dimension of a shard."""

INLINE_BYTES: Final = 32 * 1024
# Arrays may live in shared memory as long as this much of it is left for what is on its way.
_KEPT_SHARE: Final = 0.5


@final
class Transfers:
    """Moves bytes; one for all sessions."""

    def __init__(self, buffers: Buffers, epochs: Epochs, arena: Arena) -> None:
        self._buffers = buffers
        self._epochs = epochs
        self._arena = arena
        self._keep_below_bytes = int(arena.limit_bytes * _KEPT_SHARE)

    def room(self, size: int) -> Memory:
        """Memory for `size` bytes.

        Raises:
            ResourceError: There is no such room.
        """
        return bytearray(size) if size <= INLINE_BYTES else Lease(self._arena, size)

    def room_to_keep(self, size: int) -> Lease:
        """Shared memory for what is not on its way, but stays until another such takes its place.

        Raises:
            ResourceError: What is on its way would not have enough left.
        """
        wanted = self._arena.used_bytes + size
        if wanted > self._keep_below_bytes:
            raise ResourceError(
                "shared memory for what stays there", wanted, self._keep_below_bytes
            )
        # Fresh pages would cost more than the copies that fill them.
        self._arena.reserve_idle(size)
        return Lease(self._arena, size)

    def keep_no_room(self) -> None:
        """There will be no other for the time being."""
        self._arena.reserve_idle(0)

    # --- from the client ---

    def put(
        self,
        memory: Memory,
        kind: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None,
        sharding: Sharding,
    ) -> Buffer:
        """A host array, cut as `sharding` says, on its devices.

        Raises:
            SliceLostError: A slice of it is not there.
            StatusError: The memory is too small for the shape.
        """
        if kind == STRING:
            return self._put_whole(kind, memory, shape, sharding)
        dtype = numpy_dtype(kind)
        size = memory.block.size if isinstance(memory, Lease) else len(memory)
        check_extent(size, shape, strides, dtype.itemsize)
        if strides is None:
            strides = c_strides(shape, dtype.itemsize)
        placement = self._buffers.placement(sharding.devices)
        buffer = self._buffers.new(placement)
        regions = sharding.indices(shape)
        for host, shards in placement.shards.items():
            link = self._buffers.links[host]
            views = []
            for shard in shards:
                region = regions[shard]
                dims = tuple(part.stop - part.start for part in region)
                starts = zip(region, strides, strict=True)
                # An empty shard may begin behind the end of the memory.
                offset = 0 if 0 in dims else sum(part.start * step for part, step in starts)
                views.append(HostShard(sharding.devices[shard], offset, dims, strides))
            self._put(link, buffer, kind, memory, views, sharding.memory_kind)
        return buffer

    def _put(
        self,
        link: Link,
        buffer: Buffer,
        kind: int,
        memory: Memory,
        shards: Sequence[HostShard],
        memory_kind: str | None,
    ) -> None:
        spans = buffer.placement.spans
        bulk: Bulk
        if isinstance(memory, Lease) and link.shares_memory:
            bulk, lease = link.reach(memory), link.hold(memory)
        else:
            bulk, lease = bytes(memory.view if isinstance(memory, Lease) else memory), 0
        keep = self._arena.used_bytes < self._keep_below_bytes
        where = memory_kind or "device"
        link.send(Put(buffer.aid, kind, bulk, shards, where, spans, lease, keep))

    def empty(self, kind: int, shape: tuple[int, ...], sharding: Sharding) -> Buffer:
        """A buffer without bytes: a token, or an array with a dimension of 0."""
        return self._put_whole(kind, b"", shape, sharding)

    def _put_whole(
        self, kind: int, memory: Memory, shape: tuple[int, ...], sharding: Sharding
    ) -> Buffer:
        placement = self._buffers.placement(sharding.devices)
        buffer = self._buffers.new(placement)
        shapes = sharding.shard_shapes(shape) if 0 in shape else (shape,) * len(sharding.devices)
        for host, shards in placement.shards.items():
            views = [HostShard(sharding.devices[s], 0, shapes[s], None) for s in shards]
            link = self._buffers.links[host]
            self._put(link, buffer, kind, memory, views, sharding.memory_kind)
        return buffer

    # --- to the client ---

    def get(
        self,
        piece: Piece,
        kind: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None,
        done: Waiter,
    ) -> None:
        """Brings one shard to the head, laid out by `strides` (None: C order)."""
        # Nobody but their host knows how long strings are.
        itemsize = 0 if kind == STRING else numpy_dtype(kind).itemsize
        size = extent(shape, strides, itemsize)
        buffer, shard = piece
        buffer.check_shard(shard)
        host, position = buffer.placement.local[shard]
        link = self._buffers.links[host]
        lease = Lease(self._arena, size) if size > INLINE_BYTES and link.shares_memory else None
        bulk = None if lease is None else link.reach(lease)
        hold = 0 if lease is None else link.hold(lease)

        def answered(error: StatusError | None, value: Any) -> None:
            if hold and link.lost is None:  # A lost host may still be writing.
                link.released((hold,))
            done(error, lease if lease is not None and error is None else value)

        question = functools.partial(
            _get_region, aid=buffer.aid, shard=position, bulk=bulk, strides=strides, region=None
        )
        link.ask(question, self._judged(answered))

    def write(
        self,
        piece: Piece,
        lease: Lease,
        offset: int,
        size: int,
        done: Waiter,
        strides: Sequence[int] | None = None,
        region: Region | None = None,
    ) -> None:
        """Has the host of a shard write it, or a region of it, there; it must share memory."""
        held = [piece]  # The source must outlive the question.

        def written(error: StatusError | None, value: Any) -> None:
            held.clear()
            done(error, value)

        buffer, shard = piece
        try:
            buffer.check_shard(shard)
        except StatusError as error:
            written(error.fresh(), None)
            return
        host, position = buffer.placement.local[shard]
        link = self._buffers.links[host]
        segment, begin, _ = link.reach(lease)
        question = functools.partial(
            _get_region,
            aid=buffer.aid,
            shard=position,
            bulk=(segment, begin + offset, size),
            strides=strides,
            region=region,
        )
        link.ask(question, self._judged(_releasing(link, link.hold(lease), written)))

    def read(self, piece: Piece, region: Region, done: Waiter) -> None:
        """Brings the bytes of a region of a shard to the head, in C order."""
        buffer, shard = piece
        host, position = buffer.placement.local[shard]
        question = functools.partial(
            _get_region, aid=buffer.aid, shard=position, bulk=None, strides=None, region=region
        )
        self._buffers.links[host].ask(question, self._judged(done))

    def ready(self, pieces: Sequence[Piece], waiter: Waiter) -> None:
        """Calls `waiter` when all these shards hold values, or with the first error."""
        by_host: dict[int, list[int]] = {}
        try:
            for buffer, shard in pieces:
                buffer.check_shard(shard)
                aids = by_host.setdefault(buffer.placement.local[shard][0], [])
                if not aids or aids[-1] != buffer.aid:
                    aids.append(buffer.aid)
        except StatusError as error:
            waiter(error.fresh(), None)
            return
        if not by_host:
            waiter(None, None)
            return
        # The buffers must outlive the question: freed ones would be unknown to the host.
        held = list(pieces)

        def answered(error: StatusError | None, value: Any) -> None:
            held.clear()
            waiter(error, value)

        one = self._judged(gather(len(by_host), answered))
        for host, aids in by_host.items():
            self._buffers.links[host].ask(functools.partial(_ready, aids=aids), one)

    def _judged(self, waiter: Waiter) -> Waiter:
        """Has errors of programs across hosts wait for their verdict."""

        def answered(error: StatusError | None, value: Any) -> None:
            if isinstance(error, EpochError):
                self._epochs.judge(error.epoch, error, lambda verdict: waiter(verdict, None))
            else:
                waiter(error, value)

        return answered


def _ready(rid: int, *, aids: Sequence[int]) -> Ready:
    return Ready(rid, aids)


def _get_region(rid: int, **fields: Any) -> Get:
    return Get(rid, **fields)


def _releasing(link: Link, hold: int, waiter: Waiter) -> Waiter:
    def answered(error: StatusError | None, value: Any) -> None:
        if link.lost is None:
            link.released((hold,))
        waiter(error, value)

    return answered


@final
class EpochError(StatusError):
    """An error of a program across hosts, before its verdict.

    Attributes:
        epoch: The epoch that it ran in.
    """

    def __init__(self, code: Code, message: str, epoch: int) -> None:
        super().__init__(code, message)
        self.epoch = epoch
