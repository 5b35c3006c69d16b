"""Coordination services on a loop in a thread of their own, as the head serves them."""

from __future__ import annotations

import asyncio
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple, final

from regrow.head.coordination import Coordination
from regrow.head.coordination_calls import address_of, serve_coordination

_WAIT_S = 30.0


class Epoch(NamedTuple):
    """Where the members of an epoch meet, and what each registers by."""

    number: int
    address: str
    keys: list[int]


@final
class ServedCoordination:
    """Close it when the members have ended, unless they are to lose their connection."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.coordination = Coordination(address_of(str(socket)))
        self._last = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self.call(serve_coordination, self.coordination, str(socket))

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function on the loop."""

        async def inside() -> Any:
            return function(*args)

        return asyncio.run_coroutine_threadsafe(inside(), self._loop).result(_WAIT_S)

    def open(self, members: int) -> Epoch:
        """The next epoch."""
        self._last += 1
        keys = self.call(self.coordination.open, self._last, members)
        return Epoch(self._last, self.coordination.address, keys)

    def close(self, epoch: Epoch) -> None:
        """An epoch ends."""
        self.call(self.coordination.close, epoch.number)

    def stop(self) -> None:
        """Ends all."""
        future = asyncio.run_coroutine_threadsafe(self._server.close(), self._loop)
        future.result(_WAIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_WAIT_S)
        self._loop.close()


@final
class Service:
    """The coordination service of one epoch, with a server of its own.

    Attributes:
        where: The address, and the key of each node.
    """

    def __init__(self, members: int) -> None:
        folder = Path(mkdtemp())
        # Also when a test fails before it shuts this down.
        self._remove_folder = weakref.finalize(self, shutil.rmtree, folder)
        self._served = ServedCoordination(folder / "epochs.sock")
        self._epoch = self._served.open(members)
        self.where = (self._epoch.address, self._epoch.keys)

    def close_epoch(self) -> None:
        """The epoch ends; the server stays."""
        self._served.close(self._epoch)

    def shutdown(self) -> None:
        """Ends the epoch and the server."""
        self.close_epoch()
        self._served.stop()
        self._remove_folder()


def open_service(members: int) -> tuple[tuple[str, list[int]], Service]:
    """Opens one: where it is, and the service."""
    service = Service(members)
    return service.where, service
