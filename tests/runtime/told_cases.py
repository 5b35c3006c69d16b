"""A program with many cases, which writes a line for each: a test waits for that of its own."""

from __future__ import annotations

import re
import subprocess


class ToldCases:
    """Such a program while it runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: list[str] = []

    def check(self, case: str) -> None:
        """Waits until the program has told of a case, and fails if that is nothing good."""
        assert self._process.stdout is not None
        while not (told := [line for line in self._lines if re.match(rf"(ok|bad) {case} ", line)]):
            line = self._process.stdout.readline()
            assert line, f"{case} was not told of:\n{''.join(self._lines[-60:])}"
            self._lines.append(line.rstrip("\n") + " \n")
        before = self._lines[: self._lines.index(told[0])]
        assert told[0].startswith("ok "), "".join(before[-40:])

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
