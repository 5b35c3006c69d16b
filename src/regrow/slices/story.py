"""The story of a slice: what happened to it, in few lines, for its errors and for its status."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import Final, TypedDict, final

from regrow.errors import SLICE_DOWN_WORDS

_WORDS = re.compile("|".join(SLICE_DOWN_WORDS))
_SIGNAL = re.compile(r"(SIG[A-Z0-9+]+)(?: \(signal [0-9]+\))?")
_MAX_TEXT: Final = 300


def clean(text: str) -> str:
    """Foreign text as one short line, free of the words by which callers know a lost slice."""
    line = _WORDS.sub(lambda word: word.group().lower(), " ".join(text.split()))
    line = "".join(char if char.isprintable() else "?" for char in line).rstrip(" .;,")
    return line if len(line) <= _MAX_TEXT else line[: _MAX_TEXT - 1] + "…"


def seconds(value_s: float) -> str:
    """A duration for people: two figures after the point when short, none when long."""
    value_s = max(value_s, 0.0)
    digits = 2 if value_s < 10 else 1 if value_s < 100 else 0
    text = f"{value_s:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if digits else text} s"


def host_name(host: int, pid: int | None) -> str:
    """A host as the messages name it."""
    return f"host {host}" if pid is None else f"host {host} (pid {pid})"


def exit_phrase(cause: str) -> str:
    """How a process ended, from the launcher's cause."""
    cause = clean(cause)
    signal = _SIGNAL.fullmatch(cause)
    if signal:
        return f"was ended by {signal.group(1)}"
    if cause.startswith("exit status"):
        return f"ended with {cause}"
    return f"ended: {cause}" if cause else "ended"


class StoryEntry(TypedDict):
    """A line of a story for `regrow status --json`."""

    ago_s: float
    incarnation: int
    text: str


@dataclass(frozen=True, slots=True)
class StoryLine:
    """One thing that happened, at a monotonic time."""

    at: float
    incarnation: int
    text: str


@final
class Story:
    """A bounded list of what happened to one slice; the oldest lines go first."""

    __slots__ = ("_lines", "dropped")

    def __init__(self, limit: int) -> None:
        self._lines: deque[StoryLine] = deque(maxlen=limit)
        self.dropped = 0

    @property
    def lines(self) -> tuple[StoryLine, ...]:
        """All lines that are kept, oldest first."""
        return tuple(self._lines)

    def add(self, now: float, incarnation: int, text: str) -> None:
        """Adds a line."""
        if len(self._lines) == self._lines.maxlen:
            self.dropped += 1
        self._lines.append(StoryLine(now, incarnation, clean(text)))

    def told(self, now: float, last: int = 8) -> str:
        """The last lines in one, for an error message."""
        lines = self.lines[-last:]
        return "; ".join(
            f"{seconds(now - line.at)} ago [{line.incarnation}] {line.text}" for line in lines
        )

    def entries(self, now: float) -> list[StoryEntry]:
        """All lines as JSON values."""
        return [
            {
                "ago_s": round(max(now - line.at, 0.0), 3),
                "incarnation": line.incarnation,
                "text": line.text,
            }
            for line in self._lines
        ]
