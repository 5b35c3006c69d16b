"""Log files of host processes: one for each incarnation, few of them, and of bounded size."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Final, final

KEPT: Final = 3
MAX_BYTES: Final = 8 << 20


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
