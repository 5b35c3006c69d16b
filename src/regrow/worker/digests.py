"""Hashes of shards, and copies of them in host memory that are made at the same time.

To read an array costs more than to hash it. So a copy is made in pieces that the processor's cache holds,
and the hash is that of each piece while it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, final

import numpy as np
import xxhash

from regrow.channel.commands import Digest
from regrow.channel.digests import HASH_BYTES
from regrow.worker.platform import COPY_NOW, KEEP, Array, Domain, on_host
from regrow.worker.store import Part, PartError, Store, wait_for
from regrow.worker.strings import Strings
from regrow.worker.transfers import Source

_PIECE_BYTES: Final = 256 << 10
# Memory that begins at such an address is used by XLA as it is.
_ALIGNMENT: Final = 64


@final
class Digests:
    """Carries out `Digest`, on a helper's thread."""

    def __init__(
        self, store: Store, home: Domain, spawn: Callable[[Callable[[], None]], Any]
    ) -> None:
        """Begins with nothing under way.

        Args:
            store: Where parts are.
            home: The domain that parts are made in.
            spawn: Runs a function on a helper thread.
        """
        self._store = store
        self._home = home
        self._spawn = spawn

    def digest(self, command: Digest) -> None:
        """Makes parts that are pending until the values are there and hashed."""
        # The parts themselves are kept: their numbers may be freed before a helper comes to them.
        sources = [(self._store.get(aid), shard) for aid, shard in command.sources]
        results = [Part.expected(self._home, command.devices) for _ in (0, *command.copies)]
        for aid, result in zip((command.aid, *command.copies), results, strict=True):
            self._store.set(aid, result)
        readings = [part.read() for part, _ in sources]

        def run() -> None:
            try:
                wait_for(part for part, _ in sources)
                copy_to = command.memory_kind if command.copies else ""
                made = digest(sources, command.devices, self._home, copy_to)
            except Exception as error:  # noqa: BLE001 - the parts carry it
                made = [Part.failed(self._home, PartError.of(error))] * len(results)
            for reading in readings:
                reading.set()
            for result, part in zip(results, made, strict=True):
                result.resolve(part)

        self._spawn(run)


def digest(
    sources: Sequence[Source], devices: Sequence[int], home: Domain, copy_to: str = ""
) -> list[Part]:
    """The hashes of shards (see `Digest`), and a copy of each array in that kind of memory, if any."""
    hashes = np.empty((len(sources), HASH_BYTES), np.uint8)
    copies: list[Array] = []
    for number, (part, shard) in enumerate(sources):
        array, device = part.singles()[shard], devices[number % len(devices)]
        hasher = xxhash.xxh3_128()
        if isinstance(array, Strings):
            raise PartError.of(TypeError("arrays of strings are neither hashed nor copied"))
        if copy_to:
            copies.append(home.put(_copied(on_host(array), hasher), device, copy_to, KEEP))
        else:
            hasher.update(_bytes(on_host(array)).data)
        hashes[number] = np.frombuffer(hasher.digest(), np.uint8)
    count = len(devices)
    rows = [np.ascontiguousarray(hashes[None, place::count]) for place in range(count)]
    shards = [
        home.put(row, device, "device", COPY_NOW) for row, device in zip(rows, devices, strict=True)
    ]
    by_array = [copies[begin : begin + count] for begin in range(0, len(copies), count)]
    return [Part(home, list(devices), made) for made in (shards, *by_array)]


def _copied(value: np.ndarray[Any, Any], hasher: Any) -> np.ndarray[Any, Any]:
    """A copy of a value, which is hashed on the way."""
    flat = _bytes(value)
    room = np.empty(flat.size + _ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % _ALIGNMENT
    copy = room[begin : begin + flat.size]
    for start in range(0, flat.size, _PIECE_BYTES):
        piece = flat[start : start + _PIECE_BYTES]
        copy[start : start + _PIECE_BYTES] = piece
        hasher.update(piece.data)
    made: np.ndarray[Any, Any] = copy.view(value.dtype).reshape(value.shape)
    return made


def _bytes(value: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of a value, in place where they lie in one piece."""
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)
