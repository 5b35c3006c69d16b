from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from regrow.home import ClusterState, Home
from regrow.processes import ProcessStat, marked


class Commands:
    """The `regrow` command in a home of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.environ = {
            name: value for name, value in os.environ.items() if not name.startswith("REGROW_")
        } | {"REGROW_HOME": str(home)}

    def start(self, *arguments: str, **options) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "regrow", *arguments],
            env=self.environ,
            text=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options,
        )

    def __call__(self, *arguments: str, timeout_s: float = 90) -> subprocess.CompletedProcess:
        with self.start(*arguments) as process:
            output, errors = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(arguments, process.returncode, output, errors)

    def state(self, timeout_s: float = 30) -> ClusterState:
        """The state of the only cluster, once its head is known."""
        home = Home(self.home)
        states: list[ClusterState] = []

        def known() -> bool:
            states[:] = home.entries()
            return bool(states) and states[0].head is not None

        self.until(known, timeout_s)
        return states[0]

    @staticmethod
    def until(condition: Callable[[], object], timeout_s: float = 10) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.01)

    def pids(self, state: ClusterState) -> set[int]:
        """All processes of a cluster but its supervisor."""
        return {pid for pid in marked(state.run_id) if self.runs(pid)}

    @staticmethod
    def runs(pid: int) -> bool:
        stat = ProcessStat.of(pid)
        return stat is not None and stat.state not in "ZX"

    def nothing_left(self, pids: set[int] = frozenset(), timeout_s: float = 5) -> None:
        """Waits until neither processes nor files of a cluster are there."""
        self.until(lambda: not any(self.runs(pid) for pid in pids), timeout_s)
        self.until(lambda: not list(self.home.glob("clusters/*")), timeout_s)


@pytest.fixture
def regrow(tmp_path):
    commands = Commands(tmp_path / "home")
    yield commands
    for state in Home(commands.home).clusters():
        commands("down", "--cluster", state.name)
    commands.nothing_left()


@pytest.fixture
def one_line():
    """Checks that a command failed with one line, and returns what that says."""

    def check(result: subprocess.CompletedProcess, status: int) -> str:
        assert result.returncode == status, result.stderr
        # A slow machine may need, and tell of, some patience before.
        lines = [line for line in result.stderr.splitlines() if "still waiting for" not in line]
        assert len(lines) == 1, result.stderr
        assert lines[0].startswith("regrow: ")
        return lines[0].removeprefix("regrow: ")

    return check
