"""Where the wall time of a run went, in the buckets of Google's ml-goodput-measurement."""

from __future__ import annotations

from typing import Final, final

PRODUCTIVE: Final = "PRODUCTIVE"
INITIALIZATION: Final = "TPU_INITIALIZATION"
PREPARATION: Final = "TRAINING_PREP"
STARTUP: Final = "PROGRAM_STARTUP"
DATA: Final = "DATA_LOADING_SYNC"
SAVE: Final = "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME"
RESTORE: Final = "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME"
WASTED: Final = "WASTED_PROGRESS_FROM_DISRUPTION"
RESTART: Final = "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION"
SLICE_DOWN: Final = "ELASTIC_SLICE_DOWN"
SCALE_UP: Final = "ELASTIC_SCALE_UP"
REINITIALIZATION: Final = "ELASTIC_REINITIALIZATION"
OTHER: Final = "OTHER"

BUCKETS: Final = (
    PRODUCTIVE,
    INITIALIZATION,
    PREPARATION,
    STARTUP,
    DATA,
    SAVE,
    RESTORE,
    WASTED,
    RESTART,
    SLICE_DOWN,
    SCALE_UP,
    REINITIALIZATION,
    OTHER,
)
"""All of them. DATA_LOADING_ASYNC is not among them: what is hidden behind a step costs no time."""

_REMEMBERED: Final = 1024


@final
class Ledger:
    """Puts each moment from its making on into exactly one bucket.

    Times are seconds of any monotonic clock, and must not decrease.
    """

    def __init__(self, bucket: str, now: float) -> None:
        self._bucket = bucket
        self._since = now
        self._began = now
        self._spent: dict[str, float] = dict.fromkeys(BUCKETS, 0.0)
        self._past: list[tuple[str, float, float]] = []

    @property
    def bucket(self) -> str:
        """Where time goes now."""
        return self._bucket

    def switch(self, bucket: str, now: float) -> None:
        """From now on time goes into this bucket."""
        if bucket == self._bucket:
            return
        self._spent[self._bucket] += now - self._since
        self._past.append((self._bucket, self._since, now))
        if len(self._past) > _REMEMBERED:
            del self._past[: _REMEMBERED // 2]
        self._bucket, self._since = bucket, now

    def switch_since(self, bucket: str, at: float, now: float) -> None:
        """As `switch`, but the time since `at`, which has been put elsewhere, goes there as well."""
        self.switch(bucket, now)
        for index in range(len(self._past) - 1, -1, -1):
            former, begin, end = self._past[index]
            if end <= at:
                break
            moved = min(end - max(begin, at), self._spent[former])
            self._spent[former] -= moved
            self._spent[bucket] += moved
            self._past[index] = (bucket, max(begin, at), end)
            if begin < at:
                self._past.insert(index, (former, begin, at))
                break

    def move(self, source: str, target: str, seconds: float) -> None:
        """Time that went into one bucket proves to belong to another."""
        moved = min(seconds, self._spent[source])
        self._spent[source] -= moved
        self._spent[target] += moved

    def spent(self, bucket: str, now: float) -> float:
        """The seconds in a bucket."""
        return self._spent[bucket] + (now - self._since if bucket == self._bucket else 0.0)

    def totals(self, now: float) -> dict[str, float]:
        """The seconds in each bucket; they add up to `elapsed`."""
        return {bucket: self.spent(bucket, now) for bucket in BUCKETS}

    def elapsed(self, now: float) -> float:
        """The seconds since the ledger was made."""
        return now - self._began
