"""`ray start` where a raylet may not come up at once."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rays import LONG, raylets_at, until

from regrow.processes import name_of
from regrow.ray import RayCluster
from regrow.ray.head import RayHead

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ADDRESS = "127.62.0.1"


def raylets() -> set[int]:
    return set(raylets_at(ADDRESS))


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_raylet_that_is_lost_at_its_start_is_started_again(head: RayHead, signum: int) -> None:
    node = threading.Thread(
        target=head.start_node,
        args=(f"--node-ip-address={ADDRESS}", "--include-log-monitor=false"),
        kwargs={"environ": {"REGROW_TEST_RUN": ""}},
    )
    node.start()
    until(raylets)
    (first,) = raylets()
    os.kill(first, signum)
    node.join()
    try:
        (second,) = raylets()
        assert second != first
        nodes = [one.address for one in RayCluster(head.address).nodes()]
        assert nodes.count(ADDRESS) == 1
    finally:
        for pid in raylets():
            os.kill(pid, signal.SIGKILL)


def started_in(home: Path) -> list[int]:
    """Processes with a home."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"REGROW_HOME={home}\0".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_head_whose_start_is_ended_leaves_nothing(tmp_path: Path, signum: int) -> None:
    words = ["ray", "head", "up", "--port", "0", "--dashboard-port", "0"]
    command = subprocess.Popen(
        [sys.executable, "-m", "regrow", *words], env=os.environ | {"REGROW_HOME": str(tmp_path)}
    )
    until(lambda: "gcs_server" in [name_of(pid) for pid in started_in(tmp_path)])
    command.send_signal(signum)
    assert command.wait(LONG) == 128 + signum
    assert not started_in(tmp_path)


def test_a_node_without_a_head_holds_off_nobody(head: RayHead) -> None:
    """Ray would try for a quarter of an hour, in which no other raylet of this machine could start."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        lonely = f"127.0.0.1:{bound.getsockname()[1]}"
    start = [sys.executable, "-m", "regrow.ray.start", f"--address={lonely}"]
    words = (f"--node-ip-address={ADDRESS}", "--include-log-monitor=false")
    with subprocess.Popen(start, stderr=subprocess.PIPE, text=True) as started:
        head.start_node(*words, environ={"REGROW_TEST_RUN": ""})
        _, errors = started.communicate(timeout=LONG)
    for pid in raylets():
        os.kill(pid, signal.SIGKILL)
    assert started.returncode == 1
    assert errors.startswith(f"Error: no Ray head answers at {lonely}")
