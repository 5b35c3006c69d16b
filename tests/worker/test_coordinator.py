"""Coordination services: opened on request, closed long after their epoch."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest
from jaxlib import _jax
from worker_rig import Reports

from regrow.channel import commands as c
from regrow.worker import coordinator as coordinators
from regrow.worker.coordinator import Coordinator, open_service
from regrow.worker.gang import NEVER_S


def join(address: str, node: int) -> Any:
    agent = _jax.get_distributed_runtime_client(
        address,
        node,
        init_timeout=10,
        heartbeat_timeout=NEVER_S,
        shutdown_timeout=1,
        shutdown_on_destruction=False,
        use_compression=False,
    )
    agent.connect()
    return agent


def test_members_join_without_waiting_for_each_other() -> None:
    address, service = open_service("127.0.0.1", 3)
    started = time.monotonic()
    second = join(address, 1)
    first = join(address, 0)  # the third never comes
    assert time.monotonic() - started < 5
    first.key_value_set("key", "value")
    assert second.blocking_key_value_get("key", 5000) == "value"
    for agent in (first, second):
        agent.shutdown()
    service.shutdown()


def test_services_of_several_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinators, "_KEEP_S", 0.05)
    coordinator = Coordinator("127.0.0.1")
    reports = Reports()
    coordinator.connect(reports)
    coordinator.on_payload(
        c.pack_all([c.OpenService(1, 11, 2), c.OpenService(2, 12, 1), c.Ping(-3)])
    )
    assert c.Pong(-3, 0) in reports.all
    addresses = [reports.answer(rid).value for rid in (1, 2)]
    assert len(set(addresses)) == 2
    join(addresses[0], 1).shutdown()
    join(addresses[1], 0).shutdown()
    coordinator.on_payload(c.pack_all([c.CloseService(11), c.CloseService(99)]))
    deadline = time.monotonic() + 10
    while 11 in coordinator._services:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    join(addresses[1], 0).shutdown()
    coordinator._close(12)
    thread = threading.Thread(target=coordinator.run)
    thread.start()
    coordinator.on_payload(c.pack_all([c.Exit()]))
    thread.join(10)
    assert not thread.is_alive()


def test_a_service_that_cannot_be_opened_is_a_refusal() -> None:
    coordinator = Coordinator("198.51.100.1")  # no address of this machine
    reports = Reports()
    coordinator.connect(reports)
    coordinator.on_payload(c.pack_all([c.OpenService(1, 11, 2)]))
    answer = reports.answer(1)
    assert isinstance(answer, c.Failed)
    assert answer.message


def test_a_port_that_is_free() -> None:
    port = coordinators._free_port("127.0.0.1")
    with socket.create_server(("127.0.0.1", port)):
        pass
