"""Bytes between clients and hosts, and between hosts.

Client bytes arrive in shared memory and go to local hosts by reference. Shards that change hosts go
through shared memory too: the head asks one host to write them and tells the other to read them. An
array in flight is a promise to its new host (`Expect`), so the client never waits here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias, final

import numpy as np

from regrow.channel.arena import Arena
from regrow.channel.commands import (
    Bulk,
    Copy,
    Expect,
    Fill,
    FillError,
    Get,
    HostShard,
    Put,
    Ready,
)
from regrow.errors import Code, ResourceError, StatusError
from regrow.head.buffers import Array, Buffer, Buffers, Piece
from regrow.head.epochs import Epochs
from regrow.head.extents import c_strides, check_extent, extent
from regrow.head.links import Lease, Link, Waiter, gather
from regrow.wire.dtypes import STRING, numpy_dtype
from regrow.wire.regions import overlaps, relative
from regrow.wire.shardings import Sharding
from regrow.wire.status import from_exception

Memory: TypeAlias = "bytes | bytearray | Lease"
"""Bytes of a client: small ones as such, large ones in shared memory."""

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

    def write(self, piece: Piece, lease: Lease, offset: int, size: int, done: Waiter) -> None:
        """Has the host of a shard write it there, in C order; it must share memory."""
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
            strides=None,
            region=None,
        )
        link.ask(question, self._judged(_releasing(link, link.hold(lease), written)))

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

    # --- between devices ---

    def move(self, array: Array, sharding: Sharding, *, copy: bool = False) -> Array:
        """The array under another sharding: other devices, another memory kind, another tiling.

        Args:
            array: The source.
            sharding: What it shall be.
            copy: Whether shards that stay where they are must be copied nevertheless.

        Raises:
            SliceLostError: A slice that is needed is not there, or a shard is lost.
            StatusError: The shards' places are not known.
        """
        source = array.sharding
        same = len(source.devices) == len(sharding.devices) and (
            source.same_tiling(sharding, array.shape)
        )
        self._buffers.check_live(self._buffers.placement(sharding.devices))
        array.check()
        if same:
            pieces = self._move_shards(array, sharding, copy)
        else:
            pieces = self._reshard(array, sharding)
        return Array(array.kind, array.shape, sharding, pieces=pieces)

    def _move_shards(self, array: Array, sharding: Sharding, copy: bool) -> list[Piece]:
        topology = self._buffers.topology
        shapes = array.sharding.shard_shapes(array.shape)
        old, new = array.sharding.memory_kind or "device", sharding.memory_kind or "device"
        moved: list[Piece | None] = []
        local: dict[int, list[int]] = {}
        away: list[int] = []
        pieces = array.pieces()
        for shard, (piece, device) in enumerate(zip(pieces, sharding.devices, strict=True)):
            buffer, index = piece
            before = buffer.placement.devices[index]
            moved.append(None)
            if before == device and old == new and not copy:
                moved[shard] = piece
            elif topology.host_of(before) == topology.host_of(device):
                local.setdefault(topology.host_of(device), []).append(shard)
            else:
                away.append(shard)
        self._copy_locally(pieces, sharding, local, moved)
        if away:
            target = self._expect(array.kind, [sharding.devices[s] for s in away], new)
            for number, shard in enumerate(away):
                self._send_shard(pieces[shard], shapes[shard], array.kind, (target, number))
                moved[shard] = (target, number)
        return [piece for piece in moved if piece is not None]

    def _copy_locally(
        self,
        pieces: Mapping[int, Piece] | Sequence[Piece],
        sharding: Sharding,
        local: dict[int, list[int]],
        moved: list[Piece | None],
    ) -> None:
        order = [shard for shards in local.values() for shard in shards]
        if not order:
            return
        devices = tuple(sharding.devices[shard] for shard in order)
        target = self._buffers.new(self._buffers.placement(devices))
        memory_kind = sharding.memory_kind or "device"
        for host, shards in local.items():
            sources = []
            for shard in shards:
                buffer, index = pieces[shard]
                sources.append((buffer.aid, buffer.placement.local[index][1]))
            where = [sharding.devices[shard] for shard in shards]
            self._buffers.links[host].send(Copy(target.aid, sources, where, memory_kind))
        for number, shard in enumerate(order):
            moved[shard] = (target, number)

    def _expect(self, kind: int, devices: Sequence[int], memory_kind: str) -> Buffer:
        placement = self._buffers.placement(tuple(devices))
        target = self._buffers.new(placement)
        for host, shards in placement.shards.items():
            where = [placement.devices[shard] for shard in shards]
            self._buffers.links[host].send(Expect(target.aid, kind, where, memory_kind))
        return target

    def _send_shard(self, piece: Piece, shape: tuple[int, ...], kind: int, target: Piece) -> None:
        def arrived(error: StatusError | None, value: Any) -> None:
            # `piece` is kept until here, so that the source outlives the transfer.
            self._deliver(target, piece[0], shape, error, value)

        try:
            self.get(piece, kind, shape, None, arrived)
        except ResourceError as error:
            arrived(from_exception(error), None)

    def _deliver(
        self,
        target: Piece,
        _: Buffer | None,
        shape: tuple[int, ...],
        error: StatusError | None,
        value: Any,
    ) -> None:
        buffer, shard = target
        try:
            buffer.check_shard(shard)
        except StatusError:
            return  # The destination is lost; so is the array, by itself.
        host, position = buffer.placement.local[shard]
        link = self._buffers.links[host]
        if error is not None:
            link.send(FillError(buffer.aid, int(error.code), error.message))
            return
        bulk: Bulk
        if isinstance(value, Lease) and link.shares_memory:
            bulk, lease = link.reach(value), link.hold(value)
        else:
            bulk, lease = bytes(value.view if isinstance(value, Lease) else value), 0
        link.send(Fill(buffer.aid, position, shape, bulk, lease))

    def _reshard(self, array: Array, sharding: Sharding) -> list[Piece]:
        topology = self._buffers.topology

        def same_host(one: int, other: int) -> bool:
            return topology.host_of(one) == topology.host_of(other)

        plan: dict[int, list[Any]] = {shard: [] for shard in range(len(sharding.devices))}
        for piece in overlaps(array.sharding, sharding, array.shape, same_host):
            plan[piece.dst_shard].append(piece)
        pieces = array.pieces()
        regions = sharding.indices(array.shape)
        sources = array.sharding.indices(array.shape)
        whole: dict[int, Piece] = {}
        local: dict[int, list[int]] = {}
        for shard, device in enumerate(sharding.devices):
            source = _whole_source(plan[shard], regions[shard], sources)
            if source is not None and same_host(array.sharding.devices[source], device):
                whole[shard] = pieces[source]
                local.setdefault(topology.host_of(device), []).append(shard)
        moved: list[Piece | None] = [None] * len(plan)
        self._copy_locally(whole, sharding, local, moved)
        parts = {
            shard: [
                (pieces[p.src_shard], relative(p.region, sources[p.src_shard]), p.region)
                for p in plan[shard]
            ]
            for shard in plan
            if shard not in whole
        }
        self._collect_all(array.kind, parts, sharding, regions, moved)
        return [piece for piece in moved if piece is not None]

    def _collect_all(
        self,
        kind: int,
        parts: dict[int, list[Any]],
        sharding: Sharding,
        regions: Sequence[Any],
        moved: list[Piece | None],
    ) -> None:
        """Collects shards of a new tiling from parts of old ones."""
        dtype = numpy_dtype(kind)
        if not parts:
            return
        devices = [sharding.devices[shard] for shard in parts]
        target = self._expect(kind, devices, sharding.memory_kind or "device")
        for number, (shard, of_shard) in enumerate(parts.items()):
            moved[shard] = (target, number)
            self._collect(of_shard, regions[shard], dtype, (target, number))

    def _collect(self, parts: list[Any], region: Any, dtype: Any, target: Piece) -> None:
        """Collects one shard of a new tiling from parts of old shards, then sends it."""
        shape = tuple(part.stop - part.start for part in region)
        strides = c_strides(shape, dtype.itemsize)
        size = math.prod(shape) * dtype.itemsize
        if not size:
            self._deliver(target, None, shape, None, b"")
            return
        try:
            lease = Lease(self._arena, size)
        except ResourceError as error:
            self._deliver(target, None, shape, from_exception(error), None)
            return
        whole: np.ndarray[Any, Any] = np.ndarray(shape, dtype, lease.view)
        held = [piece for piece, _, _ in parts]

        def all_in(error: StatusError | None, _: Any) -> None:
            held.clear()
            self._deliver(target, None, shape, error, lease)

        one = gather(len(parts), all_in)
        for (buffer, index), inside, place in parts:
            host, position = buffer.placement.local[index]
            link = self._buffers.links[host]
            corner = relative(place, region)
            offset = sum(p.start * stride for p, stride in zip(corner, strides, strict=True))
            wanted = [(part.start, part.stop) for part in inside]
            bulk: Bulk | None
            if link.shares_memory:
                segment, base, _ = link.reach(lease)
                bulk = (segment, base + offset, size - offset)
                hold = link.hold(lease)
                waiter = _releasing(link, hold, one)
            else:
                bulk, waiter = None, _placing(whole, corner, dtype, one)
            question = functools.partial(
                _get_region,
                aid=buffer.aid,
                shard=position,
                bulk=bulk,
                strides=None if bulk is None else strides,
                region=wanted,
            )
            link.ask(question, self._judged(waiter))


def _whole_source(plan: Sequence[Any], region: Any, sources: Sequence[Any]) -> int | None:
    """The source shard that a shard is a copy of; None: it is made otherwise."""
    if len(plan) != 1:
        return None
    source: int = plan[0].src_shard
    return source if plan[0].region == region == sources[source] else None


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


def _placing(whole: Any, corner: Any, dtype: Any, waiter: Waiter) -> Waiter:
    def answered(error: StatusError | None, value: Any) -> None:
        if error is None:
            dims = tuple(part.stop - part.start for part in corner)
            try:
                whole[corner] = np.frombuffer(value, dtype).reshape(dims)
            except ValueError as wrong:
                error = StatusError.user(Code.INVALID_ARGUMENT, f"a shard is no {dims}: {wrong}")
        waiter(error, None)

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
