"""`LocalCluster` with real slices."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import regrow
import regrow.elastic
from regrow import LocalCluster
from regrow.config import ClusterOptions
from regrow.errors import (
    ClusterError,
    ClusterStartError,
    NoClusterError,
    UsageError,
    WaitTimeout,
)
from regrow.home import Home
from regrow.processes import ProcessStat, is_running, marked
from regrow.start import start_cluster
from waiting import until


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory, monkeypatch):
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("REGROW_HOME", str(home))
    return home


def left(home: Path) -> list[str]:
    """What a home holds beside what it may keep: its lock and the compile cache."""
    return [path.name for path in home.glob("clusters/*")]


def pids_of(cluster: LocalCluster) -> set[int]:
    """All processes of a cluster."""
    pids = marked(cluster._supervisor.state.run_id)
    assert {cluster.head_pid, *(pid for one in cluster.slices for pid in one.pids)} <= pids
    return pids


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with LocalCluster(
        2, 4, hosts_per_slice=2, home=tmp_path_factory.mktemp("shared"), hang_after_s=1.0
    ) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared):
    """Two slices of two hosts with two devices each; all up."""
    for one in shared.slices:
        if one.state == "lost":
            shared.restore(one.index)
    shared.wait_healthy(30)
    return shared


def test_what_it_tells_of_itself(cluster):
    first, second = cluster.slices
    assert (first.index, second.index) == (0, 1)
    assert first.state == second.state == "up"
    assert [host.index for host in first.hosts] == [0, 1]
    assert len({*first.pids, *second.pids}) == 4
    assert all(is_running(pid) for pid in first.pids)
    assert any("up after" in line for line in first.story)
    assert cluster.target == cluster.env["JAX_BACKEND_TARGET"]
    assert cluster.target.startswith("grpc://unix:/")
    assert cluster.env["JAX_PLATFORMS"] == "proxy,cpu"
    assert cluster.tcp_target is cluster.token is None
    assert repr(cluster) == "LocalCluster(slices=2, devices_per_slice=4, name='local-1')"
    assert json.dumps(cluster.status())


def test_stock_jax_sees_its_devices(cluster):
    code = "import jax; print([(d.id, d.slice_index) for d in jax.devices()])"
    told = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | cluster.env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    expected = [(number, number // 4) for number in range(8)]
    assert told.stdout.strip() == str(expected), told.stderr
    cluster.wait_client(1)


def test_a_killed_slice_is_lost_until_it_is_restored(cluster):
    before = cluster.slices
    cluster.kill(1)
    first, second = cluster.slices
    assert first == before[0] or first.pids == before[0].pids
    assert second.state == "lost"
    assert second.incarnation == before[1].incarnation
    until(lambda: not any(is_running(pid) for pid in before[1].pids))
    with pytest.raises(WaitTimeout, match=r"1 of 2 slices are up; missing: slice 1 \(lost"):
        cluster.wait_healthy(0.3)
    with pytest.raises(ClusterError, match="slice 1 is lost"):
        cluster.kill(1)
    cluster.restore(1)
    cluster.wait_healthy(30)
    second = cluster.slices[1]
    assert second.state == "up"
    assert second.incarnation == before[1].incarnation + 1
    assert not set(second.pids) & set(before[1].pids)


def test_the_loss_of_one_host_is_the_loss_of_its_slice(cluster):
    before = cluster.slices[0]
    os.kill(before.pids[1], signal.SIGKILL)
    until(lambda: cluster.slices[0].state == "lost")
    until(lambda: not any(is_running(pid) for pid in before.pids))
    assert cluster.slices[1].state == "up"


def test_a_slice_that_is_stopped_for_a_moment_lives_on(cluster):
    before = cluster.slices[0]
    cluster.stop(0)
    until(lambda: all(ProcessStat.of(pid).state == "T" for pid in before.pids))
    cluster.cont(0)
    time.sleep(1.2)
    after = cluster.slices[0]
    assert after.state == "up"
    assert after.pids == before.pids


def test_a_slice_that_was_lost_while_stopped_does_not_revive(cluster):
    before = cluster.slices[1]
    cluster.stop(1)
    until(lambda: cluster.slices[1].state == "lost")
    with pytest.raises(ClusterError, match="fenced; cont does not revive it"):
        cluster.cont(1)
    until(lambda: not any(is_running(pid) for pid in before.pids))
    assert cluster.slices[1].incarnation == before.incarnation


@pytest.mark.parametrize("method", ["kill", "stop", "cont", "restore"])
def test_a_slice_that_is_not_there(cluster, method):
    with pytest.raises(UsageError, match="there is no slice 7; the cluster has 2"):
        getattr(cluster, method)(7)


def test_there_is_nothing_to_restore(cluster):
    with pytest.raises(ClusterError, match="nothing to restore"):
        cluster.restore(0)


def test_threads_may_use_it_at_once(cluster):
    waiting = threading.Thread(target=cluster.wait_healthy, args=(30,))
    cluster.kill(0)
    waiting.start()
    cluster.restore(0)
    waiting.join(30)
    assert not waiting.is_alive()
    assert cluster.slices[0].state == "up"


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_a_fork_of_the_owner_does_not_end_it(cluster):
    pid = os.fork()
    if pid == 0:
        cluster.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert cluster.slices[0].state == "up"


def test_many_in_one_process_and_nothing_left(own_home):
    threads = threading.active_count()
    for _ in range(2):
        cluster = LocalCluster(1, 1)
        assert cluster.name == "local-1"
        pids = pids_of(cluster)
        assert left(own_home) == ["local-1"]
        files = len(list(Path("/proc/self/fd").iterdir()))
        cluster.close()
        assert len(list(Path("/proc/self/fd").iterdir())) < files
        cluster.close()
        assert not any(is_running(pid) for pid in pids)
        assert left(own_home) == []
        with pytest.raises(NoClusterError, match="is closed"):
            cluster.kill(0)
        with pytest.raises(NoClusterError, match="is closed"), cluster:
            raise AssertionError("a closed cluster was entered")
    until(lambda: threading.active_count() <= threads)


def test_one_that_is_garbage_ends(own_home):
    pids = pids_of(LocalCluster(1, 1))
    gc.collect()
    assert not any(is_running(pid) for pid in pids)
    assert left(own_home) == []


def test_the_death_of_the_head_leaves_nothing(own_home):
    cluster = LocalCluster(1, 1)
    pids = pids_of(cluster)
    cluster.stop(0)
    os.kill(cluster.head_pid, signal.SIGKILL)
    until(lambda: not any(is_running(pid) for pid in pids))
    until(lambda: not left(own_home))
    with pytest.raises(ClusterError, match=r"head of cluster local-1 has died: SIGKILL"):
        cluster.kill(0)
    cluster.close()


OWNER = """
import os, sys, time
from regrow import LocalCluster
from regrow.processes import marked
cluster = LocalCluster(1, 1)
if len(sys.argv) > 1 and os.fork() == 0:
    time.sleep(60)  # a fork that outlives its parent keeps the parent's end of every pipe
