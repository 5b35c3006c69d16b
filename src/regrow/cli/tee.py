"""What a program prints, passed on and kept."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Final, final

_CHUNK: Final = 1 << 16


@final
class Tee:
    """A pipe that a program writes to, and whose contents go on to another descriptor.

    It has no thread: whoever selects on it calls `copy` when there is something.

    Attributes:
        fd: What the program is to write to.
        lines: The lines that came, each with its time in seconds since 1970.
    """

    def __init__(self, to: int) -> None:
        """Makes one that copies to `to`, which stays open."""
        self.lines: list[tuple[float, str]] = []
        self._from, self.fd = os.pipe()
        self._to = to
        self._torn = b""
        os.set_blocking(self._from, False)

    def __enter__(self) -> Tee:
        return self

    def __exit__(self, *_: object) -> None:
        """Copies what is left, and closes it."""
        while self.copy():
            pass
        if self._torn:
            self._keep(self._torn)
        os.close(self._from)
        os.close(self.fd)

    def fileno(self) -> int:
        """What can be read from when there is something to copy."""
        return self._from

    def copy(self) -> bool:
        """Copies what is there, of much only a part; returns whether there was something."""
        try:
            chunk = os.read(self._from, _CHUNK)
        except BlockingIOError:
            return False
        self._pass_on(chunk)
        *whole, self._torn = (self._torn + chunk).split(b"\n")
        self._keep(*whole)
        return True

    def _keep(self, *lines: bytes) -> None:
        now = time.time()
        self.lines += [(now, line.decode("utf-8", "replace")) for line in lines]

    def _pass_on(self, chunk: bytes) -> None:
        # Whoever reads it may have gone; the program has to go on.
        with contextlib.suppress(OSError):
            while chunk:
                chunk = chunk[os.write(self._to, chunk) :]
