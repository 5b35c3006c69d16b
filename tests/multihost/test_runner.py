"""Runs over ssh, with a program called ssh that has each address be a directory of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from regrow.cloud.remote.sessions import SshShell
from regrow.cloud.remote.targets import Host
from regrow.multihost import runner
from regrow.multihost.package import packed
from regrow.multihost.targets import is_this_machine
from regrow.processes import is_running
from waiting import until

# As sshd does, it gives the command a home directory, and does not end it when the client is killed.
FAKE = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
[ -e {root}/refuse-$1 ] && rm {root}/refuse-$1 && exit 255
mkdir -p {root}/$1 && cd {root}/$1 && HOME=$PWD setsid --wait sh -c "$2"
"""


class Screen:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, bytes]] = []
        self.results: list = []

    def phase(self, name, hosts) -> None:
        self.name = name

    def line(self, host, stream, line) -> None:
        self.lines.append((host.label, line))

    def ended(self, result) -> None:
        self.results.append(result)

    def tick(self) -> None:
        pass


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(FAKE.format(root=tmp_path))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(runner, "_SSH_PAUSE_S", 0.01)
    # Who holds the devices of this machine is no business of a test.
    monkeypatch.setattr(runner.scripts, "DEVICES", ())
    return [Host(f"q-{s}", s, w, f"host-{s}-{w}") for s in (0, 1) for w in (0, 1)]


def run(hosts, tmp_path, command: str, package=None) -> runner.Run:
    shell = SshShell(internal=True)
    return runner.Run(hosts, shell, "r", command, package, tmp_path / "logs")


def test_copies_runs_and_keeps_every_log(hosts, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "x").write_text("content")
    # It is tried again.
    (tmp_path / "refuse-host-1-0").touch()
    screen = Screen()
    with packed(folder) as package:
        one = run(hosts, tmp_path, "cat x; basename $(dirname $PWD)", package)
        assert [result.status for result in one.prepare(screen)] == [0] * 4
        assert [result.status for result in one.execute(screen)] == [0] * 4
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert logs == {
        f"q-{s}-worker-{w}.log": f"contenthost-{s}-{w}\n" for s in (0, 1) for w in (0, 1)
    }


def test_the_first_failure_ends_all(hosts, tmp_path):
    for host in hosts:
        (tmp_path / host.address / "r").mkdir(parents=True)
    screen = Screen()
    command = "case $PWD in */host-1-1/r) sleep 1; exit 7; esac; echo $$; setsid sleep 600 & wait"
    one = run(hosts, tmp_path, command)
    results = one.execute(screen)
    assert [result.status for result in results if not result.stopped] == [7]
    assert [result.stopped for result in results] == [True, True, True, False]
    assert [result.status for result in one.sweep(screen)] == [0] * 4
    pids = [int(line) for _, line in screen.lines if line.strip().isdigit()]
    assert len(pids) == 3
    assert not any(is_running(pid) for pid in pids)


def test_a_runner_that_is_killed_takes_all_along(hosts, tmp_path):
    for host in hosts:
        (tmp_path / host.address / "r").mkdir(parents=True)
    program = (
        "import sys; sys.path[:0] = [sys.argv[1], sys.argv[1] + '/..']\n"
        "from pathlib import Path; from test_runner import *\n"
        "hosts = [Host('q-0', 0, w, f'host-0-{w}') for w in (0, 1)]\n"
        "class Printing(Screen):\n"
        "    def line(self, host, stream, line): print(line.decode(), end='', flush=True)\n"
        "run(hosts, Path(sys.argv[2]), 'echo $$; sleep 600').execute(Printing())\n"
    )
    argv = [sys.executable, "-c", program, str(Path(__file__).parent), str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        pids = [int(process.stdout.readline()) for _ in range(2)]
        assert all(is_running(pid) for pid in pids)
        process.send_signal(signal.SIGKILL)
    until(lambda: not any(is_running(pid) for pid in pids))


def test_this_machine_is_told_from_others(monkeypatch):
    here = Host("q-0", 0, 0, "127.0.0.1")
    assert is_this_machine(here)
    other = Host("q-0", 0, 0, "127.70.0.3")
    monkeypatch.delenv("GCE_METADATA_IP", raising=False)
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    assert not is_this_machine(other)
    monkeypatch.setenv("GCE_METADATA_IP", "127.70.0.3:8480")
    assert is_this_machine(other)
    assert not is_this_machine(Host("q-0", 0, 0, "192.0.2.77"))
