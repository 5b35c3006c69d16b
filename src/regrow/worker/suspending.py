"""What a host does when its slice is suspended or comes back: its own shards, to storage and from it.

Bytes go between the arrays' own memory and the storage, without passing through the head. Beside the
arrays a suspension needs a few chunks of memory at most, and an array that is not laid out row by row
one copy of a shard.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import numpy as np

from regrow.channel import commands as c
from regrow.errors import Code, RegrowError
from regrow.suspend.points import reach
from regrow.suspend.shards import CHUNK_BYTES, read_shards, room_for, write_shards
from regrow.suspend.snapshots import MEASURED
from regrow.suspend.storage import Storage, open_storage
from regrow.wire.dtypes import STRING, kind_of, numpy_dtype
from regrow.worker.platform import KEEP, Array, Domain, on_host
from regrow.worker.store import Part, PartError, Store, wait_for
from regrow.worker.strings import Strings

log = logging.getLogger(__name__)

_MEASURED_BYTES: Final = 64 << 20


@final
class Suspending:
    """The commands of a suspension; each works on a helper's thread."""

    def __init__(
        self,
        store: Store,
        home: Domain,
        spawn: Callable[[Callable[[], None]], Any],
        report: Callable[[Any], None],
    ) -> None:
        """Begins with nothing under way.

        Args:
            store: Where parts are.
            home: The domain that parts come back to.
            spawn: Runs a function on a helper thread.
            report: Sends an answer to the head.
        """
        self._store = store
        self._home = home
        self._spawn = spawn
        self._report = report
        self._given_up = threading.Event()

    # --- at once ---

    def give_up(self, _: c.GiveUp) -> None:
        """Stops saving."""
        self._given_up.set()

    def go(self, _: c.Go) -> None:
        """Ends this process as the notice would have."""
        end_by_sigterm()

    # --- in order ---

    def drain(self, command: c.Drain) -> None:
        """Answers when everything in the store has a value or an error."""
        parts = self._store.all()

        def run() -> None:
            reach("worker-drain")
            for part in parts:
                try:
                    wait_for([part])
                except (PartError, RegrowError) as error:
                    log.info("drained: %s", error)

        self._answer(command.rid, run)

    def save(self, command: c.Save) -> None:
        """Writes parts; answers with (parts, bytes, bytes written, seconds)."""
        found = [(aid, part) for aid in command.aids if (part := self._store.find(aid)) is not None]
        self._given_up.clear()

        def run() -> Any:
            began = time.monotonic()
            reach("worker-save-begins")
            parts, nbytes, written = self._save(open_storage(command.url), found, command.turn)
            reach("worker-saved")
            return parts, nbytes, written, time.monotonic() - began

        self._answer(command.rid, run)

    def load(self, command: c.LoadParts) -> None:
        """Reads parts into the store."""

        def run() -> None:
            reach("worker-load-begins")
            self._load(open_storage(command.url), command)
            reach("worker-placed")

        self._answer(command.rid, run)

    def measure(self, command: c.Measure) -> None:
        """Answers with the bytes a second at which the storage takes new chunks."""
        self._answer(command.rid, lambda: _measured(open_storage(command.url)))

    def _answer(self, rid: int, run: Callable[[], Any]) -> None:
        def answered() -> None:
            try:
                answer: Any = c.Reply(rid, run())
            except RegrowError as error:
                answer = c.Failed(rid, int(Code.FAILED_PRECONDITION), str(error), 0)
            except Exception as error:
                log.exception("suspending")
                told = f"{type(error).__name__}: {error}"
                answer = c.Failed(rid, int(Code.UNKNOWN), told, 0)
            self._report(answer)

        self._spawn(answered)

    # --- to storage ---

    def _save(
        self, storage: Storage, found: Sequence[tuple[int, Part]], turn: float
    ) -> tuple[list[Any], int, int]:
        entries: list[Any] = []
        views: list[memoryview] = []
        for aid, part in found:
            shards, error = _hold(part, views)
            entries.append((aid, shards, error))
        hashes, traffic = write_shards(storage, views, turn=turn, stop=self._given_up.is_set)
        names = iter(hashes)
        parts = [
            (aid, [(*shard, next(names)) for shard in shards], error)
            for aid, shards, error in entries
        ]
        return parts, traffic.nbytes, traffic.written

    # --- from storage ---

    def _load(self, storage: Storage, command: c.LoadParts) -> None:
        wanted = []
        made = []
        for aid, saved in command.parts:
            shards = [c.SavedShard(*fields) for fields in saved]
            memory = [room_for(shard.nbytes) for shard in shards]
            wanted += [
                (room.data, shard.chunks)
                for room, shard in zip(memory, shards, strict=True)
                if shard.nbytes
            ]
            made.append((aid, shards, memory))
        read_shards(storage, wanted, chunk_bytes=command.chunk_bytes)
        reach("worker-loaded")
        for aid, shards, memory in made:
            placed = [self._place(s, room) for s, room in zip(shards, memory, strict=True)]
            part = Part(self._home, [shard.device for shard in shards], placed)
            wait_for([part])
            self._store.set(aid, part)

    def _place(self, shard: c.SavedShard, room: np.ndarray[Any, Any]) -> Array:
        if shard.kind == STRING:
            return Strings(room.tobytes())
        dims = tuple(shard.dims)
        value: np.ndarray[Any, Any] = np.ndarray(dims, numpy_dtype(shard.kind), room)
        return self._home.put(value, shard.device, shard.memory_kind, KEEP)


def _hold(part: Part, views: list[memoryview]) -> tuple[list[tuple[Any, ...]], Any]:
    """What the shards of a part are, and their bytes in place; or the error that it holds."""
    try:
        singles = part.singles()
        held = [_bytes_of(single) for single in singles]
    except Exception as error:  # noqa: BLE001 - XLA raises many kinds
        told = PartError.of(error, part.epoch)
        return [], (int(told.code), told.message, told.epoch)
    shards = []
    for device, (kind, dims, memory_kind, view) in zip(part.devices, held, strict=True):
        shards.append((device, kind, dims, memory_kind, len(view)))
        views.append(view)
    return shards, None


def _bytes_of(single: Array) -> tuple[int, tuple[int, ...], str, memoryview]:
    if isinstance(single, Strings):
        return STRING, (), "device", memoryview(single.serialized)
    value = on_host(single)
    kind, dims = kind_of(value.dtype), value.shape
    flat: np.ndarray[Any, Any] = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    view = flat.data if flat.size else memoryview(b"")
    return kind, dims, single.sharding.memory_kind or "device", view


def _measured(storage: Storage) -> float:
    data = memoryview(os.urandom(CHUNK_BYTES))
    folder = storage.below(MEASURED)
    began = time.monotonic()
    try:
        # The hash is a part of the price.
        write_shards(folder, [data[i:] for i in range(_MEASURED_BYTES // CHUNK_BYTES)])
        return _MEASURED_BYTES / max(time.monotonic() - began, 1e-6)
    finally:
        folder.clear()


def end_by_sigterm() -> None:
    """Ends this process by SIGTERM, whatever it does at the moment; any thread."""
    # Python lets only the main thread change what a signal does, and that may be busy in XLA.
    ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)
    os.kill(os.getpid(), signal.SIGTERM)
