"""Arrays that change devices.

Shards that change hosts go through shared memory: the head asks one host to write them and tells the
other to read them. An array in flight is a promise to its new host (`Expect`), so the client never waits
here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from regrow.channel.arena import Arena
from regrow.channel.commands import Bulk, Copy, Expect, Fill, FillError
from regrow.errors import Code, ResourceError, StatusError
from regrow.head.buffers import Array, Buffer, Buffers, Piece
from regrow.head.extents import c_strides
from regrow.head.links import Lease, Waiter, gather
from regrow.head.transfers import Transfers
from regrow.wire.dtypes import numpy_dtype
from regrow.wire.regions import overlaps, relative
from regrow.wire.shardings import Sharding
from regrow.wire.status import from_exception


@final
class Moves:
    """Gives arrays other devices, memory or tilings; one for all sessions."""

    def __init__(self, buffers: Buffers, transfers: Transfers, arena: Arena) -> None:
        self._buffers = buffers
        self._transfers = transfers
        self._arena = arena

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
        held = [piece]  # The source must outlive the transfer.

        def arrived(error: StatusError | None, value: Any) -> None:
            held.clear()
            self._deliver(target, shape, error, value)

        try:
            self._transfers.get(piece, kind, shape, None, arrived)
        except ResourceError as error:
            arrived(from_exception(error), None)

    def _deliver(
        self, target: Piece, shape: tuple[int, ...], error: StatusError | None, value: Any
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
            self._deliver(target, shape, None, b"")
            return
        try:
            lease = Lease(self._arena, size)
        except ResourceError as error:
            self._deliver(target, shape, from_exception(error), None)
            return
        whole: np.ndarray[Any, Any] = np.ndarray(shape, dtype, lease.view)
        held = [piece for piece, _, _ in parts]

        def all_in(error: StatusError | None, _: Any) -> None:
            held.clear()
            self._deliver(target, shape, error, lease)

        one = gather(len(parts), all_in)
        for piece, inside, place in parts:
            buffer, index = piece
            corner = relative(place, region)
            wanted = [(part.start, part.stop) for part in inside]
            if self._buffers.links[buffer.placement.local[index][0]].shares_memory:
                offset = sum(p.start * stride for p, stride in zip(corner, strides, strict=True))
                self._transfers.write(
                    piece, lease, offset, size - offset, one, strides=strides, region=wanted
                )
            else:
                self._transfers.read(piece, wanted, _placing(whole, corner, dtype, one))


def _whole_source(plan: Sequence[Any], region: Any, sources: Sequence[Any]) -> int | None:
    """The source shard that a shard is a copy of; None: it is made otherwise."""
    if len(plan) != 1:
        return None
    source: int = plan[0].src_shard
    return source if plan[0].region == region == sources[source] else None


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
