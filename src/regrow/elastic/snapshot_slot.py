"""The one place for a snapshot: which is the latest, and whether one is being made. No I/O."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Generic, TypeVar, final

_T = TypeVar("_T")


@final
@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to commit the snapshot of a step."""

    step: int
    generation: int


@final
class SnapshotSlot(Generic[_T]):
    """Holds the latest snapshot; a new one takes its place as a whole or not at all.

    At most one is being made at a time, so there are never more than two. May be used by several
    threads.

    Attributes:
        skipped: How many could not begin because one was being made.
    """

    def __init__(self) -> None:
        self.skipped = 0
        self._latest: tuple[int, _T] | None = None
        self._changed = threading.Condition()
        self._making: Ticket | None = None
        self._generation = 0

    @property
    def latest(self) -> tuple[int, _T] | None:
        """The step and the snapshot that was committed last; None before the first."""
        return self._latest

    @property
    def making(self) -> int | None:
        """The step of the snapshot that is being made; None if there is none."""
        ticket = self._making
        return None if ticket is None else ticket.step

    def begin(self, step: int) -> Ticket | None:
        """Begins a snapshot; None: one is being made. `commit` or `give_up` must follow."""
        with self._changed:
            if self._making is not None:
                self.skipped += 1
                return None
            self._making = Ticket(step, self._generation)
            return self._making

    def commit(self, ticket: Ticket, snapshot: _T) -> bool:
        """Makes it the latest; False: it was overtaken by `replace`, and is not."""
        with self._changed:
            self._end(ticket)
            if ticket.generation != self._generation:
                return False
            self._latest = (ticket.step, snapshot)
            return True

    def give_up(self, ticket: Ticket) -> None:
        """It failed; the latest stays."""
        with self._changed:
            self._end(ticket)

    def replace(self, step: int, snapshot: _T) -> None:
        """Puts another in the place of the latest; what is being made now will not be taken."""
        with self._changed:
            self._generation += 1
            self._latest = (step, snapshot)

    def wait(self, timeout_s: float | None) -> bool:
        """Waits until none is being made; whether that came true in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._making is None, timeout_s)

    def _end(self, ticket: Ticket) -> None:
        if self._making is not ticket:
            raise AssertionError(f"the snapshot of step {ticket.step} has ended already")
        self._making = None
        self._changed.notify_all()
