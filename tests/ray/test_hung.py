"""Processes that are stopped are found to hang; those that go on in time are not."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
from rays import until

from regrow.processes import ProcessStat
from regrow.ray.hung import LOOKS, Hung


@pytest.fixture
def process() -> Iterator[int]:
    with subprocess.Popen(["sleep", "1000"]) as started:
        yield started.pid
        started.kill()


def in_state(pid: int, *states: str) -> None:
    def is_in_state() -> bool:
        stat = ProcessStat.of(pid)
        return stat is not None and stat.state in states

    until(is_in_state)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    in_state(pid, "T")


def test_a_process_that_stays_stopped_hangs(process: int) -> None:
    hung = Hung([os.getpid(), process])
    stop(process)
    assert [hung.look() for _ in range(LOOKS)] == [None] * (LOOKS - 1) + [process]


def test_one_that_goes_on_gets_its_time_anew(process: int) -> None:
    hung = Hung([process])
    for _ in range(2):
        stop(process)
        assert [hung.look() for _ in range(LOOKS - 1)] == [None] * (LOOKS - 1)
        os.kill(process, signal.SIGCONT)
        in_state(process, "S", "R")
        assert hung.look() is None


def test_one_that_has_ended_does_not_hang(process: int) -> None:
    hung = Hung([process])
    os.kill(process, signal.SIGKILL)
    in_state(process, "Z")
    assert [hung.look() for _ in range(LOOKS + 1)] == [None] * (LOOKS + 1)
