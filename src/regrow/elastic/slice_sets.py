"""Which slices take part, which do not, and which could again. No I/O; for several threads."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Set
from typing import final

from regrow.errors import UsageError


@final
class SliceSets:
    """The sets of a manager: each slice is active, or inactive; an inactive one may be available."""

    def __init__(self, everyone: Iterable[int]) -> None:
        self.everyone = frozenset(everyone)
        self._lock = threading.Lock()
        self._active: frozenset[int] = frozenset()
        self._available: frozenset[int] = frozenset()

    @property
    def active(self) -> frozenset[int]:
        """The slices of the mesh that computes."""
        return self._active

    @property
    def inactive(self) -> frozenset[int]:
        """All others."""
        return self.everyone - self._active

    @property
    def available(self) -> frozenset[int]:
        """Inactive slices that have been found to work."""
        return self._available

    def activate(self, slices: Set[int]) -> None:
        """Exactly these are active from now on.

        Raises:
            UsageError: There is no such slice.
        """
        unknown = sorted(set(slices) - self.everyone)
        if unknown:
            raise UsageError(f"there are no slices {unknown}; there are {sorted(self.everyone)}")
        with self._lock:
            self._active = frozenset(slices)
            self._available -= self._active

    def found(self, working: Set[int]) -> frozenset[int]:
        """Takes the result of a check of inactive slices; returns those that are newly available.

        What was made active while the check ran is not available.
        """
        with self._lock:
            available = frozenset(working) & self.everyone - self._active
            new = available - self._available
            self._available = available
            return new

    def forget(self) -> None:
        """Nothing is known to be available any more."""
        with self._lock:
            self._available = frozenset()
