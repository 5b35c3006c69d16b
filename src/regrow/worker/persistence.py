"""Checkpoints of the client's libraries: shards between this host and storage, as zarr."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, final

import numpy as np

from regrow.channel import commands as c
from regrow.errors import Code, RegrowError, StorageError
from regrow.suspend.storage import Storage, open_storage
from regrow.suspend.zarr import METADATA, Grid, Region
from regrow.wire.dtypes import numpy_dtype
from regrow.worker.platform import KEEP, Domain, on_host
from regrow.worker.store import Part, PartError, Store

log = logging.getLogger(__name__)


@final
class Persistence:
    """Writes and reads shards, each on a helper's thread."""

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
            home: The domain that parts are made in.
            spawn: Runs a function on a helper thread.
            report: Sends an answer to the head.
        """
        self._store = store
        self._home = home
        self._spawn = spawn
        self._report = report

    def write(self, command: c.WriteShards) -> None:
        """Writes shards; a program that is given the arrays meanwhile waits until they are held."""
        part = self._store.get(command.aid)
        reading = part.read()

        def run() -> None:
            try:
                try:
                    singles = part.singles()
                    values = [on_host(singles[shard]) for shard, _ in command.files]
                finally:
                    reading.set()
                _write(open_storage(command.url), command, values)
            except Exception as error:  # noqa: BLE001 - told to who asked
                self._fail(command.rid, _told(error, part.epoch))
            else:
                self._report(c.Reply(command.rid, None))

        self._spawn(run)

    def read(self, command: c.ReadShards) -> None:
        """Makes a part that is pending until it has been read."""
        part = Part.expected(self._home, command.devices)
        self._store.set(command.aid, part)

        def run() -> None:
            try:
                storage = open_storage(command.url).below(command.name)
                grid = Grid.read(storage.read(METADATA), f"{command.url}/{command.name}")
                _check(grid, command)
                shards = [
                    self._home.put(
                        _region(storage, grid, tuple(region)), device, command.memory_kind, KEEP
                    )
                    for device, region in zip(command.devices, command.regions, strict=True)
                ]
            except Exception as error:  # noqa: BLE001 - told to who asked, and by the part
                told = _told(error)
                part.resolve(Part.failed(self._home, told))
                self._fail(command.rid, told)
            else:
                part.resolve(Part(self._home, list(command.devices), shards))
                self._report(c.Reply(command.rid, None))

        self._spawn(run)

    def _fail(self, rid: int, error: PartError) -> None:
        self._report(c.Failed(rid, int(error.code), error.message, error.epoch))


def _told(error: Exception, epoch: int = 0) -> PartError:
    if isinstance(error, RegrowError) and not isinstance(error, PartError):
        return PartError(Code.FAILED_PRECONDITION, str(error))
    return PartError.of(error, epoch)


def _write(storage: Storage, command: c.WriteShards, values: list[Any]) -> None:
    for name, data in command.whole:
        storage.write(name, data)
    for (_, name), value in zip(command.files, values, strict=True):
        flat: np.ndarray[Any, Any] = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        storage.write(name, flat.data if flat.size else b"")
    for folder in {name.rpartition("/")[0] for _, name in command.files}:
        storage.sync(folder)


def _check(grid: Grid, command: c.ReadShards) -> None:
    wanted = (tuple(command.shape), command.kind)
    if (grid.shape, grid.kind) != wanted:
        raise StorageError(
            f"{command.url}/{command.name} is of shape {list(grid.shape)} and type number "
            f"{grid.kind}; asked for are {list(wanted[0])} and {wanted[1]}"
        )


def _region(storage: Storage, grid: Grid, region: Region) -> np.ndarray[Any, Any]:
    """A region of an array, put together from the chunks that it needs."""
    dtype = numpy_dtype(grid.kind)
    dims = tuple(stop - start for start, stop in region)
    if 0 in dims:
        return np.empty(dims, dtype)
    name = grid.place(region)
    if name is not None:
        return _chunk(storage, grid, name)
    out = np.empty(dims, dtype)
    for name, inside, target in grid.covering(region):
        part = _chunk(storage, grid, name)[tuple(slice(*span) for span in inside)]
        out[tuple(slice(*span) for span in target)] = part
    return out


def _chunk(storage: Storage, grid: Grid, name: str) -> np.ndarray[Any, Any]:
    dtype = numpy_dtype(grid.kind)
    room = np.empty(grid.chunk, dtype)
    flat: np.ndarray[Any, Any] = room.reshape(-1).view(np.uint8)
    if storage.read_into(name, flat.data) != flat.size:
        raise StorageError(f"{storage.url}/{name} is not of {flat.size} bytes")
    return room
