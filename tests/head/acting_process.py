"""A script in a process of its own that carries out lines of JSON and answers each in turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import regrow

SOURCES = str(Path(regrow.__file__).parents[1])


class ActingProcess:
    """Such a process; its answers are lines that begin with "@"."""

    def __init__(self, script: Path, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env=os.environ | {"PYTHONPATH": SOURCES},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def begin(self, *act: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(act) + "\n")
        self._process.stdin.flush()

    def end(self) -> Any:
        """What came of the earliest act that has begun."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):  # Gloo, too, writes there.
                return json.loads(line[1:])
        raise AssertionError(f"the process has ended: {self._process.wait()}")

    def lives(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
