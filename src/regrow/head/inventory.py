"""What lives on which hosts: the arrays and programs of all sessions, as a suspension needs to know them."""

from __future__ import annotations

import base64
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, final

from regrow.channel.commands import SavedShard
from regrow.errors import StatusError
from regrow.head.buffers import Array, Buffer, Buffers
from regrow.head.tables import Tables
from regrow.suspend import ArrayEntry, PartEntry, ShardEntry
from regrow.wire.dtypes import STRING, TOKEN, numpy_dtype

Sessions: TypeAlias = Mapping[int, Tables]


@final
class Inventory:
    """The clients' arrays at one moment at which nothing is under way.

    Attributes:
        arrays: By session and handle.
        buffers: What they consist of, by number.
        nbytes: For each slice how many bytes its shards have.
        unsaved: What among them has no bytes, in words.
    """

    def __init__(self, sessions: Sessions, buffers: Buffers) -> None:
        self._buffers = buffers
        self.arrays: list[tuple[int, int, Array]] = []
        self.buffers: dict[int, Buffer] = {}
        self.nbytes: dict[int, int] = {}
        self.unsaved: list[str] = []
        sizes: dict[tuple[int, int], int] = {}
        for session, tables in sessions.items():
            for handle, array in tables.arrays.items():
                if isinstance(array, Array) and not array.deleted:
                    self._take(session, handle, array, sizes)
        topology = buffers.topology
        for (aid, shard), size in sizes.items():
            index = topology.slice_of(self.buffers[aid].placement.devices[shard])
            self.nbytes[index] = self.nbytes.get(index, 0) + size

    def _take(
        self, session: int, handle: int, array: Array, sizes: dict[tuple[int, int], int]
    ) -> None:
        self.arrays.append((session, handle, array))
        if array.kind == TOKEN:
            self.unsaved.append("a token of a program with side effects")
        each = _shard_sizes(array)
        for number, (buffer, shard) in enumerate(array.pieces()):
            self.buffers[buffer.aid] = buffer
            sizes[buffer.aid, shard] = each[number]

    def on_host(self, host: int) -> list[int]:
        """The numbers of the buffers that a host has a part of which is not lost."""
        index = self._buffers.topology.slice_of_host(host)
        return [
            aid
            for aid, buffer in self.buffers.items()
            if host in buffer.placement.shards and buffer.lost(index) is None
        ]

    def size(self, slices: Collection[int]) -> int:
        """How many bytes these slices hold."""
        return sum(size for index, size in self.nbytes.items() if index in slices)

    def entries(self) -> tuple[ArrayEntry, ...]:
        """The arrays as a manifest tells them."""
        return tuple(_entry(session, handle, array) for session, handle, array in self.arrays)


def _shard_sizes(array: Array) -> list[int]:
    count = len(array.sharding.devices)
    if array.kind in (STRING, TOKEN):
        return [0] * count
    try:
        item = numpy_dtype(array.kind).itemsize
        return [math.prod(dims) * item for dims in array.sharding.shard_shapes(array.shape)]
    except StatusError:
        return [0] * count


def _entry(session: int, handle: int, array: Array) -> ArrayEntry:
    try:
        regions: Sequence[Any] = [
            tuple((part.start, part.stop) for part in region)
            for region in array.sharding.indices(array.shape)
        ]
    except StatusError:
        regions = [None] * len(array.sharding.devices)
    shards = tuple(
        (buffer.placement.devices[shard], buffer.aid, region)
        for (buffer, shard), region in zip(array.pieces(), regions, strict=True)
    )
    distinct = len({region for region in regions if region is not None})
    return ArrayEntry(
        session,
        handle,
        array.kind,
        dtype_name(array.kind),
        tuple(array.shape),
        f"{distinct or '?'} different shards on {len(shards)} devices",
        base64.b64encode(array.sharding.serialized).decode(),
        shards,
    )


def dtype_name(kind: int) -> str:
    """An element type as text."""
    if kind in (STRING, TOKEN):
        return "string" if kind == STRING else "token"
    try:
        return str(numpy_dtype(kind))
    except StatusError:
        return f"type {kind}"


def stateful(sessions: Sessions) -> list[str]:
    """Names of the colocated Python programs that sessions have loaded, now or before."""
    return [name for tables in sessions.values() for name in sorted(tables.stateful)]


def part_entry(aid: int, shards: Iterable[Any], error: tuple[int, str] | None) -> PartEntry:
    """A part from what its host has answered."""
    made = []
    for fields in shards:
        saved = SavedShard(*fields)
        made.append(
            ShardEntry(
                saved.device,
                saved.kind,
                tuple(saved.dims),
                saved.memory_kind,
                saved.nbytes,
                tuple(saved.chunks),
            )
        )
    return PartEntry(aid, tuple(made), error)


def saved_shards(part: PartEntry) -> list[SavedShard]:
    """A part as its host is told of it."""
    return [
        SavedShard(s.device, s.kind, s.dims, s.memory_kind, s.nbytes, s.chunks) for s in part.shards
    ]
