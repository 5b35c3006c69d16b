"""Regrow's slices on a Ray cluster of several raylets, of which one is killed and comes back."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rays import LONG, raylet_at, until

from regrow import LocalCluster
from regrow.config import RayConfig
from regrow.errors import ClusterStartError
from regrow.processes import RUN_MARK, ProcessStat, ancestor
from regrow.ray.head import RayHead

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NODES = ("127.61.0.1", "127.61.0.2")


def start_node(head: RayHead, address: str, *options: str, resource: str = "tpu_host") -> None:
    """Starts a node that stays until the head is ended, whichever test has started it."""
    head.start_node(
        f"--node-ip-address={address}",
        "--num-cpus=1",
        f'--resources={{"{resource}": 1}}',
        "--include-log-monitor=false",
        *options,
        environ={"REGROW_TEST_RUN": ""},
    )


@pytest.fixture(scope="module")
def two_nodes(head: RayHead) -> RayHead:
    for address in NODES:
        start_node(head, address)
    return head


@pytest.fixture
def cluster(two_nodes: RayHead) -> Iterator[LocalCluster]:
    ray = RayConfig(two_nodes.address, {"tpu_host": 1})
    with LocalCluster(2, 2, restore_after=0.5, ray=ray, start_timeout_s=LONG) as cluster:
        yield cluster


SUM = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
mesh = Mesh(np.array(jax.devices()), ("x",))
x = jax.device_put(np.arange(8.0), NamedSharding(mesh, PartitionSpec("x")))
print(jax.jit(lambda x: x.sum())(x))
"""


def total(cluster: LocalCluster) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SUM],
        env=os.environ | cluster.env,
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_slices_survive_the_death_of_a_node_and_return_with_it(
    cluster: LocalCluster, two_nodes: RayHead
) -> None:
    assert total(cluster) == "28.0"
    pids = [one.pids[0] for one in cluster.slices]
    homes = {ancestor(pid, "raylet"): index for index, pid in enumerate(pids)}
    nodes = {address: raylet_at(address) for address in NODES}
    assert set(homes) == set(nodes.values()), "a slice each"
    lost = next(address for address, raylet in nodes.items() if homes[raylet] == 1)
    os.kill(nodes[lost], signal.SIGKILL)
    until(lambda: cluster.slices[1].state != "up")
    until(lambda: not Path(f"/proc/{pids[1]}").exists())
    assert cluster.slices[0].pids == (pids[0],), "the other one goes on"
    start_node(two_nodes, lost)
    cluster.wait_healthy(LONG)
    assert total(cluster) == "28.0"
    assert ancestor(cluster.slices[1].pids[0], "raylet") == raylet_at(lost)


def test_faults_of_slices_are_what_they_are_on_one_machine(cluster: LocalCluster) -> None:
    cluster.kill(0)
    story = "\n".join(cluster.slices[0].story)
    assert "was ended by SIGKILL" in story
    cluster.wait_healthy(LONG)
    cluster.stop(1)
    until(lambda: cluster.slices[1].state == "lost" or cluster.slices[1].incarnation > 1)
    cluster.wait_healthy(LONG)
    assert total(cluster) == "28.0"


def test_the_bridge_is_killed_and_slices_come_back(cluster: LocalCluster) -> None:
    bridge = next(
        int(entry.name)
        for entry in Path("/proc").glob("[0-9]*")
        if _is_bridge(entry, cluster.head_pid)
    )
    os.kill(bridge, signal.SIGKILL)
    until(lambda: any(one.incarnation > 1 for one in cluster.slices))
    cluster.wait_healthy(LONG)
    assert total(cluster) == "28.0"


