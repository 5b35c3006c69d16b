"""What the tests of failures share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

CELLS_RUN = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def cells_run(request: pytest.FixtureRequest) -> list[str]:
    """The cells of the failure matrix that have been run, for the summary."""
    return request.config.stash.setdefault(CELLS_RUN, [])


@pytest.hookimpl
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    cells = config.stash.get(CELLS_RUN, [])
    if cells:
        from failure_matrix import CELLS

        text = f"failure matrix: {len(set(cells))} of {len(CELLS)} cells run"
        terminalreporter.write_line(text)
