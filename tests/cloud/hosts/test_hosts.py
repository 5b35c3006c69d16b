"""Hosts as real processes: what runs on them, what ends them, and that nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from cloud_server import ZONE, LocalCloud

from regrow.processes import is_running
from waiting import until

QUEUED = f"{ZONE}/queuedResources"
NODES = f"{ZONE}/nodes"


def metadata(address: str, path: str, **headers: str) -> str:
    request = urllib.request.Request(
        f"http://{address}:8480/computeMetadata/v1/{path}",
        headers={"Metadata-Flavor": "Google"} | headers,
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode()


def address(cloud: LocalCloud, node: str, worker: int = 0) -> str:
    return cloud.node(node)["networkEndpoints"][worker]["ipAddress"]


def boots(cloud: LocalCloud, node: str, worker: int = 0) -> list[tuple[int, int]]:
    """The incarnations and boots in which the startup script has begun."""
    found = re.findall(
        r"--- startup-script: incarnation (\d+), boot (\d+)", cloud.script_log(node, worker)
    )
    return [(int(incarnation), int(boot)) for incarnation, boot in found]


STAY = "#!/bin/bash\necho pid $$ on $TPU_NAME/$TPU_WORKER_ID\nsleep 1000 & sleep 1000"


def script_pids(cloud: LocalCloud, node: str, worker: int = 0) -> list[int]:
    return [int(pid) for pid in re.findall(r"pid (\d+) on", cloud.script_log(node, worker))]


def test_startup_script_and_metadata(cloud: LocalCloud) -> None:
    cloud.start()
    script = (
        "echo home $(pwd); echo kept > file\n"
        'curl -s -X PUT -d hello -H "Metadata-Flavor: Google" '
        "http://$GCE_METADATA_HOST/computeMetadata/v1/instance/guest-attributes/mine/key\n"
        "exit 7"
    )
    cloud.create("q", "v4-16", slices=2, metadata={"startup-script": script, "mine": "yes"})
    cloud.active("q")
    there = address(cloud, "q-1", 1)
    attributes = "instance/attributes"
    assert metadata(there, f"{attributes}/agent-worker-number") == "1"
    assert metadata(there, f"{attributes}/accelerator-type") == "v4-16"
    assert metadata(there, f"{attributes}/instance-id") == "q-1"
    assert metadata(there, f"{attributes}/mine") == "yes"
    workers = metadata(there, f"{attributes}/worker-network-endpoints").split(",")
    assert [worker.split(":")[1:] for worker in workers] == [
        [str(index), address(cloud, "q-1", index)] for index in range(2)
    ]
    env = metadata(there, f"{attributes}/tpu-env")
    assert "MEGASCALE_NUM_SLICES: '2'" in env
    assert "MEGASCALE_SLICE_ID: '1'" in env
    assert f"MEGASCALE_COORDINATOR_ADDRESS: '{address(cloud, 'q-0')}:" in env
    assert metadata(there, "instance/preempted") == "FALSE"
    assert "attributes/" in metadata(there, "instance/")
    for wrong in ("instance/nothing", "instance/id/more"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            metadata(there, wrong)
    with pytest.raises(urllib.error.HTTPError, match="403"):
        metadata(there, "instance/id", **{"Metadata-Flavor": "Other"})

    def exit_status() -> dict[str, str]:
        told = cloud.call("POST", f"{NODES}/q-1:getGuestAttributes", {"workerIds": ["1"]})
        items = told["guestAttributes"][0]["queryValue"]["items"]
        return {f"{item['namespace']}/{item['key']}": item["value"] for item in items}

    until(lambda: "startup-script/exit-status" in exit_status())
    assert exit_status() == {
        "mine/key": "hello",
        "startup-script/boot": "1",
        "startup-script/exit-status": "7",
    }
    log = cloud.script_log("q-1", 1)
    assert re.search(r"^home .*/disk$", log, re.MULTILINE)
    assert log.endswith("--- startup-script: exit status 7\n")


def test_metadata_changes_are_told(cloud: LocalCloud) -> None:
    cloud.start()
    cloud.create("q", metadata={"a": "1"})
    cloud.active("q")
    here = address(cloud, "q-0")
    body = {"metadata": {"a": "2"}}
    waiting = subprocess.Popen(
        [
            "curl",
            "-s",
            "-H",
            "Metadata-Flavor: Google",
            f"http://{here}:8480/computeMetadata/v1/instance/attributes/a?wait_for_change=true",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    with waiting:
        # It must have asked before the change comes.
        until(lambda: _is_waiting(waiting.pid))
        cloud.done(cloud.call("PATCH", f"{NODES}/q-0?updateMask=metadata", body))
        assert waiting.communicate(timeout=20)[0] == "2"


def _is_waiting(pid: int) -> bool:
    links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    # Established, and everything it has sent has been taken.
    return any(row[9] in inodes and row[3] == "01" and row[4][:8] == "0" * 8 for row in rows)


def test_reset_keeps_the_disk_and_clears_the_memory(cloud: LocalCloud) -> None:
    cloud.start()
    script = "echo boot >> boots; wc -l < boots\n" + STAY.partition("\n")[2]
    cloud.create("q", "v4-16", metadata={"startup-script": script})
    cloud.active("q")
    until(lambda: script_pids(cloud, "q-0", 1))
    before = [*cloud.agents("q-0"), *script_pids(cloud, "q-0", 1)]
    cloud.done(cloud.call("POST", f"{QUEUED}/q:reset", {}))
    until(lambda: len(script_pids(cloud, "q-0", 1)) == 2)
    assert not any(is_running(pid) for pid in before)
    assert re.findall(r"^(\d+)$", cloud.script_log("q-0", 1), re.MULTILINE) == ["1", "2"]
    assert boots(cloud, "q-0") == [(1, 1), (1, 2)]


def test_a_dead_host_is_repaired(cloud: LocalCloud) -> None:
    cloud.start()
    cloud.create("q", "v4-16", slices=2, metadata={"startup-script": STAY + " # never ends"})
    cloud.active("q")
    until(lambda: all(script_pids(cloud, f"q-{s}", w) for s in (0, 1) for w in (0, 1)))
    old = [pid for s in (0, 1) for w in (0, 1) for pid in script_pids(cloud, f"q-{s}", w)]
    os.kill(cloud.agents("q-1")[0], signal.SIGKILL)
    until(lambda: boots(cloud, "q-1", 1) == [(1, 1), (2, 1)])
    until(lambda: boots(cloud, "q-0", 1) == [(1, 1), (1, 2)])
    until(lambda: [cloud.node(f"q-{s}")["state"] for s in (0, 1)] == ["READY"] * 2)
    assert cloud.state_of("q") == "ACTIVE"
    assert not any(is_running(pid) for pid in old), "nothing of the old job runs"


def test_preemption_is_announced_and_ends_in_sigkill(cloud: LocalCloud) -> None:
    cloud.start("--stop", "0.5")
    script = (
        "#!/bin/bash\ntrap 'echo got SIGTERM' TERM\necho pid $$ on x\n"
        "while true; do sleep 0.1; curl -s -H 'Metadata-Flavor: Google' "
        "http://$GCE_METADATA_IP/computeMetadata/v1/instance/preempted; echo; done"
    )
    cloud.create("q", spot={}, metadata={"startup-script": script})
    cloud.active("q")
    until(lambda: "FALSE" in cloud.script_log("q-0"))
    pids = [*cloud.agents("q-0"), *script_pids(cloud, "q-0")]
    cloud.raw("POST", "/regrow/v1/preempt", f'{{"name": "{QUEUED}/q"}}')
    until(lambda: cloud.state_of("q") == "SUSPENDED")
    log = cloud.script_log("q-0")
    assert "TRUE\n" in log
    assert "got SIGTERM" in log
    assert log.index("TRUE\n") < log.index("got SIGTERM")
    assert not any(is_running(pid) for pid in pids)
    assert cloud.node("q-0")["state"] == "PREEMPTED"


def test_stop_and_start(cloud: LocalCloud) -> None:
    cloud.start()
    body: dict[str, Any] = {
        "acceleratorType": "v4-8",
        "runtimeVersion": "tpu-vm-base",
        "metadata": {"startup-script": STAY, "shutdown-script": "echo good bye"},
    }
    cloud.done(cloud.call("POST", f"{NODES}?nodeId=n", body))
    until(lambda: script_pids(cloud, "n"))
    pids = [*cloud.agents("n"), *script_pids(cloud, "n")]
    cloud.done(cloud.call("POST", f"{NODES}/n:stop", {}))
    assert not any(is_running(pid) for pid in pids)
    assert "good bye" in cloud.script_log("n")
    cloud.done(cloud.call("POST", f"{NODES}/n:start", {}))
    until(lambda: boots(cloud, "n") == [(1, 1), (1, 2)])
    uid = cloud.node("n")["id"]
    cloud.done(cloud.call("DELETE", f"{NODES}/n"))
    assert not (cloud.directory.path / "hosts" / uid).exists()
    assert "good bye" in cloud.script_log("n"), "the output is kept"


def test_a_killed_server_finds_its_slices_again(cloud: LocalCloud) -> None:
    cloud.start()
    cloud.create("q", "v4-16", slices=2, metadata={"startup-script": STAY})
    cloud.active("q")
    until(lambda: script_pids(cloud, "q-1", 1))
    agents = [*cloud.agents("q-0"), *cloud.agents("q-1")]
    cloud.kill()
    cloud.start()
    assert cloud.state_of("q") == "ACTIVE"
    assert [*cloud.agents("q-0"), *cloud.agents("q-1")] == agents
    assert all(is_running(pid) for pid in agents)
    assert boots(cloud, "q-1", 1) == [(1, 1)]
    # They are as much its own as those that it has started.
    cloud.done(cloud.call("POST", f"{QUEUED}/q:reset", {}))
    assert not any(is_running(pid) for pid in agents)
    cloud.delete("q")


def test_what_died_with_the_server_is_repaired(cloud: LocalCloud) -> None:
    cloud.start()
    cloud.create("q", slices=2, metadata={"startup-script": STAY})
    cloud.active("q")
    until(lambda: script_pids(cloud, "q-0") and script_pids(cloud, "q-1"))
    cloud.kill()
    old = script_pids(cloud, "q-1")
    for path in cloud.directory.path.glob("hosts/*/1/0/agent.json"):
        if '"TPU_NAME": "q-1"' in (path.parent / "host.json").read_text():
            os.kill(json.loads(path.read_text())["process"]["pid"], signal.SIGKILL)
    cloud.start()
    until(lambda: boots(cloud, "q-1") == [(1, 1), (2, 1)])
    until(lambda: boots(cloud, "q-0") == [(1, 1), (1, 2)])
    assert not any(is_running(pid) for pid in old)


def test_after_an_orderly_end_slices_start_again(cloud: LocalCloud) -> None:
    cloud.start()
    cloud.create("q", metadata={"startup-script": "echo x >> kept; wc -l < kept\n" + STAY})
    cloud.active("q")
    until(lambda: script_pids(cloud, "q-0"))
    pids = [*cloud.agents("q-0"), *script_pids(cloud, "q-0")]
    cloud.stop()
    assert not any(is_running(pid) for pid in pids)
    cloud.start()
    until(lambda: boots(cloud, "q-0") == [(1, 1), (1, 2)])
    until(lambda: cloud.node("q-0")["state"] == "READY")
    assert cloud.state_of("q") == "ACTIVE"


def test_hosts_do_not_outlive_a_dead_server_for_long(cloud: LocalCloud, tmp_path: Path) -> None:
    config = tmp_path / "cloud.toml"
    config.write_text("orphan_s = 0.3\n")
    cloud.start("--config", str(config))
    cloud.create("q", metadata={"startup-script": STAY})
    cloud.active("q")
    until(lambda: script_pids(cloud, "q-0"))
    pids = [*cloud.agents("q-0"), *script_pids(cloud, "q-0")]
    cloud.kill()
    until(lambda: not any(is_running(pid) for pid in pids))


def test_deleted_while_it_is_started(cloud: LocalCloud) -> None:
    cloud.start()
    for number in range(4):
        cloud.create("q", "v4-16", slices=2, metadata={"startup-script": STAY})
        if number % 2:
            until(lambda: cloud.state_of("q") in ("PROVISIONING", "ACTIVE"))
        cloud.delete("q")
    until(lambda: not list(cloud.directory.path.glob("hosts/*")))
