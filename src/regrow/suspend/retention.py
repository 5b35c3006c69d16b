"""How long snapshots of clusters that are gone stay. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, final

from regrow.errors import UsageError

DAYS_VARIABLE: Final = "REGROW_SNAPSHOT_DAYS"
_DAY_S: Final = 86400.0


@final
@dataclass(frozen=True, slots=True)
class Retention:
    """Snapshots stay while they are young, and the latest of each cluster's name however old.

    Attributes:
        days: How long they are young; None: for ever.
        latest: How many of a name stay.
    """

    days: float | None = 30.0
    latest: int = 3

    def expired(self, made: Mapping[str, float], now: float) -> tuple[str, ...]:
        """What may go.

        Args:
            made: For each folder (NAME-RUN) when its latest snapshot was made, in seconds since 1970.
            now: The time, likewise.
        """
        if self.days is None:
            return ()
        young = now - self.days * _DAY_S
        stay = {name for name, when in made.items() if when >= young}
        for folders in _by_cluster(made).values():
            latest_first = sorted(folders, key=lambda name: (made[name], name), reverse=True)
            stay.update(latest_first[: self.latest])
        return tuple(sorted(made.keys() - stay))


def _by_cluster(folders: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for folder in folders:
        found.setdefault(folder.rpartition("-")[0], []).append(folder)
    return found


def days_of(text: str) -> float | None:
    """A number of days, or "never" (None).

    Raises:
        ValueError: It is neither.
    """
    if text == "never":
        return None
    days = float(text)
    if not 0 <= days < math.inf:
        raise ValueError(text)
    return days


def retention_from(variables: Mapping[str, str]) -> Retention:
    """The rule, with the days of REGROW_SNAPSHOT_DAYS.

    Raises:
        UsageError: It says neither a number of days nor "never".
    """
    text = variables.get(DAYS_VARIABLE, "").strip()
    if not text:
        return Retention()
    try:
        return Retention(days_of(text))
    except ValueError:
        raise UsageError(f"{DAYS_VARIABLE}: {text!r} is no number of days, nor 'never'") from None
