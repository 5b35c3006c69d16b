"""What listens at the address of a head, without Ray where that is no head."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from rays import LONG

from regrow.cluster import LocalCluster
from regrow.config import RayConfig
from regrow.errors import ClusterStartError, NoRayHeadError, UsageError
from regrow.ray import RayCluster
from regrow.ray import knock as knocking
from regrow.ray.head import RayHead
from regrow.ray.knock import knock

HTTP = b"HTTP/1.0 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"


def http(body: bytes) -> Callable[[bytes], bytes]:
    def answer(request: bytes) -> bytes:
        is_known = request.startswith(b"GET /api/version ")
        said = body if is_known else b""
        return HTTP % (b"200 OK" if is_known else b"400 Bad Request", len(said), said)

    return answer


@contextlib.contextmanager
def server(answer: Callable[[bytes], bytes | None]) -> Iterator[str]:
    """Answers the first words of each connection, and hangs up; None: it says nothing for ever."""
    with contextlib.ExitStack() as held, socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection = held.enter_context(listening.accept()[0])
                    said = answer(connection.recv(1000))
                    if said is not None:
                        connection.sendall(said)
                        connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        host, port = listening.getsockname()
        yield f"{host}:{port}"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_dashboard_is_told_as_one() -> None:
    with server(http(b'{"ray_version": "2.60.0"}')) as address:
        with pytest.raises(UsageError) as told:
            knock(address)
    assert str(told.value) == (
        f"{address} is the dashboard of a Ray head, and not the head: give the port that nodes join, "
        "6379 unless the head was started with another --port"
    )


@pytest.mark.parametrize("answer", [http(b"7"), http(b"<html>"), lambda _: b"SSH-2.0-x\r\n"])
def test_another_server_is_told_as_none(answer: Callable[[bytes], bytes]) -> None:
    with server(answer) as address:
        with pytest.raises(UsageError, match=f"what listens at {address} is no Ray head"):
            knock(address)


def test_who_hangs_up_is_no_head() -> None:
    with server(lambda _: b"") as address:
        with pytest.raises(NoRayHeadError, match=f"no Ray head answers at {address}"):
            knock(address)


def test_a_head_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knocking, "_ANSWER_S", 0.2)
    with server(lambda _: None) as address:
        with pytest.raises(NoRayHeadError, match=f"the Ray head at {address} does not answer"):
            knock(address)


def test_a_head_behind_tls_is_not_greeted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with server(lambda _: b"") as address:
        knock(address)


def raylet_of(head: RayHead) -> str:
    """An address that speaks gRPC, too."""
    with urllib.request.urlopen(f"{head.dashboard}/nodes?view=summary") as answer:
        (node,) = json.load(answer)["data"]["summary"]
    return f"{node['ip']}:{node['raylet']['nodeManagerPort']}"


def test_the_parts_of_a_real_head(head: RayHead) -> None:
    knock(head.address)
    with pytest.raises(UsageError, match="is the dashboard of a Ray head"):
        RayCluster(head.dashboard.removeprefix("http://"))
    with pytest.raises(UsageError, match="is no Ray head"):
        RayCluster(raylet_of(head))


def test_slices_from_another_part_of_ray(head: RayHead) -> None:
    ray = RayConfig(raylet_of(head), {"CPU": 1})
    with pytest.raises(ClusterStartError, match="is no Ray head: give the port"):
        LocalCluster(1, 1, restore_after=0.1, ray=ray, start_timeout_s=LONG)
