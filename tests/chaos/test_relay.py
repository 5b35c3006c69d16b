"""The relay between a server and its clients, here of one process."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from regrow.chaos import relay as relays
from regrow.chaos.relay import Relay

BULK_BYTES = 3 << 20


class Echo:
    """A server that says back what it hears."""

    def __init__(self, path: Path) -> None:
        self.heard = bytearray()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.threads = [threading.Thread(target=self._accept)]
        self.threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                one, _ = self.listener.accept()
            except OSError:
                return
            self.threads.append(threading.Thread(target=self._echo, args=(one,)))
            self.threads[-1].start()

    def _echo(self, one: socket.socket) -> None:
        with one:
            try:
                while heard := one.recv(1 << 16):
                    self.heard += heard
                    one.sendall(heard)
            except OSError:
                return

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self.threads:
            thread.join(5)
            assert not thread.is_alive()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "server.sock"


@pytest.fixture
def echo(path: Path) -> Iterator[Echo]:
    server = Echo(path)
    yield server
    server.close()


@pytest.fixture
def relay(echo: Echo, path: Path) -> Iterator[Relay]:
    one = Relay(str(path))
    one.start()
    yield one
    one.close()
    assert not one._thread.is_alive()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def connect(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(10)
    client.connect(str(path))
    return client


def ends(client: socket.socket) -> bool:
    """Whether the connection ends; waits for it."""
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True


def said_back(client: socket.socket, data: bytes) -> bool:
    sender = threading.Thread(target=client.sendall, args=(data,))
    sender.start()
    back = bytearray()
    while len(back) < len(data):
        back += client.recv(1 << 16) or pytest.fail("the connection has ended")
    sender.join(5)
    return back == data


def test_what_is_said_comes_through(relay: Relay, path: Path) -> None:
    with connect(path) as client, connect(path) as other:
        for data in (b"a", os.urandom(BULK_BYTES), b"b"):
            assert said_back(client, data)
            assert said_back(other, data)


def test_a_slow_link_keeps_the_order(relay: Relay, path: Path) -> None:
    with connect(path) as client:
        relay.set_mode([os.getpid()], "slow")
        began_at = time.monotonic()
        assert said_back(client, os.urandom(BULK_BYTES))
        assert time.monotonic() - began_at >= 2 * relays.LATENCY_S
        # What is said after the end of the slowness does not overtake what was before.
        client.sendall(b"1")
        time.sleep(relays.LATENCY_S / 2)
        relay.set_mode([os.getpid()], None)
        client.sendall(b"2")
        assert client.recv(1) + client.recv(1) == b"12"


def test_a_cut_link_lets_nobody_in(relay: Relay, path: Path) -> None:
    with connect(path) as client:
        assert said_back(client, b"a")
        relay.set_mode([os.getpid()], "cut")
        assert ends(client)
    with connect(path) as client:
        assert ends(client)
    relay.set_mode([os.getpid()], None)
    with connect(path) as client:
        assert said_back(client, b"a")


def test_a_link_of_another_process_is_left_alone(relay: Relay, path: Path) -> None:
    relay.set_mode([os.getpid() + 1], "cut")
    with connect(path) as client:
        assert said_back(client, b"a")


def test_what_is_lost_is_not_heard_and_breaks_the_link(
    relay: Relay, echo: Echo, path: Path
) -> None:
    relay.set_mode([os.getpid()], "lose")
    with connect(path) as client:
        time.sleep(2 * relays._HANDSHAKE_S)
        client.sendall(b"lost")
        assert ends(client)
    assert echo.heard == b""
    with connect(path) as client:
        time.sleep(2 * relays._HANDSHAKE_S)
        assert said_back(client, b"once only")


def test_the_end_of_the_relay_breaks_its_links_alone(path: Path, echo: Echo) -> None:
    one = Relay(str(path))
    with connect(path) as direct:
        one.start()
        with connect(path) as client:
            assert said_back(client, b"a")
            one.close()
            assert ends(client)
        assert said_back(direct, b"b")
    with connect(path) as client:
        assert said_back(client, b"c")
    one.close()


def test_links_that_are_just_made_when_it_ends_are_broken_and_left_nowhere(
    path: Path, echo: Echo
) -> None:
    """A socket that nobody has closed would be an error of the test run, too."""
    for _ in range(100):
        one = Relay(str(path))
        one.start()
        clients = [connect(path) for _ in range(3)]
        one.close()
        for client in clients:
            with client:
                assert ends(client)
    gc.collect()


def test_a_server_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Relay(str(tmp_path / "nothing.sock")).start()
