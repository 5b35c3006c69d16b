"""The language of chaos: which fault happens to which slice, and when. No I/O.

    SPEC   = ENTRY ("," ENTRY)*
    ENTRY  = FAULT ":" SLICE "@" WHEN
    WHEN   = TIME | ANCHOR ["+" TIME]
    ANCHOR = "step=" N | "phase=" PHASE | "recovery=" N
    TIME   = NUMBER ("s" | "ms")

A time alone is counted from the moment the client connected, else from its anchor. For example
`kill:1@5s,restore:1@9.5s,stop:0@step=120,kill:2@phase=load+20ms,kill:0@recovery=1`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, TypeAlias, final

from regrow.errors import UsageError

FAULTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "kill": "end the slice's processes with SIGKILL",
        "term": "end them with SIGTERM, and after a grace with SIGKILL; nothing is saved",
        "segv": "end them with SIGSEGV, as a segmentation fault does",
        "exit": "have them exit with a status of 1",
        "oom": "have them run into a limit of memory and die of it",
        "stop": "stop them with SIGSTOP",
        "cont": "let stopped processes go on with SIGCONT",
        "clockjump": "freeze them shortly, so that to them all clocks jump forward",
        "diskfull": "have all that they write to their logs fail with ENOSPC",
        "slowlink": "delay all that the head and they say to each other",
        "cutlink": "cut their connection to the head, and let them make no other",
        "lostreply": "lose what they are saying to the head, and break the connection",
        "mend": "end slowlink, cutlink and diskfull",
        "killnode": "end the raylets of its nodes with SIGKILL, where slices come from Ray",
        "restore": "start a lost slice again",
        "suspend": "have them leave with their state saved, as regrow suspend does",
        "resume": "bring a suspended slice back",
        "preempt": "give them notice by SIGTERM: suspended if their state can be saved, else lost",
    }
)
"""The faults that `parse_schedule` knows when it is given no others, with what they do."""

REMEDIES: Final = frozenset({"cont", "mend", "restore", "resume"})
"""Those that only undo others."""

PHASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "compile": "a program is being compiled",
        "transfer": "an array is on its way from the client to devices or back",
        "step": "a program is being executed",
        "collective": "a program that spans several slices is being executed",
        "reshard": "shards are on their way between slices",
        "snapshot": "a snapshot is being saved",
        "load": "a snapshot is being loaded",
        "scale-up": "the training takes in a slice that has returned",
    }
)
"""The phases that a fault can be placed in, with what the client is doing in them."""

MAX_WHEN_S: Final = 30 * 24 * 3600.0
MAX_NUMBER: Final = 10**12

_ENTRY = re.compile(r"(?P<fault>[^:@]*):(?P<slice>[^:@]*)@(?P<when>[^:@]*)")
_INDEX = re.compile(r"[0-9]{1,9}")
_ANCHOR = re.compile(r"(?P<key>[a-z]*)\s*=\s*(?P<value>[^+=]*?)\s*(?:\+\s*(?P<offset>[^+]*))?")
_WHEN = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?P<unit>[a-z]*)", re.ASCII)
_UNITS: Final = {"s": 1.0, "ms": 1e-3}
_ANCHORS: Final = ("step", "phase", "recovery")
_WHEN_FORM: Final = (
    "a number with s or ms, such as 5s, 9.5s or 600ms; step=120, phase=load or recovery=1, "
    "each also with a time after it, such as phase=load+20ms"
)


@final
@dataclass(frozen=True, slots=True)
class AtStep:
    """The program says that it begins this step, or a later one (`regrow.elastic.at_step`)."""

    step: int

    def __str__(self) -> str:
        return f"step={self.step}"


@final
@dataclass(frozen=True, slots=True)
class InPhase:
    """This phase of the client's work begins (see `PHASES`)."""

    phase: str

    def __str__(self) -> str:
        return f"phase={self.phase}"


@final
@dataclass(frozen=True, slots=True)
class InRecovery:
    """The loss with this number, from 1, is declared: the recovery from it begins."""

    number: int

    def __str__(self) -> str:
        return f"recovery={self.number}"


