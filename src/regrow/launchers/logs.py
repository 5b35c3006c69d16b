"""Log files of host processes: one for each incarnation, few of them, and of bounded size."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import Final, final

KEPT: Final = 3
MAX_BYTES: Final = 8 << 20

# A fatal line of XLA (it is followed by a stack), or the last line of a Python traceback.
_ERROR: Final = re.compile(r"F\d{4} |[\w.]*(Error|Exception|Exit|Interrupt|Timeout)\b: |regrow: ")


@final
class HostLog:
    """The log of one host, which a process outside of our control writes to.

    `NAME.log` is that of the present incarnation, `NAME.log.1` of the one before, and so on;
    `NAME.log.full` is what was moved out of the present one because it grew too large.
    """

    def __init__(
        self, directory: Path, name: str, *, kept: int = KEPT, max_bytes: int = MAX_BYTES
    ) -> None:
        self.path = directory / f"{name}.log"
        self._kept = kept
        self._max_bytes = max_bytes

    def _numbered(self, number: int) -> Path:
        return self.path if number == 0 else self.path.with_name(f"{self.path.name}.{number}")

    def begin(self) -> Path:
        """Makes room for a new incarnation; returns the path of its log."""
        for number in reversed(range(self._kept - 1)):
            with contextlib.suppress(FileNotFoundError):
                self._numbered(number).replace(self._numbered(number + 1))
        return self.path

    def bound(self) -> None:
        """Moves the content aside if there is too much of it.

        The writer appends (O_APPEND), so it goes on at the new end of the emptied file.
        """
        with contextlib.suppress(FileNotFoundError):
            if self.path.stat().st_size > self._max_bytes:
                shutil.copyfile(self.path, self.path.with_name(f"{self.path.name}.full"))
                os.truncate(self.path, 0)


def telling_line(path: Path) -> str:
    """The line near the end of a log that tells why its process died; empty if there is none."""
    lines = tail(path, lines=60)
    errors = [line for line in lines if _ERROR.match(line)]
    return " ".join((errors or lines or [""])[-1].split())


def tail(path: Path, *, lines: int = 5, max_bytes: int = 8192) -> list[str]:
    """The last lines of a log that hold something; empty when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - max_bytes))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-lines:]
