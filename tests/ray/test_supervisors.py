"""Jobs that are stopped before they have begun."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rays import LONG, until

from regrow.ray import RayCluster
from regrow.ray.head import RayHead
from regrow.ray.supervisors import end_supervisor

pytestmark = pytest.mark.timeout(2 * LONG)


def submit(cluster: RayCluster, name: str, resource: str, **environment: object) -> str:
    return cluster.submit(
        "echo", job_id=name, resources={resource: 1}, metadata={}, runtime_env=environment
    )


def state_of(cluster: RayCluster, name: str) -> str:
    found = {one.id: one.view.state for one in cluster.jobs()}
    return found.get(name, "")


def test_a_job_that_waits_for_its_place_ends_when_it_is_stopped(head: RayHead) -> None:
    cluster = RayCluster(head.address)
    submit(cluster, "waits", "nobody_has_it")
    until(lambda: state_of(cluster, "waits") == "PENDING")
    cluster.stop("waits")
    until(lambda: state_of(cluster, "waits") == "FAILED")
    assert not end_supervisor(head.address, "waits")


@pytest.mark.slow
def test_a_job_whose_environment_is_being_made_leaves_its_host(
    head: RayHead, tmp_path: Path
) -> None:
    """It is made as long as nobody writes what pip is to read."""
    head.start_node(
        "--node-ip-address=127.62.0.2",
        '--resources={"place": 1}',
        "--include-log-monitor=false",
        environ={"REGROW_TEST_RUN": ""},
    )
    cluster = RayCluster(head.address)
    wheel = tmp_path / "nothing-1-py3-none-any.whl"
    os.mkfifo(wheel)
    submit(cluster, "makes", "place", pip=[f"nothing @ file://{wheel}"])
    until(lambda: state_of(cluster, "makes") == "PENDING")
    submit(cluster, "next", "place")
    cluster.stop("makes")
    until(lambda: state_of(cluster, "next") == "SUCCEEDED")
