"""Waits that last longer than they usually do. No I/O."""

from __future__ import annotations

from typing import Final, NamedTuple, final

from regrow.observe.run import Run
from regrow.observe.timeline import Activity

LONG_S: Final = 2.0
_TIMES: Final = 8.0
_LONGER: Final = 2.0


@final
class LongWait(NamedTuple):
    """A wait that is to be told.

    Attributes:
        activity: What the client waits for; None: it asks for nothing.
        waited_s: For how long.
        usual_s: How long this takes on average.
    """

    activity: Activity | None
    waited_s: float
    usual_s: float


@final
class LongWaits:
    """Finds a wait that is longer than `LONG_S` and than eight times the average.

    Each is found again when it has become twice as long.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._told: tuple[object, float] = (None, 0.0)

    def look(self, now: float) -> LongWait | None:
        """The longest wait, if it is to be told now."""
        run = self._run
        if not run.running or run.event is not None:
            return None
        oldest = min(run.open, key=self._since, default=None)
        if oldest is not None:
            return self._long(oldest, self._since(oldest), oldest, run.usual_wait_s, now)
        if run.quiet_since is not None:
            return self._long(run.quiet_since, run.quiet_since, None, run.usual_gap_s, now)
        return None

    def _since(self, activity: Activity) -> float:
        """Since when the client may be waiting for it: it was not, when it began its latest execution."""
        return max(activity.began, self._run.launched_at) if activity.beside else activity.began

    def _long(
        self, key: object, since: float, activity: Activity | None, usual_s: float, now: float
    ) -> LongWait | None:
        waited_s = now - since
        known, told_s = self._told
        least_s = told_s * _LONGER if known is key or known == key else 0.0
        if waited_s < max(LONG_S, _TIMES * usual_s, least_s):
            return None
        self._told = (key, waited_s)
        return LongWait(activity, waited_s, usual_s)
