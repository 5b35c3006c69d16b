"""The TCP sockets of this process, as the collectives of its gangs have opened them.

Gloo tells nobody which are its own, so they are found by their ports.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable


def sockets(*, listening: bool) -> dict[int, tuple[int, int]]:
    """TCP sockets of this process: (local port, peer port or 0) by file descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with sock:
            try:
                if _is_tcp(sock, listening):
                    peer = 0 if listening else sock.getpeername()[1]
                    found[int(name)] = (sock.getsockname()[1], peer)
            except OSError:
                continue
    return found


def cut(port: int, peer_ports: Iterable[int]) -> int:
    """Shuts down the sockets of one gang's collectives, and no others; how many."""
    count, peers = 0, set(peer_ports)
    for fd, (local, peer) in sockets(listening=False).items():
        if not (port and local == port) and peer not in peers:
            continue
        try:
            with socket.socket(fileno=os.dup(fd)) as sock:
                if sock.getsockname()[1] == local:  # The descriptor may be another socket by now.
                    sock.shutdown(socket.SHUT_RDWR)
                    count += 1
        except OSError:
            continue
    return count


def _is_tcp(sock: socket.socket, listening: bool) -> bool:
    inet = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
    return inet and bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) == listening