print(*marked(cluster._supervisor.state.run_id), flush=True)
if len(sys.argv) > 1:
    time.sleep(60)
"""


def start_owner(*arguments: str) -> tuple[subprocess.Popen, list[int]]:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    pids = [int(word) for word in owner.stdout.readline().split()]
    assert len(pids) >= 3
    return owner, pids


def test_the_end_of_the_interpreter_leaves_nothing(own_home):
    owner, pids = start_owner()
    with owner:
        assert owner.wait(30) == 0
    assert not any(is_running(pid) for pid in pids)
    assert left(own_home) == []


def test_the_death_of_the_owner_leaves_nothing(own_home):
    owner, pids = start_owner("stay")
    try:
        owner.kill()
        owner.wait(5)
        until(lambda: not any(is_running(pid) for pid in pids))
        until(lambda: not left(own_home))
    finally:
        os.killpg(owner.pid, signal.SIGKILL)
        owner.stdout.close()


def test_a_cluster_that_cannot_start_is_one_clear_error(own_home):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ClusterStartError, match=f"{port} .*in use"):
            LocalCluster(1, 1, port=port)
    assert left(own_home) == []


def test_slices_that_cannot_start_are_one_clear_error(own_home, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    with pytest.raises(ClusterStartError, match=r"slice 0 failed 3 times to start: .*no_such_flag"):
        LocalCluster(1, 1)
    assert left(own_home) == []


def test_a_start_has_a_deadline(own_home):
    with pytest.raises(ClusterStartError, match=r"waited 0\.\d+ s for "):
        LocalCluster(1, 1, start_timeout_s=0.2)
    assert left(own_home) == []


def test_public_names():
    for package in (regrow, regrow.elastic):
        assert set(package.__all__) <= set(dir(package))
        with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute"):
            _ = package.nothing


def test_wrong_options_start_nothing(own_home):
    with pytest.raises(UsageError, match="slices is 0"):
        LocalCluster(slices=0)
    with pytest.raises(TypeError, match=r"LocalCluster has no argument 'colour'$"):
        LocalCluster(colour="red")
    with pytest.raises(
        TypeError, match="no argument 'restore_after_s'; did you mean 'restore_after'"
    ):
        LocalCluster(restore_after_s=1.0)
    for wrong in ({"host": "0.0.0.0"}, {"allow_no_token": True}):
        with pytest.raises(UsageError, match=r"say --port \(port=\), too"):
            LocalCluster(**wrong)
    with pytest.raises(UsageError, match="cannot be the name"):
        LocalCluster(name="a/b")
    with pytest.raises(UsageError, match="'1' is no timeout"):
        LocalCluster(start_timeout_s="1")
    assert left(own_home) == []


@pytest.mark.parametrize("timeout_s", ["5", -1, float("nan"), float("inf"), True])
def test_what_is_no_timeout_is_refused(cluster, timeout_s):
    for wait in (cluster.wait_healthy, cluster.wait_client):
        with pytest.raises(UsageError, match="is no timeout"):
            wait(timeout_s)


def test_a_name_that_is_taken(own_home):
    home = Home(own_home)
    with (
        start_cluster(ClusterOptions(slices=1), home=home, name="mine"),
        pytest.raises(ClusterStartError, match="'mine' runs already"),
    ):
        LocalCluster(name="mine")
    assert left(own_home) == []
