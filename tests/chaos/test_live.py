"""Faults on a real cluster, whose moments this process chooses."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from regrow import LocalCluster
from regrow.chaos import Chaos
from regrow.control import ControlConnection, request
from regrow.errors import UsageError, WaitTimeout
from regrow.processes import ProcessStat
from waiting import until

HANG_AFTER_S = 2.0
WAIT_S = 20.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    home = tmp_path_factory.mktemp("home")
    with LocalCluster(2, 1, home=home, hang_after_s=HANG_AFTER_S, reconnect_s=1.0) as one:
        yield one


@pytest.fixture
def cluster(shared: LocalCluster) -> LocalCluster:
    """Two slices of one device, both up."""
    for one in shared.slices:
        if one.state == "lost":
            shared.restore(one.index)
    shared.wait_healthy(30)
    return shared


def say(cluster: LocalCluster, **progress: object) -> None:
    """Says what a client would say."""
    request(cluster.config.control_socket, "progress", **progress)


def state(cluster: LocalCluster, index: int) -> str:
    return cluster.slices[index].state


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("kill", "SIGKILL"),
        ("term", "SIGTERM"),
        ("segv", "SIGSEGV"),
        ("exit", "exit status 1"),
        ("oom", "SIGABRT"),
        ("stop", "no heartbeat"),
        ("cutlink", "no connection"),
    ],
)
def test_faults_that_lose_a_slice(cluster: LocalCluster, fault: str, cause: str) -> None:
    other = cluster.slices[0].pids
    with Chaos(cluster, f"{fault}:1@phase=load") as chaos:
        say(cluster, step=1, phase="step")
        assert not chaos.done
        say(cluster, phase="load")
        chaos.wait(WAIT_S)
        until(lambda: state(cluster, 1) == "lost")
        # A slice that returns is free of it.
        cluster.restore(1)
        cluster.wait_healthy(WAIT_S)
    assert [event.fault for event in chaos.done] == [fault]
    assert not chaos.refused
    one = cluster.slices[1]
    assert any(cause in line for line in one.story), one.story
    assert cluster.slices[0].pids == other
    # The link is as before.
    time.sleep(0.2)
    cluster.wait_healthy(WAIT_S)


@pytest.mark.parametrize("fault", ["lostreply", "slowlink", "diskfull", "clockjump"])
def test_faults_that_lose_nothing(cluster: LocalCluster, fault: str) -> None:
    before = [one.pids for one in cluster.slices]
    with Chaos(cluster, f"{fault}:1@step=3,mend:1@step=4") as chaos:
        say(cluster, step=3)
        until(lambda: chaos.done)
        time.sleep(HANG_AFTER_S)
        until(lambda: ProcessStat.of(cluster.head_pid).state != "T")
        say(cluster, step=4)
        chaos.wait(WAIT_S)
    assert [event.fault for event in chaos.done] == [fault, "mend"]
    cluster.wait_healthy(WAIT_S)
    assert [one.pids for one in cluster.slices] == before


def test_a_short_cut_is_no_loss(cluster: LocalCluster) -> None:
    before = [one.pids for one in cluster.slices]
    with Chaos(cluster, "cutlink:1@step=1,mend:1@step=1+300ms") as chaos:
        say(cluster, step=1)
        chaos.wait(WAIT_S)
        cluster.wait_healthy(WAIT_S)
    assert [one.pids for one in cluster.slices] == before


def test_a_second_fault_in_the_recovery(cluster: LocalCluster) -> None:
    with Chaos(cluster, "kill:0@recovery=1+50ms") as chaos:
        cluster.kill(1)
        chaos.wait(WAIT_S)
        until(lambda: state(cluster, 0) == "lost")


def test_times_count_from_the_client(cluster: LocalCluster) -> None:
    with Chaos(cluster, "stop:1@0s,cont:1@0.1s") as chaos:
        with pytest.raises(WaitTimeout, match=r"the moment of these faults: stop:1@0\.0s, cont:1@"):
            chaos.wait(0.1)
        code = "import jax, sys; jax.devices(); sys.stdin.read()"
        client = subprocess.Popen(
            [sys.executable, "-c", code], env=os.environ | cluster.env, stdin=subprocess.PIPE
        )
        try:
            chaos.wait(60)
            assert [event.fault for event in chaos.done] == ["stop", "cont"]
            with Chaos(cluster, "stop:1@0s,cont:1@0.1s") as later:
                later.wait(WAIT_S)
        finally:
            client.communicate(timeout=20)


def test_what_cannot_be_done_now_is_told(cluster: LocalCluster) -> None:
    cluster.kill(1)
    spec = ",".join(f"{fault}:1@step=1" for fault in ("kill", "term", "cutlink", "mend"))
    with Chaos(cluster, f"{spec},restore:0@step=1") as chaos:
        say(cluster, step=1)
        until(lambda: len(chaos.refused) == 5)
    assert not chaos.done
    assert {str(event.fault) for event, _ in chaos.refused} == {
        "kill",
        "term",
        "cutlink",
        "mend",
        "restore",
    }


def test_the_end_of_the_block_ends_what_lasts(cluster: LocalCluster) -> None:
    with Chaos(cluster, "clockjump:1@step=1,slowlink:0@step=1") as chaos:
        say(cluster, step=1)
        until(lambda: len(chaos.done) == 2)
    pids = [cluster.head_pid, *cluster.slices[1].pids]
    assert not any(ProcessStat.of(pid).state == "T" for pid in pids)
    cluster.wait_healthy(WAIT_S)
    sockets = {path.name for path in Path(cluster.config.socket_dir).glob("*.sock")}
    assert "direct.sock" not in sockets


def test_a_block_without_its_moments_ends_at_once(cluster: LocalCluster) -> None:
    with Chaos(cluster, "kill:1@phase=load,kill:0@step=9") as chaos:
        pass
    assert len(chaos.left) == 2
    assert [one.state for one in cluster.slices] == ["up", "up"]


def test_what_is_no_schedule_of_this_cluster(cluster: LocalCluster) -> None:
    with pytest.raises(UsageError, match="there is no slice 2; allowed: 0 to 1"):
        Chaos(cluster, "kill:2@1s")


@pytest.mark.parametrize(
    ("method", "params", "text"),
    [
        ("wait_phase", {"phase": "lunch", "index": 0}, "there is no phase 'lunch'"),
        ("wait_phase", {"phase": "load"}, "None is no index of a slice"),
        ("wait_step", {"step": -1}, "-1 is no step"),
        ("fault", {"index": 0, "fault": "flood"}, "there is no fault 'flood'"),
        ("fault", {"index": 9, "fault": "term"}, "there is no slice 9"),
    ],
)
def test_control_requests_that_make_no_sense(
    cluster: LocalCluster, method: str, params: dict[str, object], text: str
) -> None:
    with ControlConnection(cluster.config.control_socket) as control:
        number = control.send(method, **params)  # type: ignore[arg-type]
        answers: list[dict] = []
        until(lambda: answers.extend(control.take()[1]) or answers)
    assert answers[0]["id"] == number
    assert text in answers[0]["error"]["message"]
