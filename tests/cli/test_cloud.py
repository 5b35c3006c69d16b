"""`regrow cloud`: up, status, preempt, capacity and down."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from typing import Any

import pytest

from regrow.processes import marked
from waiting import until

ZONE = "projects/p/locations/us-central2-b"


@pytest.fixture
def cloud(regrow):
    """The `regrow cloud` command; what it has started is ended."""

    def run(*arguments: str) -> Any:
        return regrow("cloud", *arguments)

    yield run
    run("down")


def endpoint(cloud: Any) -> str:
    return json.loads(cloud("status", "--json").stdout)["endpoint"]


def send(url: str, body: Any) -> Any:
    with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=20) as answer:
        return json.load(answer)


def create(cloud: Any, name: str, **fields: Any) -> None:
    node = {"acceleratorType": "v4-8", "runtimeVersion": "tpu-vm-base"}
    spec = {"parent": ZONE, "nodeId": f"{name}-0", "node": node}
    body = {"tpu": {"nodeSpec": [spec]}, **fields}
    send(f"{endpoint(cloud)}/v2/{ZONE}/queuedResources?queuedResourceId={name}", body)


def states(cloud: Any) -> dict[str, str]:
    told = json.loads(cloud("status", "--json").stdout)
    return {one["name"].rpartition("/")[2]: one["state"] for one in told["queuedResources"]}


def test_life(regrow, cloud, one_line):
    assert one_line(cloud("status"), 3).startswith("no local Cloud TPU runs in")
    up = cloud("up", "--detach", "--port", "0", "--notice", "0.1")
    assert up.returncode == 0, up.stderr
    assert "a local Cloud TPU with slices of processes is up at http://127.0.0.1:" in up.stderr
    assert "runs already" in one_line(cloud("up", "--port", "0"), 3)
    create(cloud, "q", spot={})
    until(lambda: states(cloud)["q"] == "ACTIVE")
    table = cloud("status").stdout
    assert "1 queued resource, 0 further nodes" in table
    assert "us-central2-b/v4: 4 chips taken" in table
    assert cloud("preempt", f"{ZONE}/queuedResources/q").returncode == 0
    until(lambda: states(cloud)["q"] == "SUSPENDED")
    assert "q is SUSPENDED" in one_line(cloud("preempt", f"{ZONE}/queuedResources/q"), 1)
    down = cloud("down")
    assert down.returncode == 0
    assert "is down" in down.stderr


def test_capacity(regrow, cloud, one_line):
    cloud("up", "--detach", "--port", "0", "--simulate")
    assert cloud("capacity", "us-central2-b", "v4", "0").returncode == 0
    create(cloud, "q")
    until(lambda: states(cloud)["q"] == "WAITING_FOR_RESOURCES")
    assert cloud("capacity", "us-central2-b", "v4", "4").returncode == 0
    until(lambda: states(cloud)["q"] == "ACTIVE")
    assert "without processes" in cloud("status").stdout
    assert "'v9' is none of v2," in one_line(cloud("capacity", "us-central2-b", "v9", "4"), 1)
    assert "there is no zone mars" in one_line(cloud("capacity", "mars", "v4", "4"), 1)


def test_what_a_dead_server_leaves_is_ended(regrow, cloud, one_line):
    cloud("up", "--detach", "--port", "0")
    create(cloud, "q")
    until(lambda: states(cloud)["q"] == "ACTIVE")
    (uid,) = [entry.name for entry in (regrow.home / "cloud" / "hosts").iterdir()]
    assert marked(f"cloud-{uid}")
    os.kill(json.loads(cloud("status", "--json").stdout)["process"]["pid"], signal.SIGKILL)
    until(lambda: "no local Cloud TPU runs" in cloud("status").stderr)
    assert "no local Cloud TPU runs" in one_line(cloud("down"), 3)
    until(lambda: not marked(f"cloud-{uid}"))


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("step_s = -1", "step_s is -1"),
        ("steps = 1", "unknown setting 'steps'"),
        ("[zones.z]\nv9 = 3", "'v9' is none of"),
        ("x =", "cannot read"),
        ("[[reservations]]\nname = 'r'", "each of [[reservations]] has"),
    ],
)
def test_wrong_configuration(cloud, one_line, tmp_path, text, wrong):
    path = tmp_path / "cloud.toml"
    path.write_text(text)
    assert wrong in one_line(cloud("up", "--port", "0", "--config", str(path)), 2)


def test_a_port_that_is_taken(cloud, one_line, tmp_path):
    cloud("up", "--detach", "--port", "0", "--simulate")
    port = endpoint(cloud).rpartition(":")[2]
    other = cloud("up", "--port", port, "--state-dir", str(tmp_path / "other"))
    assert "choose another with --port" in one_line(other, 3)
