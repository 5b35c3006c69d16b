from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from regrow.cloud.server import access
from regrow.cloud.server.access import is_loopback, refusal, user_of


@pytest.fixture(autouse=True, params=["kernel", "table"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of knowing a peer give the same answers."""
    if request.param == "table":
        monkeypatch.setattr(access, "_ask_the_kernel", _no_such_interface)


def _no_such_interface(*_: object) -> None:
    raise OSError("no such interface")


def test_the_kernel_knows_who_asks() -> None:
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.create_server((host, 0), family=family) as server:
            client = socket.create_connection(server.getsockname()[:2])
            accepted, peer = server.accept()
            with accepted:
                ends = (peer[:2], accepted.getsockname()[:2])
                assert user_of(*ends) == os.getuid()
                assert refusal(*ends, {}, "secret") is None
                # A socket that was let go of is shown as root's; it must not pass for root.
                accepted.send(b"x")
                client.close()
                assert user_of(*ends) is None
                assert "token" in str(refusal(*ends, {}, "secret"))


def test_a_client_of_the_other_kind_of_socket() -> None:
    with socket.socket(socket.AF_INET6) as listener:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("::", 0))
        listener.listen()
        with socket.socket(socket.AF_INET6) as client:
            server = ("127.0.0.1", listener.getsockname()[1])
            client.connect((f"::ffff:{server[0]}", server[1]))
            port = client.getsockname()[1]
            assert user_of(("127.0.0.1", port), server) == os.getuid()


def test_somebody_who_listens_is_not_who_asks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert user_of(server.getsockname(), ("127.0.0.1", 80)) is None


def test_strangers() -> None:
    own = ("127.0.0.1", 80)
    assert user_of(("192.0.2.1", 80), own) is None
    assert "token" in str(refusal(("192.0.2.1", 80), own, {}, "secret"))
    assert refusal(("192.0.2.1", 80), own, {"authorization": "Bearer secret"}, "secret") is None
    assert refusal(None, own, {"authorization": "bearer secret"}, "secret") is None
    assert refusal(None, own, {"authorization": "Bearer wrong"}, "secret") is not None
    assert refusal(None, own, {"authorization": "Bearer \xff"}, "secret") is not None
    assert is_loopback("127.1.2.3")
    assert not is_loopback("example.org")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_another_user_of_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        code = (
            "import os, socket, sys; os.setuid(65534); s = socket.socket(); "
            "s.connect(('127.0.0.1', int(sys.argv[1]))); sys.stdin.read()"
        )
        client = subprocess.Popen(
            [sys.executable, "-c", code, str(server.getsockname()[1])], stdin=subprocess.PIPE
        )
        with client:
            accepted, peer = server.accept()
            with accepted:
                own = accepted.getsockname()
                assert user_of(peer, own) == 65534
                assert "other users" in str(refusal(peer, own, {}, "secret"))
