"""Snapshots as files: checking all of one, and its arrays as .npy, put together from their shards."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from regrow.errors import StorageError, UsageError
from regrow.suspend.manifest import ArrayEntry, Manifest, ShardEntry
from regrow.suspend.shards import THREADS, read_shards
from regrow.suspend.snapshots import MANIFESTS, Snapshots
from regrow.suspend.storage import Storage, open_storage
from regrow.wire.dtypes import STRING, numpy_dtype

INDEX: Final = "index.json"


def find(url: str) -> Snapshots:
    """The store at a path or URL: that of a job, or of the only job below it.

    Raises:
        UsageError: There is no such kind of storage, or there are several jobs.
        StorageError: There is no snapshot.
    """
    storage = open_storage(url)
    if storage.names(MANIFESTS):
        return Snapshots(storage)
    jobs = jobs_at(storage)
    if not jobs:
        raise StorageError(f"there is no snapshot at {url}")
    if len(jobs) > 1:
        raise UsageError(f"there are several jobs at {url}; name one: {', '.join(jobs)}")
    return jobs.popitem()[1]


def jobs_at(storage: Storage) -> dict[str, Snapshots]:
    """The stores of jobs in a place, by the names of their folders."""
    names = [name for name in sorted(storage.names("")) if storage.names(f"{name}/{MANIFESTS}")]
    return {name: Snapshots(storage.below(name)) for name in names}


@final
@dataclass(frozen=True, slots=True)
class Held:
    """What a snapshot holds of an array.

    Attributes:
        array: The array.
        shards: For each of its shards what is stored of it; None: it was on a slice that was not
            suspended.
        error: What it raises; None: nothing.
    """

    array: ArrayEntry
    shards: tuple[ShardEntry | None, ...]
    error: tuple[int, str] | None

    @property
    def nbytes(self) -> int:
        """How many bytes of it are stored."""
        return sum(shard.nbytes for shard in self.shards if shard is not None)

    @property
    def whole(self) -> bool:
        """Whether every region of the array is stored."""
        wanted = {region for _, _, region in self.array.shards}
        return self.error is None and None not in wanted and set(self.regions()) == wanted

    def regions(self) -> dict[Any, ShardEntry]:
        """What is stored by region of the array; of copies the first."""
        found: dict[Any, ShardEntry] = {}
        for (_, _, region), shard in zip(self.array.shards, self.shards, strict=True):
            if shard is not None and region is not None:
                found.setdefault(region, shard)
        return found


def held(manifest: Manifest) -> Iterator[Held]:
    """What a snapshot holds of each array."""
    shards = {(part.buffer, s.device): s for part in manifest.parts for s in part.shards}
    errors = {part.buffer: part.error for part in manifest.parts if part.error is not None}
    for array in manifest.arrays:
        buffers = {buffer for _, buffer, _ in array.shards}
        yield Held(
            array,
            tuple(shards.get((buffer, device)) for device, buffer, _ in array.shards),
            next((errors[buffer] for buffer in buffers if buffer in errors), None),
        )


def verify(store: Snapshots, manifest: Manifest) -> int:
    """Reads every chunk of a snapshot and checks it; returns how many there are.

    Raises:
        StorageError: One is missing or damaged.
    """
    sizes: dict[str, int] = {}
    for part in manifest.parts:
        for shard in part.shards:
            for index, chunk in enumerate(shard.chunks):
                left = shard.nbytes - index * manifest.chunk_bytes
                sizes[chunk] = min(left, manifest.chunk_bytes)
    todo = list(sizes.items())
    for start in range(0, len(todo), THREADS):
        some = [(memoryview(bytearray(n)), [name]) for name, n in todo[start : start + THREADS]]
        read_shards(store.storage, some, chunk_bytes=manifest.chunk_bytes)
    return len(sizes)


def export(store: Snapshots, manifest: Manifest, directory: Path) -> tuple[int, int]:
    """Writes every array that is stored whole as a .npy, and an index of all.

    Types that numpy itself has not are written as unsigned integers of their size; the index tells
    the type.

    Returns:
        How many arrays were written, and how many are not whole.

    Raises:
        StorageError: A chunk is missing or damaged, or the directory cannot be written.
    """
    index = []
    written = 0
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # An index of an earlier export would name arrays of this one, if this one fails.
        (directory / INDEX).unlink(missing_ok=True)
        for number, one in enumerate(held(manifest)):
            name = f"array{number:05d}.npy"
            entry = _told(one)
            if one.whole and one.array.kind != STRING:
                with _whole(directory / name) as aside:
                    _write(store.storage, one, aside, manifest.chunk_bytes)
                entry["file"] = name
                written += 1
            index.append(entry)
        told = {"why": manifest.why, "when": manifest.when, "arrays": index}
        with _whole(directory / INDEX) as aside:
            aside.write_text(json.dumps(told, indent=1), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{directory} cannot be written: {error.strerror or error}") from None
    return written, len(index) - written


def _told(one: Held) -> dict[str, Any]:
    array = one.array
    return {
        "session": array.session,
        "handle": array.handle,
        "dtype": array.dtype,
        "shape": array.shape,
        "sharding": array.sharding,
        "error": one.error,
    }


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A file is written whole or not at all: half of an array would look like one with zeros."""
    aside = path.with_name(f".{path.name}")
    try:
        yield aside
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _write(storage: Storage, one: Held, path: Path, chunk_bytes: int) -> None:
    dtype = numpy_dtype(one.array.kind)
    plain = dtype if dtype.isbuiltin == 1 else np.dtype(f"u{dtype.itemsize}")
    if 0 in one.array.shape:
        np.save(path, np.empty(one.array.shape, plain))
        return
    out = np.lib.format.open_memmap(path, "w+", plain, one.array.shape)
    with path.open("r+b") as file:
        # Where a disk has no room a mapped page would be the end of the process (SIGBUS).
        os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    for region, shard in one.regions().items():
        room = np.empty(shard.dims, plain)
        read_shards(
            storage, [(room.reshape(-1).view(np.uint8).data, shard.chunks)], chunk_bytes=chunk_bytes
        )
        out[tuple(slice(start, stop) for start, stop in region)] = room
    out.flush()
