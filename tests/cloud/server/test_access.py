from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from regrow.cloud.server.access import is_loopback, refusal, user_of


def test_the_kernel_knows_who_asks() -> None:
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.create_server((host, 0), family=family) as server:
            client = socket.create_connection(server.getsockname()[:2])
            accepted, peer = server.accept()
            with accepted:
                assert user_of(peer[:2]) == os.getuid()
                assert refusal(peer[:2], {}, "secret") is None
                # A socket that was let go of is shown as root's; it must not pass for root.
                accepted.send(b"x")
                client.close()
                assert user_of(peer[:2]) is None
                assert "token" in str(refusal(peer[:2], {}, "secret"))


def test_a_client_of_the_other_kind_of_socket() -> None:
    with socket.socket(socket.AF_INET6) as listener:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("::", 0))
        listener.listen()
        with socket.socket(socket.AF_INET6) as client:
            client.connect(("::ffff:127.0.0.1", listener.getsockname()[1]))
            port = client.getsockname()[1]
            assert user_of(("127.0.0.1", port)) == os.getuid()


def test_strangers() -> None:
    assert user_of(("192.0.2.1", 80)) is None
    assert "token" in str(refusal(("192.0.2.1", 80), {}, "secret"))
    assert refusal(("192.0.2.1", 80), {"authorization": "Bearer secret"}, "secret") is None
    assert refusal(None, {"authorization": "bearer secret"}, "secret") is None
    assert refusal(None, {"authorization": "Bearer wrong"}, "secret") is not None
    assert refusal(None, {"authorization": "Bearer \xff"}, "secret") is not None
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
                assert user_of(peer) == 65534
                assert "other users" in str(refusal(peer, {}, "secret"))