Anchor: TypeAlias = AtStep | InPhase | InRecovery | None
"""What the time of a fault is counted from; None: the moment the client connected."""


@final
@dataclass(frozen=True, slots=True)
class FaultEvent:
    """One fault: what, to which slice, and when.

    Attributes:
        fault: Its name.
        slice_index: The slice that it happens to.
        at_s: How many seconds after its anchor.
        anchor: What they are counted from; None: the moment the client connected.
    """

    fault: str
    slice_index: int
    at_s: float = 0.0
    anchor: Anchor = None

    @property
    def when(self) -> str:
        """When it happens, as it is written in a schedule."""
        if self.anchor is None:
            return f"{self.at_s!r}s"
        return f"{self.anchor}+{self.at_s!r}s" if self.at_s else str(self.anchor)

    def __str__(self) -> str:
        return f"{self.fault}:{self.slice_index}@{self.when}"


def parse_schedule(
    text: str, slices: int | None = None, faults: Iterable[str] = FAULTS
) -> tuple[FaultEvent, ...]:
    """Parses a schedule into its events.

    Those without an anchor come first, by time; the others as they are written. Events of one time
    keep their order.

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
    return in_order(events)


def in_order(events: Iterable[FaultEvent]) -> tuple[FaultEvent, ...]:
    """The order that `parse_schedule` gives events."""
    return tuple(
        sorted(
            events,
            key=lambda event: (event.anchor is not None, 0.0 if event.anchor else event.at_s),
        )
    )


def format_schedule(events: Iterable[FaultEvent]) -> str:
    """The text that `parse_schedule` turns into these events."""
    return ",".join(str(event) for event in events)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:39]}…")


def _form(known: tuple[str, ...]) -> str:
    return f"write FAULT:SLICE@WHEN, such as kill:1@5s; FAULT is one of {', '.join(known)}"


def _near(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _parse_entry(entry: str, where: str, slices: int | None, known: tuple[str, ...]) -> FaultEvent:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        what = "is empty" if not entry else "is not of the form FAULT:SLICE@WHEN"
        raise UsageError(f"{where} {what}; {_form(known)}")
    fault, index, when = (part.strip() for part in match.group("fault", "slice", "when"))
    if fault not in known:
        allowed = f"allowed: {', '.join(known)}{_near(fault, known)}"
        raise UsageError(f"{where}: no fault {_short(fault)}; {allowed}")
    return FaultEvent(fault, _parse_index(index, where, slices), *_parse_when(when, where))


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


def _parse_when(text: str, where: str) -> tuple[float, Anchor]:
    if "=" not in text:
        return _parse_time(text, where, _WHEN_FORM), None
    match = _ANCHOR.fullmatch(text)
    if match is None or match["key"] not in _ANCHORS:
        hint = "" if match is None else _near(match["key"], _ANCHORS)
        raise UsageError(f"{where}: {_short(text)} is no time; allowed: {_WHEN_FORM}{hint}")
    anchor = _parse_anchor(match["key"], match["value"], where)
    offset = match["offset"]
    return 0.0 if offset is None else _parse_time(offset, where), anchor


def _parse_anchor(key: str, value: str, where: str) -> Anchor:
    match key:
        case "step":
            return AtStep(_parse_number(value, where, "step", 0))
        case "recovery":
            return InRecovery(_parse_number(value, where, "recovery", 1))
        case _:
            if value not in PHASES:
                allowed = f"allowed: {', '.join(PHASES)}{_near(value, PHASES)}"
                raise UsageError(f"{where}: no phase {_short(value)}; {allowed}")
            return InPhase(value)


def _parse_number(text: str, where: str, what: Literal["step", "recovery"], least: int) -> int:
    number = int(text) if re.fullmatch(r"[0-9]{1,13}", text) else -1
    if not least <= number <= MAX_NUMBER:
        raise UsageError(f"{where}: {_short(text)} is no {what}; allowed: a number from {least} on")
    return number


def _parse_time(
    text: str, where: str, allowed: str = "a number with s or ms, such as 5s, 9.5s or 600ms"
) -> float:
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