def _is_bridge(entry: Path, parent: int) -> bool:
    try:
        words = (entry / "cmdline").read_bytes()
        stat = (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return b"regrow.ray.bridge" in words and int(stat[1]) == parent


def test_a_resource_that_nobody_has(two_nodes: RayHead) -> None:
    ray = RayConfig(two_nodes.address, {"unheard_of": 1})
    with pytest.raises(
        ClusterStartError, match=r"needs a node with .*unheard_of.*only 0 of the \d"
    ):
        LocalCluster(1, 1, restore_after=0.1, ray=ray, start_timeout_s=LONG)


def test_a_resource_that_others_use(cluster: LocalCluster, two_nodes: RayHead) -> None:
    ray = RayConfig(two_nodes.address, {"tpu_host": 1})
    told = r"waits for a node with .*; the Ray cluster has \{\"tpu_host\": \d\}, of which .* 0\} is"
    # Long before a start is given up; on a busy machine the bridge alone may take longer than the first.
    for timeout_s in (10, 20, 40):
        with pytest.raises(ClusterStartError) as error:
            LocalCluster(1, 1, restore_after=0.1, ray=ray, start_timeout_s=timeout_s)
        if found := re.search(told, str(error.value)):
            break
    assert found, error.value


def test_no_ray_head() -> None:
    ray = RayConfig("127.0.0.1:1", {"CPU": 1})
    with pytest.raises(ClusterStartError, match=r"no Ray head answers at 127\.0\.0\.1:1 "):
        LocalCluster(1, 1, restore_after=0.1, ray=ray, start_timeout_s=LONG)


def test_a_lost_slice_takes_over_a_spare_that_is_warm(two_nodes: RayHead) -> None:
    start_node(two_nodes, "127.61.0.3")
    ray = RayConfig(two_nodes.address, {"tpu_host": 1}, spares=1)
    with LocalCluster(2, 2, restore_after=0.2, ray=ray, start_timeout_s=LONG) as cluster:
        until(lambda: _waiting(two_nodes))
        (warm,) = _waiting(two_nodes)
        cluster.kill(0)
        cluster.wait_healthy(LONG)
        assert cluster.slices[0].pids == (warm,)
        assert total(cluster) == "28.0"
        until(lambda: _waiting(two_nodes))
        (warm,) = _waiting(two_nodes)
        stat = ProcessStat.of(warm)
        assert stat is not None
        os.kill(stat.parent, signal.SIGKILL)
        until(lambda: set(_waiting(two_nodes)) - {warm})


def test_each_slice_is_on_a_tpu_slice_of_its_own(head: RayHead) -> None:
    for address, name in (("127.61.0.5", "a"), ("127.61.0.6", "b")):
        label = f"--labels=ray.io/tpu-slice-name={name}"
        start_node(head, address, label, resource="labelled")
    ray = RayConfig(head.address, {"labelled": 1})
    with LocalCluster(2, 2, restore_after=0.5, ray=ray, start_timeout_s=LONG) as cluster:
        assert total(cluster) == "28.0"
        assert [one.incarnation for one in cluster.slices] == [1, 1]


def _waiting(head: RayHead) -> list[int]:
    """Workers on nodes of a head that are not yet told what they are: then they have another name."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            name = (entry / "comm").read_text().strip()
        except OSError:
            continue
        if b"regrow.ray.worker_process" in words and not name.startswith("rg-s"):
            raylet = ancestor(int(entry.name), "raylet")
            if raylet and head.temp_dir in Path(f"/proc/{raylet}/cmdline").read_text():
                found.append(int(entry.name))
    return found


# --- hosts that may be on other machines ---


@pytest.fixture
def far(two_nodes: RayHead) -> Iterator[LocalCluster]:
    ray = RayConfig(two_nodes.address, {"tpu_host": 1}, other_machines=True)
    with LocalCluster(2, 2, restore_after=0.5, ray=ray, start_timeout_s=LONG) as cluster:
        yield cluster


def test_hosts_that_share_nothing_with_the_head(far: LocalCluster, two_nodes: RayHead) -> None:
    assert total(far) == "28.0"
    for one in far.slices:
        environ = Path(f"/proc/{one.pids[0]}/environ").read_bytes()
        assert f"{RUN_MARK}={two_nodes.run_id}".encode() in environ, "that of its node"
        assert not _unix_sockets(one.pids[0]), "over TCP"
    far.kill(0)
    assert "was ended by SIGKILL" in "\n".join(far.slices[0].story)
    far.wait_healthy(LONG)
    far.stop(1)
    until(lambda: far.slices[1].state == "lost" or far.slices[1].incarnation > 1)
    far.wait_healthy(LONG)
    assert total(far) == "28.0"


def _unix_sockets(pid: int) -> list[str]:
    """Paths of the Unix sockets that a process is connected by."""
    inodes = {
        target[8:-1]
        for entry in Path(f"/proc/{pid}/fd").iterdir()
        if (target := _target(entry)).startswith("socket:[")
    }
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    return [line for line in lines if line.split()[6] in inodes and len(line.split()) > 7]


def _target(entry: Path) -> str:
    try:
        return os.readlink(entry)
    except OSError:
        return ""


def test_a_node_with_another_jax_is_refused_in_one_line(head: RayHead, tmp_path: Path) -> None:
    other = tmp_path / "jax-0.0.1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: jax\nVersion: 0.0.1\n")
    head.start_node(
        "--node-ip-address=127.61.0.9",
        '--resources={"old_host": 1}',
        "--include-log-monitor=false",
        environ={
            "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
            "REGROW_TEST_RUN": "",
        },
    )
    ray = RayConfig(head.address, {"old_host": 1}, other_machines=True)
    with pytest.raises(ClusterStartError) as error:
        LocalCluster(1, 1, restore_after=0.1, ray=ray, start_timeout_s=LONG)
    assert re.search(
        r"node 127\.61\.0\.9 has jax 0\.0\.1, the head jax \S+: install", str(error.value)
    )


def test_the_end_of_a_script_is_no_notice_to_its_slices(two_nodes: RayHead) -> None:
    where = ["--launcher", "ray", "--address", two_nodes.address, "--resources", '{"tpu_host": 1}']
    script = ["--", sys.executable, "-c", "import jax; print(jax.device_count())"]
    done = subprocess.run(
        [sys.executable, "-m", "regrow", "run", *where, "--slices", "2", *script],
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr
    assert "suspended" not in done.stderr


TRAINING = Path(__file__).parents[1] / "chaos" / "programs" / "proved_training.py"


def test_a_training_that_loses_a_node_computes_what_it_does_without(two_nodes: RayHead) -> None:
    start_node(two_nodes, "127.61.0.3")
    where = ["--launcher", "ray", "--address", two_nodes.address, "--resources", '{"tpu_host": 1}']
    sizes = ["--slices", "2", "--devices-per-slice", "1", "--restore-after", "0.2"]
    training = ["--chaos", "killnode:1@step=5", str(TRAINING), "--steps", "30", "--pace", "0.1"]
    done = subprocess.run(
        [sys.executable, "-m", "regrow", "prove", *where, *sizes, *training],
        capture_output=True,
        text=True,
        timeout=2 * LONG,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("verdict: bit-equal: 30 losses"), done.stdout
    assert "slices lost: 1" in done.stdout
