"""Commands on a host from outside: the socket, whoever calls."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from regrow.cloud.hosts.exec_server import LARGEST_COMMAND_BYTES, ExecServer, socket_name
from regrow.cloud.remote.sessions import LocalShell
from regrow.cloud.remote.targets import Host
from regrow.errors import LaunchError, UsageError
from regrow.processes import Child, spawn

HOST = Host("n", 0, 0, f"test-{os.getpid()}")


@pytest.fixture
def server() -> Iterator[list[Child]]:
    """A server that runs what it is given with a shell; yields what it has started."""
    started: list[Child] = []

    def start(command: str, streams: Sequence[int]) -> Child:
        stdin, output, errors = streams
        argv = ["/bin/sh", "-c", command]
        pid = spawn(argv, os.environ, stdin=stdin, output=output, errors=errors)
        started.append(Child(pid))
        return started[-1]

    server = ExecServer(HOST.address, start, 1.0)
    yield started
    server.close()


def read(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def connected() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(20)
    connection.connect(socket_name(HOST.address))
    return connection


def test_streams_are_the_caller_s_own(server: list[Child]) -> None:
    (stdin, given), (output, out), (errors, err) = os.pipe(), os.pipe(), os.pipe()
    session = LocalShell().start(HOST, "cat; echo oops >&2; exit 7", [stdin, out, err])
    for descriptor in (stdin, out, err):
        os.close(descriptor)
    os.write(given, b"in\n")
    os.close(given)
    assert read(output) == b"in\n"
    assert read(errors) == b"oops\n"
    assert session.finish() == 7


def test_who_closes_ends_the_command(server: list[Child]) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    session = LocalShell().start(HOST, "sleep 600", [nowhere] * 3)
    os.close(nowhere)
    while not server:
        pass
    session.end()
    assert server[0].wait(20) == "SIGTERM (signal 15)"


@pytest.mark.parametrize("packet", [b"", b"{", b"[]", b'{"command": 1', b'{"x": 1}'])
def test_nonsense_is_hung_up_on(server: list[Child], packet: bytes) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    with connected() as connection:
        if packet:
            socket.send_fds(connection, [packet], [nowhere] * 3)
        else:
            connection.send(json.dumps({"command": "true"}).encode())
        assert connection.recv(100) == b""
    os.close(nowhere)
    assert not server


def test_a_command_that_is_too_long() -> None:
    with pytest.raises(UsageError, match="bytes"):
        LocalShell().start(HOST, "x" * LARGEST_COMMAND_BYTES, [0, 0, 0])


def test_the_longest_command(server: list[Child]) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    command = f"true {'x' * (LARGEST_COMMAND_BYTES - 40)}"
    session = LocalShell().start(HOST, command, [nowhere] * 3)
    os.close(nowhere)
    assert session.finish() == 0


def test_nobody_there() -> None:
    with pytest.raises(LaunchError, match=r"slice 0 worker 0 .* takes no commands"):
        LocalShell().start(HOST, "true", [0, 0, 0])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_other_users_are_not_let_in(server: list[Child]) -> None:
    program = f"""
import os, socket
os.setuid(65534)
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect({socket_name(HOST.address)!r})
try:
    socket.send_fds(connection, [b'{{"command": "true"}}'], [0, 1, 2])
    print(connection.recv(100))
except OSError as error:
    print(type(error).__name__)
"""
    argv = [sys.executable, "-c", program]
    told = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout
    assert told.strip() in ("b''", "BrokenPipeError", "ConnectionResetError")
    assert not server
