"""Programs that run as clients of a cluster, and tell of each of their cases."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from told_cases import ToldCases

import regrow

PROGRAMS = Path(__file__).parent / "programs"
CASES = Path(__file__).parents[1] / "runtime" / "programs"
SOURCES = str(Path(regrow.__file__).parents[1])


class Program(ToldCases):
    """One of the programs while it runs; a test waits for the line that tells of its case."""

    def __init__(self, cluster: regrow.LocalCluster, name: str, cases: Sequence[str]) -> None:
        super().__init__(_started(cluster, name, *cases))


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


def cases_of(name: str, *slow: str) -> list[Any]:
    """The names of the cases of a program, those that are slow marked as such."""
    names = re.findall(r"^@case\ndef (\w+)", (PROGRAMS / name).read_text(), re.MULTILINE)
    assert set(slow) <= set(names)
    return [pytest.param(one, marks=pytest.mark.slow if one in slow else ()) for one in names]


def chosen_cases(request: pytest.FixtureRequest) -> list[str]:
    """The cases of the requesting module that are going to be checked: only they need to run."""
    return [
        item.callspec.params["case"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.module
        and "case" in getattr(getattr(item, "callspec", None), "params", ())
    ]
