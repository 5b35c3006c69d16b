"""Ray's supervisor of a job that has ended, below a raylet that hangs; here others stand for both."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from regrow.processes import is_running
from regrow.ray import leaving
from waiting import until

RANK = "from regrow.ray.leaving import see_supervisor_end; input(); see_supervisor_end()"
SUPERVISOR = f"""
import os, subprocess, sys, time
print(os.getpid(), flush=True)
subprocess.run([sys.executable, "-c", {RANK!r}])
print("the rank has ended", flush=True)
time.sleep(1000)
"""
RAYLET = f"""
import subprocess, sys
from regrow.processes import set_name
set_name("raylet")
subprocess.run([sys.executable, "-c", {SUPERVISOR!r}])
"""


class Tree:
    """What stands for a raylet, and below it a supervisor, which has no end, and a rank."""

    def __init__(self) -> None:
        self.raylet = subprocess.Popen(
            [sys.executable, "-c", RAYLET], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.supervisor = int(self._said())

    def _said(self) -> str:
        assert self.raylet.stdout is not None
        return self.raylet.stdout.readline()

    def end_rank(self) -> None:
        assert self.raylet.stdin is not None
        self.raylet.stdin.write("\n")
        self.raylet.stdin.flush()
        assert self._said() == "the rank has ended\n"

    def end(self) -> None:
        self.raylet.kill()
        with suppress(ProcessLookupError):
            os.kill(self.supervisor, signal.SIGKILL)
        self.raylet.communicate()


@pytest.fixture
def tree() -> Iterator[Tree]:
    tree = Tree()
    yield tree
    tree.end()


def test_a_supervisor_below_a_raylet_that_hangs_is_ended(tree: Tree) -> None:
    os.kill(tree.raylet.pid, signal.SIGSTOP)
    tree.end_rank()
    until(lambda: not is_running(tree.supervisor))


def test_a_supervisor_below_a_raylet_that_runs_is_left_alone(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "LOOK_S", 0.01)
    descriptor = os.pidfd_open(tree.supervisor)
    try:
        leaving._see_end(descriptor, tree.raylet.pid)
    finally:
        os.close(descriptor)
    assert is_running(tree.supervisor)
