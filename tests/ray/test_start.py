"""`ray start` where a raylet may not come up at once."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rays import LONG, raylets_at, until

from regrow.errors import NoClusterError
from regrow.processes import ProcessStat, descendants_of, name_of
from regrow.ray import RayCluster
from regrow.ray.head import HeadEntry, RayHead

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


def environments_of(raylet: int) -> Path:
    """The directory for runtime environments of a raylet."""
    words = Path(f"/proc/{raylet}/cmdline").read_text()
    found = re.search(r"--runtime-env-dir=([^\s\0]+)", words)
    assert found
    return Path(found[1])


def test_a_raylet_finds_nothing_that_an_earlier_one_has_made_in_its_way(head: RayHead) -> None:
    words = f"--node-ip-address={ADDRESS}", "--include-log-monitor=false"
    try:
        head.start_node(*words, environ={"REGROW_TEST_RUN": ""})
        (first,) = raylets()
        made = environments_of(first) / "pip" / "hash" / "virtualenv"
        made.mkdir(parents=True)
        os.kill(first, signal.SIGKILL)
        until(lambda: not raylets())
        head.start_node(*words, environ={"REGROW_TEST_RUN": ""})
        (second,) = raylets()
        assert not (environments_of(second) / "pip" / "hash").exists()
        until(lambda: not made.exists())
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


def children_of(parent: int) -> list[int]:
    stats = {pid: ProcessStat.of(pid) for pid in descendants_of({parent})}
    return [pid for pid, stat in stats.items() if stat is not None and stat.parent == parent]


@pytest.fixture
def scratch() -> Iterator[Path]:
    """For Ray's sockets, whose paths must be short."""
    directory = Path(tempfile.mkdtemp(prefix="rgt-", dir="/tmp"))
    yield directory
    directory.rmdir()


def head_up(home: Path, scratch: Path) -> subprocess.Popen[bytes]:
    """A command that has begun to start a head."""
    words = ["ray", "head", "up", "--port", "0", "--dashboard-port", "0"]
    environ = {"REGROW_HOME": str(home), "TMPDIR": str(scratch)}
    command = subprocess.Popen([sys.executable, "-m", "regrow", *words], env=os.environ | environ)
    until(lambda: "gcs_server" in [name_of(pid) for pid in started_in(home)])
    return command


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_head_whose_start_is_ended_leaves_nothing(
    tmp_path: Path, scratch: Path, signum: int
) -> None:
    command = head_up(tmp_path, scratch)
    command.send_signal(signum)
    assert command.wait(LONG) == 128 + signum
    assert not started_in(tmp_path)


def test_a_head_whose_start_is_killed_leaves_nothing(tmp_path: Path, scratch: Path) -> None:
    command = head_up(tmp_path, scratch)
    command.kill()
    command.wait(LONG)
    until(lambda: not started_in(tmp_path) and not list(scratch.iterdir()))


def test_what_a_start_has_left_is_ended_by_the_next_command(tmp_path: Path, scratch: Path) -> None:
    command = head_up(tmp_path, scratch)
    (ray_start,) = children_of(command.pid)
    command.send_signal(signal.SIGSTOP)
    os.kill(ray_start, signal.SIGKILL)
    command.kill()
    command.wait(LONG)
    assert started_in(tmp_path)
    entry = HeadEntry(tmp_path)
    with pytest.raises(NoClusterError, match="is being started, or its start was killed"):
        entry.find()
    with pytest.raises(NoClusterError, match="no Ray head was started here"):
        entry.down()
    until(lambda: not started_in(tmp_path))


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
