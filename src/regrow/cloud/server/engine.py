"""The control plane at work: a clock, a memory, and hosts that do what its nodes say.

Whatever changes is written down before it is answered, and before any host hears of it. So after a
kill at any moment the next server finds in its memory all that anybody could know of, and goes on.
Everything runs in the thread of one event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar, final

from regrow.cloud.config import CloudConfig
from regrow.cloud.machine import Change, ControlPlane, Event
from regrow.cloud.resources import Node
from regrow.cloud.store import Store

_T = TypeVar("_T")
GuestAttributes = dict[str, dict[str, str]]
"""Values by namespace and key."""


class Fleet(Protocol):
    """The hosts of all nodes."""

    def apply(self, changes: Sequence[Change]) -> None:
        """Has hosts do what their nodes, some of which have changed, say now."""
        ...

    def recover(self, nodes: Iterable[Node], *, lost: bool) -> None:
        """Finds the hosts that an earlier server has left; `lost`: there can be none."""
        ...

    def guest_attributes(self, node: Node, worker: int) -> GuestAttributes:
        """What a host has told about itself."""
        ...

    async def close(self) -> None:
        """Ends every process."""
        ...


@final
class Engine:
    """One control plane that runs.

    Attributes:
        plane: It.
        fleet: Its hosts; set before `start`.
        failure: Why the memory cannot be written any more; the engine then does nothing further.
        on_failure: Is called when that happens.
    """

    def __init__(self, config: CloudConfig, store: Store) -> None:
        self._store = store
        self._last = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False
        self.plane = ControlPlane(config, store.load(), store.fact("last_seq", 0))
        self.fleet: Fleet
        self.failure: sqlite3.Error | None = None
        self.on_failure: Callable[[], None] = lambda: None

    def start(self, *, lost: bool) -> None:
        """Finds the hosts that an earlier server has left, and lets time go on.

        Args:
            lost: Whether none of their processes can be there.
        """
        self.fleet.recover(list(self.plane.tables.nodes.values()), lost=lost)
        self.do(self.plane.tick)

    def _now(self) -> float:
        # A clock that is set back must not undo what has happened.
        self._last = max(self._last, time.time())
        return self._last

    def do(self, act: Callable[[float], _T]) -> _T:
        """Does something to the control plane, writes it down, and has the hosts follow."""
        if self.failure is not None:
            raise self.failure
        now = self._now()
        try:
            return act(now)
        finally:
            self._commit(now)

    def report(self, events: Sequence[Event]) -> None:
        """What hosts did."""
        if not self._ended:
            self.do(lambda now: self.plane.handle(events, now))

    def configure(self, **changes: Any) -> None:
        """Changes the world.

        Raises:
            UsageError: If a value is wrong.
        """
        config = dataclasses.replace(self.plane.config, **changes)
        self.do(lambda now: self.plane.configure(config, now))

    def _commit(self, now: float) -> None:
        changes = self.plane.take_changes()
        if changes:
            self._write(changes)
            self.fleet.apply([change for change in changes if change.kind == Node.kind])
        if self._timer is not None:
            self._timer.cancel()
        due = self.plane.deadline(now)
        if due is not None and not self._ended:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, due - now), self._tick)

    def _write(self, changes: Sequence[Change]) -> None:
        try:
            self._store.write(changes, last_seq=self.plane.tables.last_seq)
        except sqlite3.Error as error:
            # What is not written down must not happen; only a new server knows what was.
            self.failure = error
            self._ended = True
            self.on_failure()
            raise

    def _tick(self) -> None:
        self.do(self.plane.tick)

    async def close(self) -> None:
        """Ends the hosts' processes; the next server starts them again."""
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        await self.fleet.close()
