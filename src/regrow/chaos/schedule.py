"""The language of `--chaos`: which fault happens to which slice, and when. No I/O.

    SPEC  = ENTRY ("," ENTRY)*
    ENTRY = FAULT ":" SLICE "@" WHEN
    WHEN  = NUMBER ("s" | "ms")          counted from the moment the client connected

For example `kill:1@5s,restore:1@9.5s,stop:0@3s,cont:0@600ms`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from regrow.errors import UsageError

FAULTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "kill": "end the slice's processes with SIGKILL",
        "stop": "stop the slice's processes with SIGSTOP",
        "cont": "let stopped processes go on with SIGCONT",
        "restore": "start a lost slice again",
    }
)
"""The faults that `parse_schedule` knows when it is given no others, with what they do."""

MAX_WHEN_S: Final = 30 * 24 * 3600.0

_ENTRY = re.compile(r"(?P<fault>[^:@]*):(?P<slice>[^:@]*)@(?P<when>[^:@]*)")
_INDEX = re.compile(r"[0-9]{1,9}")
_WHEN = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?P<unit>[a-z]*)", re.ASCII)
_UNITS: Final = {"s": 1.0, "ms": 1e-3}


@dataclass(frozen=True, slots=True)
class FaultEvent:
    """One fault: what, to which slice, and how many seconds after the client connected."""

    fault: str
    slice_index: int
    at_s: float

    def __str__(self) -> str:
        return f"{self.fault}:{self.slice_index}@{self.at_s!r}s"


def parse_schedule(
    text: str, slices: int | None = None, faults: Iterable[str] = FAULTS
) -> tuple[FaultEvent, ...]:
    """Parses a schedule into its events, by time; events of one time keep their order.

    Args:
        text: Such as `kill:1@5s,restore:1@9.5s`.
        slices: How many slices there are; None: any index is right.
        faults: The names that are allowed.

    Raises:
        UsageError: The text is no schedule; tells the entry, its column and what is allowed.
    """
    known = tuple(faults)
    if not text.strip():
        raise UsageError(f"the chaos schedule is empty; {_form(known)}")
    events = []
    column = 1
    for number, entry in enumerate(text.split(","), start=1):
        stripped = entry.strip()
        start = column + len(entry) - len(entry.lstrip())
        where = f"chaos entry {number} ({_short(stripped)}, column {start})"
        events.append(_parse_entry(stripped, where, slices, known))
        column += len(entry) + 1
    return tuple(sorted(events, key=lambda event: event.at_s))


def format_schedule(events: Iterable[FaultEvent]) -> str:
    """The text that `parse_schedule` turns into these events."""
    return ",".join(str(event) for event in events)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:39]}…")


def _form(known: tuple[str, ...]) -> str:
    return f"write FAULT:SLICE@WHEN, such as kill:1@5s; FAULT is one of {', '.join(known)}"


def _parse_entry(entry: str, where: str, slices: int | None, known: tuple[str, ...]) -> FaultEvent:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        what = "is empty" if not entry else "is not of the form FAULT:SLICE@WHEN"
        raise UsageError(f"{where} {what}; {_form(known)}")
    fault, index, when = (part.strip() for part in match.group("fault", "slice", "when"))
    if fault not in known:
        near = difflib.get_close_matches(fault, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"{where}: no fault {_short(fault)}; allowed: {', '.join(known)}{hint}")
    return FaultEvent(fault, _parse_index(index, where, slices), _parse_when(when, where))


def _parse_index(text: str, where: str, slices: int | None) -> int:
    allowed = "a slice index from 0 on" if slices is None else _range(slices)
    if not _INDEX.fullmatch(text):
        raise UsageError(f"{where}: {_short(text)} is no slice; allowed: {allowed}")
    index = int(text)
    if slices is not None and index >= slices:
        raise UsageError(f"{where}: there is no slice {index}; allowed: {allowed}")
    return index


def _range(slices: int) -> str:
    return "0 (there is one slice)" if slices == 1 else f"0 to {slices - 1}"


def _parse_when(text: str, where: str) -> float:
    allowed = "a number with s or ms, such as 5s, 9.5s or 600ms"
    match = _WHEN.fullmatch(text)
    if match is None:
        raise UsageError(f"{where}: {_short(text)} is no time; allowed: {allowed}")
    unit = match.group("unit")
    if unit not in _UNITS:
        what = f"{_short(unit)} is no unit" if unit else f"{_short(text)} has no unit"
        raise UsageError(f"{where}: {what}; allowed: {allowed}")
    at_s = float(match.group("number")) * _UNITS[unit]
    if at_s > MAX_WHEN_S:
        raise UsageError(
            f"{where}: {_short(text)} is too far away; allowed: up to {MAX_WHEN_S:.0f} s"
        )
    return at_s
