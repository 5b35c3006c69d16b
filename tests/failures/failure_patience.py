"""Deadlines of the failure tests, which a machine that stands still does not use up.

Virtual machines and containers are suspended as a whole, for a minute say, while their clocks go on.
"""

from __future__ import annotations

import time

_LONGEST_STEP_S = 0.5


class Patience:
    """A deadline that is looked at often, and runs only while this process does."""

    def __init__(self, deadline_s: float) -> None:
        self._left_s = deadline_s
        self._looked_at = time.monotonic()

    def over(self) -> bool:
        """Whether it has passed."""
        now = time.monotonic()
        self._left_s -= min(now - self._looked_at, _LONGEST_STEP_S)
        self._looked_at = now
        return self._left_s < 0
