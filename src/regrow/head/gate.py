"""The gate before all sessions: while it is closed their requests wait, in their order."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import final


@final
class Gate:
    """Closed while slices are suspended.

    Attributes:
        closed: Whether requests wait.
    """

    def __init__(self) -> None:
        self.closed = False
        self._parked: dict[Hashable, Callable[[], None]] = {}

    def park(self, who: Hashable, go_on: Callable[[], None]) -> None:
        """Has `go_on` called when the gate opens; once for each who waits."""
        self._parked[who] = go_on

    def forget(self, who: Hashable) -> None:
        """It waits no longer."""
        self._parked.pop(who, None)

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._parked)

    def close(self) -> None:
        """Lets nothing through any longer."""
        self.closed = True

    def open(self) -> None:
        """Lets through what waits."""
        self.closed = False
        parked, self._parked = self._parked, {}
        for go_on in parked.values():
            go_on()
