"""The journal of a training: what each step came to, one line of JSON for each. No JAX, no threads.

A step that is taken again after a recovery has a second line; which of them counts is decided by who
reads (`regrow.chaos.committed`). Each line is written by one call, so a process that is killed leaves
whole lines and at most one torn one at the end, which is not read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, final

from regrow.errors import RegrowError

JOURNAL_VARIABLE: Final = "REGROW_JOURNAL"
"""The file that `regrow.elastic.record` writes to; without it, it does nothing."""

HASH_EVERY_VARIABLE: Final = "REGROW_JOURNAL_HASH_EVERY"
"""The state is hashed at each step that is a multiple of this; without it, at each."""

RecordId: TypeAlias = int | str


@final
@dataclass(frozen=True, slots=True)
class Loss:
    """A loss, with every bit of it.

    Attributes:
        dtype: The name of its type.
        bits: Its bytes, in hexadecimal, the lowest first.
        value: The same as a number.
    """

    dtype: str
    bits: str
    value: float

    def __str__(self) -> str:
        return f"{self.value!r} ({self.dtype}, bits {self.bits})"


@final
@dataclass(frozen=True, slots=True)
class StepRecord:
    """What was recorded of a step.

    Attributes:
        step: The step.
        loss: Its loss.
        state: The hash of each leaf of the state after it, by path, with its dtype and shape; None:
            the program gave no state, or its turn has not come.
        ids: The records that it was computed from, in order; None: the program gave none.
        slices: The slices that it was computed on; None: what was given says nothing of them.
        at: When it was recorded, in seconds since 1970.
    """

    step: int
    loss: Loss
    state: Mapping[str, str] | None = None
    ids: tuple[RecordId, ...] | None = None
    slices: tuple[int, ...] | None = None
    at: float = 0.0

    def line(self) -> bytes:
        """The line of the journal."""
        return json.dumps(asdict(self), separators=(",", ":")).encode() + b"\n"

    @classmethod
    def of_line(cls, line: bytes) -> StepRecord:
        """From a line of the journal.

        Raises:
            RegrowError: It is none.
        """
        try:
            return cls._of(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise RegrowError(f"this is no line of a journal: {line[:80]!r} ({error})") from None

    @classmethod
    def _of(cls, told: dict[str, Any]) -> StepRecord:
        return cls(
            int(told["step"]),
            Loss(**told["loss"]),
            told["state"],
            _tuple(told["ids"]),
            _tuple(told["slices"]),
            float(told["at"]),
        )


def _tuple(values: Sequence[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)


@final
class JournalWriter:
    """Appends lines to a journal; several processes may."""

    def __init__(self, path: str) -> None:
        """Opens it; it is made if it is not there.

        Raises:
            RegrowError: It cannot be opened.
        """
        self.path = path
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RegrowError(f"cannot open the journal {path}: {error.strerror}") from None

    def write(self, record: StepRecord) -> None:
        """Appends a record.

        Raises:
            RegrowError: It could not be written as a whole.
        """
        line = record.line()
        try:
            written = os.write(self._fd, line)
        except OSError as error:
            raise RegrowError(f"cannot write to the journal {self.path}: {error}") from None
        if written != len(line):
            raise RegrowError(f"cannot write to the journal {self.path}: only a part was taken")


def read_journal(path: Path) -> list[StepRecord]:
    """All records, in the order in which they were written; none if there is no journal.

    Raises:
        RegrowError: A line is no record.
    """
    if not path.exists():
        return []
    *whole, _torn = path.read_bytes().split(b"\n")
    return [StepRecord.of_line(line) for line in whole]
