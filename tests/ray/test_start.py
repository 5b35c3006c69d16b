"""`ray start` where a raylet may not come up at once."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from rays import raylet_at, until

from regrow.ray import RayCluster
from regrow.ray.head import RayHead

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ADDRESS = "127.62.0.1"


def raylet() -> int:
    try:
        return raylet_at(ADDRESS)
    except AssertionError:
        return 0


def test_a_raylet_that_dies_at_its_start_is_started_again(head: RayHead) -> None:
    node = threading.Thread(
        target=head.start_node,
        args=(f"--node-ip-address={ADDRESS}", "--include-log-monitor=false"),
        kwargs={"environ": {"REGROW_TEST_RUN": ""}},
    )
    node.start()
    until(raylet)
    first = raylet()
    os.kill(first, signal.SIGKILL)
    node.join()
    assert raylet() not in (0, first)
    assert ADDRESS in [one.address for one in RayCluster(head.address).nodes()]
