"""Shards to and from chunks, without a copy of their own: what a host does to suspend and resume."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, final

import numpy as np
import xxhash

from regrow.errors import StorageError
from regrow.suspend.points import reach
from regrow.suspend.snapshots import CHUNKS
from regrow.suspend.storage import BLOCK_BYTES, Storage

T = TypeVar("T")

CHUNK_BYTES: Final = 16 << 20
THREADS: Final = 8
_ALIGNED: Final = 64


@final
@dataclass(slots=True)
class Traffic:
    """What was moved, in bytes.

    Attributes:
        nbytes: Of the shards.
        written: Of these, what was not there yet.
    """

    nbytes: int = 0
    written: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, nbytes: int, written: int) -> None:
        """Counts one chunk."""
        with self.lock:
            self.nbytes += nbytes
            self.written += written


def pieces(view: memoryview, chunk_bytes: int = CHUNK_BYTES) -> list[memoryview]:
    """The bytes of a shard in pieces."""
    return [view[start : start + chunk_bytes] for start in range(0, len(view), chunk_bytes)]


def room_for(nbytes: int) -> np.ndarray[Any, Any]:
    """Memory that XLA uses in place, and that disks write to; in huge pages, as far as NumPy has them.

    Args:
        nbytes: How much, in bytes.
    """
    aligned = BLOCK_BYTES if nbytes >= BLOCK_BYTES else _ALIGNED
    whole = np.empty(nbytes + aligned, np.uint8)
    start = -whole.ctypes.data % aligned
    return whole[start : start + nbytes]


def write_shards(
    storage: Storage,
    shards: Sequence[memoryview],
    *,
    turn: float = 0.0,
    chunk_bytes: int = CHUNK_BYTES,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[list[list[str]], Traffic]:
    """Writes shards as chunks, those that are not there yet; they are synced when it returns.

    Args:
        storage: Where to.
        shards: The bytes of each, in place.
        turn: Where to begin, as a share of the whole: hosts that hold the same bytes begin in
            different places, and each finds written what the other has.
        chunk_bytes: Size of a chunk.
        stop: Is asked between chunks whether to give up.

    Returns:
        The hashes of the chunks of each shard, and what was written.

    Raises:
        StorageError: It could not be written, or `stop` said so.
    """
    work = [
        (number, index, piece)
        for number, shard in enumerate(shards)
        for index, piece in enumerate(pieces(shard, chunk_bytes))
    ]
    hashes = [[""] * len(pieces(shard, chunk_bytes)) for shard in shards]
    traffic = Traffic()

    def one(item: tuple[int, int, memoryview]) -> None:
        number, index, piece = item
        if stop():
            raise StorageError("the snapshot was given up")
        digest = chunk_hash(piece)
        reach("worker-chunk-hashed")
        name = f"{CHUNKS}/{digest}"
        new = storage.size(name) != len(piece)
        if new:
            storage.write(name, piece)
            reach("worker-chunk-written")
        traffic.add(len(piece), len(piece) if new else 0)
        hashes[number][index] = digest

    first = int(len(work) * turn)
    _each(one, work[first:] + work[:first])
    storage.sync(CHUNKS)
    reach("worker-chunks-synced")
    return hashes, traffic


def read_shards(
    storage: Storage,
    wanted: Sequence[tuple[memoryview, Sequence[str]]],
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Reads shards into memory, and checks every chunk against its hash.

    Raises:
        StorageError: A chunk is missing, or is not what was written.
    """
    work = [
        (piece, name)
        for view, names in wanted
        for piece, name in zip(pieces(view, chunk_bytes), names, strict=True)
    ]

    def one(item: tuple[memoryview, str]) -> None:
        piece, digest = item
        name = f"{CHUNKS}/{digest}"
        size = storage.read_into(name, piece)
        reach("worker-chunk-read")
        if size != len(piece) or chunk_hash(piece) != digest:
            raise StorageError(
                f"{storage.url}/{name} is damaged: its content does not have the hash of its name"
            )

    _each(one, work)


def chunk_hash(piece: memoryview | bytes) -> str:
    """The name of a chunk."""
    # It tells what is damaged, at the speed of memory. It is no defence against who writes to the store
    # on purpose, and no hash that is not signed would be.
    return xxhash.xxh3_128(piece).hexdigest()


def _each(function: Callable[[T], None], work: Sequence[T]) -> None:
    """Calls the function for each on a few threads; the first error ends it."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="chunks") as pool:
        futures = [pool.submit(function, item) for item in work]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
