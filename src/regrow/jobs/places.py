"""The places of one slice: which processes of which incarnation are on it. No I/O.

What has begun to be started counts as a process until it has ended, or has not come to life: a slice
is idle only when nothing of an old incarnation can appear on it any more.
"""

from __future__ import annotations

import itertools
from typing import Final, final

from regrow.errors import UsageError


@final
class Place:
    """One slice of the machines.

    Attributes:
        index: Which.
        fenced: No process up to this incarnation may be there.
    """

    def __init__(self, index: int) -> None:
        self.index: Final = index
        self.fenced = 0
        self._numbers = itertools.count(1)
        self._present: dict[int, int] = {}
        self._owed: int | None = None

    @property
    def running(self) -> tuple[int, ...]:
        """The incarnations that have processes here."""
        return tuple(sorted(set(self._present.values())))

    def begin(self, incarnation: int) -> int:
        """A process is about to be started; returns its ticket.

        Raises:
            UsageError: Its incarnation is fenced.
        """
        if incarnation <= self.fenced:
            raise UsageError(
                f"incarnation {incarnation} of slice {self.index} is over: nothing up to "
                f"{self.fenced} is started any more"
            )
        ticket = next(self._numbers)
        self._present[ticket] = incarnation
        return ticket

    def is_fenced(self, ticket: int) -> bool:
        """Whether a process is to be ended."""
        return self._present.get(ticket, 0) <= self.fenced

    def fence(self, upto: int) -> list[int]:
        """Lets nothing up to an incarnation be here; returns the tickets of what is to be ended."""
        self.fenced = max(self.fenced, upto)
        self._owed = max(upto, self._owed or 0)
        return [ticket for ticket in self._present if self.is_fenced(ticket)]

    def ended(self, ticket: int) -> None:
        """A process has ended, or was not started."""
        self._present.pop(ticket, None)

    def take_idle(self) -> int | None:
        """The incarnation up to which nothing is left, once after each `fence`; None: not yet."""
        if self._owed is None or any(self.is_fenced(ticket) for ticket in self._present):
            return None
        owed, self._owed = self._owed, None
        return owed
