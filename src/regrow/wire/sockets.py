"""Listening sockets, and how the sockets of clients are set up."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
from pathlib import Path
from typing import Final

from regrow.errors import ClusterStartError

_SOCKET_BUFFER_BYTES: Final = 4 << 20
_MAX_UNIX_PATH_BYTES: Final = 107
_BACKLOG: Final = 128


def tune(sock: socket.socket) -> None:
    """Large buffers, no delay, and a machine that is gone is noticed within a minute."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def peer_name(sock: socket.socket, address: object) -> str:
    """Who is at the other end, for logs."""
    if sock.family == socket.AF_UNIX:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return f"process {struct.unpack('3i', raw)[0]}"
    assert isinstance(address, tuple)
    return f"{address[0]}:{address[1]}"


def listen_unix(path: Path) -> socket.socket:
    """Create a Unix socket that only its owner may connect to.

    Raises:
        ClusterStartError: It cannot be created there.
    """
    if len(os.fsencode(path)) > _MAX_UNIX_PATH_BYTES:
        raise ClusterStartError(
            f"the path of the socket {path} is longer than {_MAX_UNIX_PATH_BYTES} bytes"
        )
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # bind() makes the file: to change its mode afterwards would leave it open for a moment.
    old_mask = os.umask(0o177)
    try:
        sock.bind(os.fspath(path))
    except OSError as error:
        sock.close()
        raise ClusterStartError(f"cannot create the socket {path}: {error.strerror}") from error
    finally:
        os.umask(old_mask)
    sock.listen(_BACKLOG)
    sock.setblocking(False)
    return sock


def _remove_stale(path: Path) -> None:
    """Remove a socket that nobody listens on any more."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ClusterStartError(
                f"cannot create the socket {path}: there is something else of that name"
            )
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise ClusterStartError(f"cannot create the socket {path}: {error}") from error
    raise ClusterStartError(f"cannot create the socket {path}: another process serves it")


def remove_unix(path: Path, inode: int) -> None:
    """Remove our socket, unless another has taken its place."""
    with contextlib.suppress(FileNotFoundError):
        if path.lstat().st_ino == inode:
            path.unlink()


def listen_tcp(host: str, port: int) -> socket.socket:
    """Listen on a TCP port; 0 takes a free one.

    Raises:
        ClusterStartError: The port is in use, or the host is not ours.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ClusterStartError(f"cannot listen on {host}: {error.strerror}") from error
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ClusterStartError(f"TCP port {port} of {host} is in use already") from error
        raise ClusterStartError(
            f"cannot listen on TCP port {port} of {host}: {error.strerror}"
        ) from error
    sock.setblocking(False)
    return sock
