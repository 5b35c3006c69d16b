"""A program as a user runs it, followed line by line."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest


class RunningProgram:
    """A Python program that runs, and the lines that it has said so far."""

    def __init__(
        self,
        program: Path,
        *arguments: str,
        timeout_s: float,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.seen: list[str] = []
        self._timeout_s = timeout_s
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, str(program), *arguments],
            cwd=cwd,
            env=os.environ | dict(environ or {}) | {"PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first line from here on in which the pattern is found."""
        deadline = time.monotonic() + self._timeout_s
        while (line := self._next(deadline, pattern)) is not None:
            if match := re.search(pattern, line):
                return match
        pytest.fail(f"ended before {pattern!r}\n{self.text}")

    def succeeds(self) -> str:
        """All that it said, when it has ended well."""
        deadline = time.monotonic() + self._timeout_s
        while self._next(deadline, "its end") is not None:
            pass
        assert self._process.wait(self._timeout_s) == 0, self.text
        return self.text

    @property
    def text(self) -> str:
        """What it has said."""
        return "\n".join(self.seen)

    def _next(self, deadline: float, what: str) -> str | None:
        try:
            line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            pytest.fail(f"waited {self._timeout_s:g} s for {what!r} after\n{self.text}")
        if line is not None:
            self.seen.append(line)
        return line

    def close(self) -> None:
        """Ends it."""
        self._process.terminate()
        try:
            self._process.wait(self._timeout_s)
        finally:
            self._process.kill()
            self._reader.join()
            assert self._process.stdout is not None
            self._process.stdout.close()
