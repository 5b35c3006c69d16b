"""What the tests of elastic training share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import regrow

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1] / "runtime"))

from elastic_cases import Program, chosen_cases


@pytest.fixture(scope="module")
def start(
    request: pytest.FixtureRequest,
) -> Iterator[Callable[[regrow.LocalCluster, str], Program]]:
    """Starts a program; it is ended with the module."""
    programs: list[Program] = []

    def start_program(cluster: regrow.LocalCluster, name: str) -> Program:
        programs.append(Program(cluster, name, chosen_cases(request)))
        return programs[-1]

    yield start_program
    for program in programs:
        program.close()
