"""The connections of this process to its head: ours, and those of jaxlib, which shows them to nobody."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any, TypeAlias

Address: TypeAlias = str | tuple[str, int]
"""The path of a Unix socket, or a host and a TCP port."""


def dial(address: Address, timeout_s: float) -> socket.socket:
    """A connected, blocking socket."""
    if isinstance(address, str):
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(timeout_s)
            sock.connect(address)
        except BaseException:
            sock.close()
            raise
    else:
        sock = socket.create_connection(address, timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.settimeout(None)
    return sock


def shut(sock: socket.socket) -> None:
    """Ends both directions; whoever waits for the connection sees its end."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # It is closed already.


def known_as(address: Address) -> frozenset[Address]:
    """All that the other end of a connection to that address may be called.

    Raises:
        OSError: Its host is not known.
    """
    if isinstance(address, str):
        return frozenset({address})
    found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    return frozenset(_plain(entry[4]) for entry in found)


def hang_up(peers: frozenset[Address]) -> None:
    """Ends each connection to one of these peers, as if the other side had ended it."""
    for _, sock in _connections(peers):
        shut(sock)


def detach(peers: frozenset[Address]) -> None:
    """Puts a closed connection in the place of each connection to one of these peers.

    For a forked child: what it does to them its parent does not see.
    """
    closed, other = socket.socketpair()
    other.close()
    with closed:
        for number, _ in _connections(peers):
            os.dup2(closed.fileno(), number)


def peer_pid(sock: socket.socket) -> int | None:
    """The process that listens at the other end; None where the kernel does not tell."""
    if sock.family != socket.AF_UNIX:
        return None
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[:4], sys.byteorder) or None


def _connections(peers: frozenset[Address]) -> Iterator[tuple[int, socket.socket]]:
    """Number and socket of each descriptor that is connected to one of them."""
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if _peer(sock) in peers:
                    yield int(name), sock
        except OSError:
            continue


def _peer(sock: socket.socket) -> Any:
    peer = sock.getpeername()
    return _plain(peer) if isinstance(peer, tuple) and len(peer) in (2, 4) else peer


def _plain(peer: Any) -> Address:
    """Host and port; gRPC connects to IPv4 through sockets of IPv6."""
    try:
        host = ipaddress.ip_address(peer[0])
    except ValueError:
        return (str(peer[0]), peer[1])
    return (str(getattr(host, "ipv4_mapped", None) or host), peer[1])
