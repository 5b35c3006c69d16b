from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from regrow.cli import main
from regrow.cloud.defaults import Defaults
from regrow.home import ClusterState, Home
from regrow.processes import is_running, marked
from waiting import until


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

        until(known, timeout_s=timeout_s)
        return states[0]

    def pids(self, state: ClusterState) -> set[int]:
        """All processes of a cluster but its supervisor."""
        return {pid for pid in marked(state.run_id) if is_running(pid)}

    def nothing_left(self, pids: set[int] = frozenset(), timeout_s: float = 5) -> None:
        """Waits until neither processes nor files of a cluster are there."""
        until(lambda: not any(is_running(pid) for pid in pids), timeout_s=timeout_s)
        until(lambda: not list(self.home.glob("clusters/*")), timeout_s=timeout_s)


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


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a command has printed and how it has ended."""

    returncode: int
    stdout: str
    stderr: str


class Tpu:
    """Commands run in this process, against a local Cloud TPU in a home of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.capfd: pytest.CaptureFixture[str]
        self.commands = Commands(home)

    def __call__(self, *arguments: str) -> Answer:
        self.capfd.readouterr()
        status = main(arguments)
        output, errors = self.capfd.readouterr()
        return Answer(status, output, errors)

    def good(self, *arguments: str) -> str:
        answer = self(*arguments)
        assert answer.returncode == 0, answer.stderr
        return answer.stdout

    def admin(self, *arguments: str) -> None:
        self.good("cloud", *arguments)

    def create(self, name: str, *arguments: str, shape: str = "v4-16") -> Answer:
        node = () if "--node-count" in arguments else ("--node-id", f"{name}-node")
        flags = ("--accelerator-type", shape, "--runtime-version", "tpu-ubuntu2204-base")
        return self("queued-resources", "create", name, *flags, *node, *arguments)

    def state(self, name: str) -> str:
        form = "value(state.state)"
        return self("queued-resources", "describe", name, "--format", form).stdout.strip()


def _clouds(home: Path, *options: str) -> Iterator[Tpu]:
    tpu = Tpu(home)
    up = tpu.commands("cloud", "up", "--detach", "--port", "0", "--notice", "0.1", *options)
    assert up.returncode == 0, up.stderr
    defaults = Defaults(home)
    defaults.set("project", "p")
    defaults.set("zone", "us-central2-b")
    yield tpu
    assert tpu.commands("cloud", "down").returncode == 0


@pytest.fixture(scope="session")
def _simulated_cloud(tmp_path_factory):
    yield from _clouds(tmp_path_factory.mktemp("simulated"), "--simulate")


@pytest.fixture(scope="module")
def _real_cloud(tmp_path_factory):
    yield from _clouds(tmp_path_factory.mktemp("real"), "--stop", "1")


def _in_home(tpu: Tpu, monkeypatch, capfd) -> Tpu:
    for name in [name for name in os.environ if name.startswith("REGROW_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("REGROW_HOME", str(tpu.home))
    tpu.capfd = capfd
    return tpu


@pytest.fixture
def simulated_tpu(_simulated_cloud, monkeypatch, capfd):
    """Commands against slices without processes; what a test leaves is deleted."""
    tpu = _in_home(_simulated_cloud, monkeypatch, capfd)
    yield tpu
    for name in tpu.good("queued-resources", "list", "--format", "value(NAME)").split():
        tpu.good("queued-resources", "delete", name, "--force", "--quiet")


@pytest.fixture
def real_tpu(_real_cloud, monkeypatch, capfd):
    """Commands against slices of processes."""
    return _in_home(_real_cloud, monkeypatch, capfd)
