"""Client and server of different jax: each as client and each as server.

The other interpreter is that of `make test-newest` (.venv-newest beside .venv); without it the tests are
skipped. What both ends have in common is tested by `test_checklist`, with either interpreter.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_checklist import PROGRAMS, SOURCES, cases_of
from told_cases import ToldCases

ROOT = Path(__file__).parents[2]
OTHERS = [
    path
    for path in (ROOT / ".venv/bin/python", ROOT / ".venv-newest/bin/python")
    if path.exists() and not path.parents[1].samefile(sys.prefix)
]
QUICK = (
    "devices_and_their_attributes",
    "arrays_of_every_dtype",
    "shard_map_with_collectives",
    "pinned_host",
    "resharding_across_meshes",
)

pytestmark = pytest.mark.skipif(
    not OTHERS, reason="no environment with another jax is at hand: make test-newest makes one"
)


def regrow(python: str, environ: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        [python, "-m", "regrow", *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", params=["the other serves", "the other is the client"])
def script(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ToldCases]:
    other = str(OTHERS[0])
    ends = (other, sys.executable)
    server, client = ends if request.param == "the other serves" else ends[::-1]
    home = tmp_path_factory.mktemp("home")
    environ = os.environ | {"REGROW_HOME": str(home), "PYTHONPATH": SOURCES}
    regrow(server, environ, "up", "--slices", "2", "--devices-per-slice", "4", "--detach")
    try:
        lines = regrow(server, environ, "env").splitlines()
        variables = dict(shlex.split(line)[1].split("=", 1) for line in lines)
        told = ToldCases(
            subprocess.Popen(
                [client, "-u", str(PROGRAMS / "checklist.py")],
                env=environ | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        yield told
        told.close()
    finally:
        regrow(server, environ, "down")


@pytest.mark.parametrize(
    "case",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in cases_of("checklist.py")
    ],
)
def test_across_versions(script: ToldCases, case: str) -> None:
    script.check(case)
