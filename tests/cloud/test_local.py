"""The local server is found, or started, by whoever needs it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from cloud_server import LocalCloud
from cloud_world import PLACE

from regrow.cloud.local import connect, end, found_or_started
from regrow.cloud.server.state_dir import StateDir
from regrow.errors import ClusterStartError, UsageError


def test_another_endpoint(simulated: LocalCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = simulated.directory.server().endpoint
    monkeypatch.setenv("REGROW_TPU_ENDPOINT", endpoint)
    client = connect()
    assert client.endpoint == endpoint
    assert client.list_queued(PLACE) == []
    client.close()
    with pytest.raises(UsageError, match="is no endpoint"):
        connect("localhost:80")


def test_one_that_runs_is_found(simulated: LocalCloud) -> None:
    server = simulated.directory.server()
    assert found_or_started(simulated.directory) == server


def _port_is_free() -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", 8470))
        except OSError:
            return False
    return True


def test_it_is_started_when_it_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not _port_is_free():
        pytest.skip("something on this machine listens on the API's own port, 8470")
    monkeypatch.setenv("REGROW_HOME", str(tmp_path))
    monkeypatch.delenv("REGROW_TPU_ENDPOINT", raising=False)
    client = connect()
    assert client.endpoint == "http://127.0.0.1:8470"
    assert client.list_queued(PLACE) == []
    client.close()
    end(StateDir(), 30)


def test_why_it_cannot_be_started(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(ClusterStartError, match="cannot write to"):
        found_or_started(StateDir(path / "below"))
