"""Programs that run as clients of a cluster, and tell of each of their cases."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import regrow

PROGRAMS = Path(__file__).parent / "programs"
CASES = Path(__file__).parents[1] / "runtime" / "programs"
SOURCES = str(Path(regrow.__file__).parents[1])


class Program:
    """One of the programs while it runs; a test waits for the line that tells of its case."""

    def __init__(self, cluster: regrow.LocalCluster, name: str) -> None:
        self._process = _started(cluster, name)
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


def run(cluster: regrow.LocalCluster, name: str, *arguments: str) -> Any:
    """Runs a program to its end; its output is in `stdout`."""
    process = _started(cluster, name, *arguments)
    try:
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def _started(cluster: regrow.LocalCluster, name: str, *arguments: str) -> subprocess.Popen[str]:
    variables = cluster.env
    path = os.pathsep.join([variables["PYTHONPATH"], SOURCES, str(CASES)])
    return subprocess.Popen(
        [sys.executable, "-u", "-X", "faulthandler", str(PROGRAMS / name), *arguments],
        env=os.environ | variables | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def cases_of(name: str) -> list[str]:
    """The names of the cases of a program."""
    return re.findall(r"^@case\ndef (\w+)", (PROGRAMS / name).read_text(), re.MULTILINE)
