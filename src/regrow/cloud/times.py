"""Times and durations as the API writes them: RFC 3339 in UTC, and seconds followed by "s"."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

_DURATION: Final = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)s")
_TIME: Final = re.compile(r"(\d{4}-\d\d-\d\d)[Tt](\d\d:\d\d:\d\d)(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d)")


def format_time(seconds: float) -> str:
    """RFC 3339 for a time in seconds since 1970, to the microsecond."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_time(text: str) -> float:
    """Seconds since 1970.

    Raises:
        ValueError: If the text is no RFC 3339 time.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no RFC 3339 time, say 2023-11-01T00:17:05Z")
    date, clock, fraction, zone = match.groups()
    offset = "+00:00" if zone in "Zz" else zone
    return datetime.fromisoformat(f"{date}T{clock}{offset}").timestamp() + float(fraction or 0)


def parse_duration(text: str) -> float:
    """Seconds.

    Raises:
        ValueError: If the text is no duration.
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no duration, say 3600s")
    return float(match.group(1))
