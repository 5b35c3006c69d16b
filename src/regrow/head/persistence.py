"""The programs by which pathwaysutils and Orbax write and read checkpoints.

They name a location, arrays and shardings; the hosts do the rest, and bytes pass neither the head nor the
client. What is written is zarr, so the checkpoint is readable without Regrow.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from regrow.channel.commands import ReadShards, WriteShards
from regrow.errors import Code, StatusError, StorageError, UsageError
from regrow.head.buffers import Array, Buffers
from regrow.head.links import gather, malformed, pairs
from regrow.head.tables import Later
from regrow.suspend.storage import open_storage
from regrow.suspend.zarr import METADATA, TYPES, Grid, Region
from regrow.wire import shardings
from regrow.wire.shardings import Sharding

_WRITE: Final = ("bulk_persistence_write_request", "write_requests", "persistenceWriteRequest")
_READ: Final = ("bulk_persistence_read_request", "read_requests", "persistenceReadRequest")


def is_persistence(data: bytes) -> bool:
    """Whether a plugin program is one of these."""
    return any(name.encode() in data for name in (_WRITE[0], _WRITE[2], _READ[0], _READ[2]))


@final
@dataclass(frozen=True, slots=True)
class Entry:
    """One array of such a program; kind and shape are those that a reader wants."""

    location: str
    name: str
    sharding: Sharding
    kind: int
    shape: tuple[int, ...]


@final
class Persistence:
    """One such program.

    Attributes:
        name: Its name.
        devices: Where its first array is, or is to be.
        outputs: Kind, shape and sharding of each result; none of a program that writes.
        donated: Numbers of the arguments that it may reuse: none.
    """

    def __init__(self, data: bytes, buffers: Buffers) -> None:
        """Reads a plugin program: JSON behind a prefix.

        Raises:
            StatusError: It is none, or names no storage that there is.
        """
        self._buffers = buffers
        try:
            request = json.loads(data[data.index(b"{") :])
            self.writes = any(name in request for name in (_WRITE[0], _WRITE[2]))
            bulk, listed, single = _WRITE if self.writes else _READ
            told = request[bulk][listed] if bulk in request else [request[single]]
            self._entries = [_entry(one, self.writes) for one in told]
            self.devices = self._entries[0].sharding.devices
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise StatusError.user(
                Code.INVALID_ARGUMENT,
                f"a request to write or read arrays that is none: {data[:80]!r}",
            ) from None
        self.name = "persistence write" if self.writes else "persistence read"
        self.donated: frozenset[int] = frozenset()
        self.outputs = [] if self.writes else [(e.kind, e.shape, e.sharding) for e in self._entries]

    def run(self, arrays: Sequence[Array]) -> tuple[list[Any], Later]:
        """Starts it: its results, and what is settled at its end.

        Raises:
            StatusError: A slice is not there, or an array is lost or cannot be written.
        """
        questions: list[Any] = []
        found: list[Any] = []
        if self.writes:
            for entry, array in pairs(self._entries, arrays, "names and arrays"):
                questions += self._write(entry, array)
        else:
            for entry in self._entries:
                array, asked = self._read(entry)
                found.append(array)
                questions += asked
        later = Later()
        held = [list(arrays), found]  # Buffers must outlive what is asked about them.

        def done(error: StatusError | None, _: Any) -> None:
            held.clear()
            later.settle(error, None)

        one = gather(len(questions), done)
        for link, question in questions:
            link.ask(question, one)
        return found, later

    def _write(self, entry: Entry, array: Array) -> list[Any]:
        whole = array.whole()
        regions = _regions(array.sharding, array.shape)
        chunk = tuple(stop - start for start, stop in regions[0])
        grid = Grid(array.shape, tuple(max(size, 1) for size in chunk), array.kind)
        try:
            metadata = grid.metadata()
        except StorageError as error:
            raise StatusError.user(Code.UNIMPLEMENTED, str(error)) from None
        files: dict[int, list[tuple[int, str]]] = {}
        for region, shard in _first_of_each(regions).items():
            name = grid.place(region)
            if name is None and 0 not in chunk:
                raise StatusError.user(
                    Code.UNIMPLEMENTED, f"{entry.name} is cut into shards of different sizes"
                )
            host, position = whole.placement.local[shard]
            mine = files.setdefault(host, [])
            if name is not None:
                mine.append((position, f"{entry.name}/{name}"))
        asked = []
        for number, (host, mine) in enumerate(files.items()):
            meta = [] if number else [(f"{entry.name}/{METADATA}", metadata)]
            question = functools.partial(
                _write_shards, url=entry.location, aid=whole.aid, files=mine, whole=meta
            )
            asked.append((self._buffers.links[host], question))
        return asked

    def _read(self, entry: Entry) -> tuple[Array, list[Any]]:
        placement = self._buffers.placement(entry.sharding.devices)
        buffer = self._buffers.new(placement)
        regions = _regions(entry.sharding, entry.shape)
        asked = []
        for host, shards in placement.shards.items():
            question = functools.partial(
                _read_shards,
                url=entry.location,
                name=entry.name,
                aid=buffer.aid,
                kind=entry.kind,
                shape=entry.shape,
                devices=[placement.devices[shard] for shard in shards],
                regions=[regions[shard] for shard in shards],
                memory_kind=entry.sharding.memory_kind or "device",
            )
            asked.append((self._buffers.links[host], question))
        return Array(entry.kind, entry.shape, entry.sharding, whole=buffer), asked

    def unload(self) -> None:
        """There is nothing to let go of."""


def _entry(told: dict[str, Any], writes: bool) -> Entry:
    location = base64.b64decode(told["b64_location"]).decode()
    name = base64.b64decode(told["b64_name"]).decode()
    try:
        if "://" not in location and not location.startswith("/"):
            raise UsageError(f"{location!r} is no absolute path and no URL")
        open_storage(location)
    except UsageError as error:
        raise StatusError.user(Code.INVALID_ARGUMENT, str(error)) from None
    if not name or ".." in name.split("/") or name.startswith("/"):
        raise malformed(f"{name[:100]!r} as the name of an array")
    devices = tuple(int(device) for device in told["devices"]["device_ids"])
    sharding = shardings.from_op_sharding(
        devices, None, base64.b64decode(told["b64_hlo_sharding_string"])
    )
    if writes:
        return Entry(location, name, sharding, 0, tuple(told["shape"]))
    shape = told["shape"]
    kind, _ = TYPES[shape["xla_primitive_type_str"]]
    return Entry(location, name, sharding, kind, tuple(shape["dimensions"]))


def _regions(sharding: Sharding, shape: tuple[int, ...]) -> list[Region]:
    return [tuple((part.start, part.stop) for part in region) for region in sharding.indices(shape)]


def _first_of_each(regions: Sequence[Region]) -> dict[Region, int]:
    """Of the shards with the same region the first."""
    found: dict[Region, int] = {}
    for shard, region in enumerate(regions):
        found.setdefault(region, shard)
    return found


def _write_shards(rid: int, **fields: Any) -> WriteShards:
    return WriteShards(rid, **fields)


def _read_shards(rid: int, **fields: Any) -> ReadShards:
    return ReadShards(rid, **fields)
