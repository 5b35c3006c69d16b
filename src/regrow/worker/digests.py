"""Hashes of shards, and copies of them in host memory that are made at the same time.

To read an array costs more than to hash it. So a copy is made in pieces that the processor's cache holds,
and the hash is that of each piece while it is there.
"""

from __future__ import annotations

import functools
import threading
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
    """Carries out `Digest`, each device's share on a helper's thread."""

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
        copy_to = command.memory_kind if command.copies else ""
        job = _Job(sources, command.devices, results, self._home, copy_to)
        for place in range(len(command.devices)):
            self._spawn(functools.partial(job.run, place))


@final
class _Job:
    """One `Digest`; the last of its helpers to come to the end resolves its parts."""

    def __init__(
        self,
        sources: Sequence[Source],
        devices: Sequence[int],
        results: Sequence[Part],
        home: Domain,
        copy_to: str,
    ) -> None:
        self._sources = sources
        self._devices = devices
        self._results = results
        self._home = home
        self._copy_to = copy_to
        self._readings = [part.read() for part, _ in sources]
        self._made: list[list[Array] | PartError | None] = [None] * len(devices)
        self._finishing = threading.Lock()

    def run(self, place: int) -> None:
        """The share of one device."""
        mine = self._sources[place :: len(self._devices)]
        made: list[Array] | PartError
        try:
            wait_for(part for part, _ in mine)
            made = digest(mine, self._devices[place], self._home, self._copy_to)
        except Exception as error:  # noqa: BLE001 - the parts carry it
            made = PartError.of(error)
        with self._finishing:
            self._made[place] = made
            last = None not in self._made
        if last:
            self._resolve()

    def _resolve(self) -> None:
        for reading in self._readings:
            reading.set()
        shares = [made for made in self._made if isinstance(made, list)]
        errors = [made for made in self._made if isinstance(made, PartError)]
        for number, result in enumerate(self._results):
            if errors:
                result.resolve(Part.failed(self._home, errors[0]))
            else:
                shards = [share[number] for share in shares]
                result.resolve(Part(self._home, list(self._devices), shards))


def digest(sources: Sequence[Source], device: int, home: Domain, copy_to: str = "") -> list[Array]:
    """The hashes of shards, one row for each, and then the copies in that kind of memory, if any."""
    hashes = np.empty((1, len(sources), HASH_BYTES), np.uint8)
    copies: list[Array] = []
    for row, (part, shard) in zip(hashes[0], sources, strict=True):
        array, hasher = part.singles()[shard], xxhash.xxh3_128()
        if isinstance(array, Strings):
            raise PartError.of(TypeError("arrays of strings are neither hashed nor copied"))
        if copy_to:
            copies.append(home.put(_copied(on_host(array), hasher), device, copy_to, KEEP))
        else:
            hasher.update(_bytes(on_host(array)).data)
        row[:] = np.frombuffer(hasher.digest(), np.uint8)
    return [home.put(hashes, device, "device", COPY_NOW), *copies]


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
