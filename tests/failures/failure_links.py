"""Cuts connections between living processes, as a broken network does.

`pidfd_getfd` gives this process a descriptor for a socket of another one, which it then shuts down.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterable, Iterator

import psutil

_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


def sockets_of(pid: int) -> Iterator[socket.socket]:
    """The sockets of a process, as duplicates."""
    pidfd = os.pidfd_open(pid)
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                    continue
            except FileNotFoundError:
                continue
            fd = _libc.syscall(_PIDFD_GETFD, pidfd, int(name), 0)
            if fd >= 0:
                with socket.socket(fileno=fd) as sock:
                    yield sock
    finally:
        os.close(pidfd)


def _peer(sock: socket.socket) -> object:
    try:
        return sock.getpeername()
    except OSError:
        return None


def cut_tcp_between(pid: int, others: Iterable[int]) -> int:
    """Shuts down the TCP connections of a process with other processes; how many."""
    theirs = set()
    for other in others:
        with contextlib.suppress(psutil.NoSuchProcess):
            theirs.update(_ends_of(other))
    cut = 0
    for sock in sockets_of(pid):
        if sock.family != socket.AF_INET or _peer(sock) not in theirs:
            continue
        sock.shutdown(socket.SHUT_RDWR)
        cut += 1
    return cut


def _ends_of(pid: int) -> Iterator[tuple[str, int]]:
    for connection in psutil.Process(pid).net_connections("tcp"):
        if connection.status == psutil.CONN_ESTABLISHED:
            yield connection.laddr.ip, connection.laddr.port
