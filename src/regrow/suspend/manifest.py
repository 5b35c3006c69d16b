"""What a manifest says. No I/O.

A manifest is one JSON object: `format`, the `sha256` of its `body` as it stands in the file, and the body.
Nothing in it depends on processes or hosts: shards are told by their device and their region of the
array, so any topology with as many devices can read it, and one that cuts the array otherwise can, too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, final

from regrow.errors import StorageError

FORMAT: Final = 2
_HASH = re.compile(r"[0-9a-f]{32}")


@final
@dataclass(frozen=True, slots=True)
class ShardEntry:
    """The bytes of one shard of a buffer.

    Attributes:
        device: Logical id of its device.
        kind: Element type (`regrow.wire.dtypes`).
        dims: Its shape.
        memory_kind: Such as "device" or "pinned_host".
        nbytes: Its size; element types below a byte take a byte.
        chunks: Hashes (XXH3-128, hexadecimal) of its bytes in C order, in pieces of `Manifest.chunk_bytes`.
    """

    device: int
    kind: int
    dims: tuple[int, ...]
    memory_kind: str
    nbytes: int
    chunks: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class PartEntry:
    """What the suspended hosts held of one buffer: shards, or the error that it holds instead.

    Attributes:
        buffer: Its number in the head that made the snapshot.
        shards: Its shards on suspended slices.
        error: Code and text of the error that it raises; then there are no shards.
    """

    buffer: int
    shards: tuple[ShardEntry, ...]
    error: tuple[int, str] | None = None


@final
@dataclass(frozen=True, slots=True)
class ArrayEntry:
    """One array of a client.

    Attributes:
        session: The client's session.
        handle: The client's handle of it.
        kind: Element type.
        dtype: The same as text.
        shape: Its global shape.
        sharding: In words, for people.
        sharding_proto: The serialized ShardingProto, in base64.
        shards: For each shard: device, buffer, and its region as (start, stop) a dimension (None: not
            known).
    """

    session: int
    handle: int
    kind: int
    dtype: str
    shape: tuple[int, ...]
    sharding: str
    sharding_proto: str
    shards: tuple[tuple[int, int, tuple[tuple[int, int], ...] | None], ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One snapshot.

    Attributes:
        number: Counts the snapshots of a job, from 1.
        job: Name of the cluster.
        when: Seconds since 1970.
        why: What asked for it.
        versions: Of regrow, jaxlib and such.
        slices: The slices whose shards are in it.
        topology: slices, hosts_per_slice and devices_per_slice of the cluster.
        chunk_bytes: Size of every chunk of a shard but its last.
        arrays: The clients' arrays.
        parts: The buffers that these consist of.
    """

    number: int
    job: str
    when: float
    why: str
    versions: dict[str, str]
    slices: tuple[int, ...]
    topology: dict[str, int]
    chunk_bytes: int
    arrays: tuple[ArrayEntry, ...]
    parts: tuple[PartEntry, ...]

    @property
    def nbytes(self) -> int:
        """How many bytes its shards have, each counted."""
        return sum(shard.nbytes for part in self.parts for shard in part.shards)

    def chunks(self) -> Iterator[str]:
        """The hashes of all its chunks; some may come twice."""
        for part in self.parts:
            for shard in part.shards:
                yield from shard.chunks

    def to_bytes(self) -> bytes:
        """The file."""
        body = json.dumps(dataclasses.asdict(self), separators=(",", ":"), sort_keys=True)
        digest = hashlib.sha256(body.encode()).hexdigest()
        return f'{{"format":{FORMAT},"sha256":"{digest}","body":{body}}}\n'.encode()

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Manifest:
        """Reads and checks the file called `name`.

        Raises:
            StorageError: It is none, of another version, or not what was written.
        """
        try:
            outer = json.loads(data)
            version, digest, body = outer["format"], outer["sha256"], outer["body"]
        except (ValueError, KeyError, TypeError):
            raise StorageError(f"{name} is no manifest of a snapshot, or is damaged") from None
        if version != FORMAT:
            raise StorageError(
                f"{name} is a snapshot of format {version!r}; this Regrow reads format {FORMAT}"
            )
        text = json.dumps(body, separators=(",", ":"), sort_keys=True)
        if hashlib.sha256(text.encode()).hexdigest() != digest:
            raise StorageError(f"{name} is damaged: its hash is not that of its content")
        try:
            return _manifest(body)
        except (KeyError, TypeError, ValueError) as error:
            raise StorageError(f"{name} is no whole manifest: {error}") from None


def _manifest(body: dict[str, Any]) -> Manifest:
    arrays = tuple(_array(entry) for entry in body.pop("arrays"))
    parts = tuple(_part(entry) for entry in body.pop("parts"))
    slices = tuple(body.pop("slices"))
    return Manifest(**body, slices=slices, arrays=arrays, parts=parts)


def _array(entry: dict[str, Any]) -> ArrayEntry:
    shards = tuple(
        (
            device,
            buffer,
            None if region is None else tuple((start, stop) for start, stop in region),
        )
        for device, buffer, region in entry.pop("shards")
    )
    return ArrayEntry(**entry | {"shape": tuple(entry["shape"])}, shards=shards)


def _part(entry: dict[str, Any]) -> PartEntry:
    error = entry["error"]
    return PartEntry(
        int(entry["buffer"]),
        tuple(shard_entry(shard) for shard in entry["shards"]),
        None if error is None else (int(error[0]), str(error[1])),
    )


def shard_entry(entry: dict[str, Any]) -> ShardEntry:
    """A shard from JSON values.

    Raises:
        ValueError: They are none.
    """
    chunks = tuple(entry["chunks"])
    for chunk in chunks:
        if not (isinstance(chunk, str) and _HASH.fullmatch(chunk)):
            raise ValueError(f"{chunk!r} is no hash of a chunk")
    return ShardEntry(
        int(entry["device"]),
        int(entry["kind"]),
        tuple(entry["dims"]),
        str(entry["memory_kind"]),
        int(entry["nbytes"]),
        chunks,
    )
