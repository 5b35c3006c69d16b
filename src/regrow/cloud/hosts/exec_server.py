"""Commands on a local host from outside, as ssh gives them on a real one.

A client connects to the host's socket and sends one packet: the command, as JSON, and with it the
three descriptors that become standard input, output and error. The host answers with one packet,
the exit status, when the command has ended. Who closes the connection earlier ends the command.

The socket has a name in the abstract namespace, so that no file is left behind, and the kernel tells
each end the user of the other: only the host's own user and root are let in.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, final

from regrow.processes import Child, descendants_of, end_all, is_running

LARGEST_COMMAND_BYTES: Final = 96 << 10
"""A packet of a Unix socket has to fit into the kernel's buffer."""

_ROOT: Final = 0
_STREAMS: Final = 3
_BACKLOG: Final = 64
_REQUEST_S: Final = 10.0
_PAUSE_S: Final = 0.05
_CREDENTIALS: Final = struct.Struct("=iII")

Start = Callable[[str, Sequence[int]], Child]
"""Starts a command with these as standard input, output and error."""


def socket_name(address: str) -> str:
    """Name of the socket of the host that has an address."""
    return f"\0regrow-host/{address}"


def is_friend(peer: socket.socket) -> bool:
    """Whether the other end of a Unix socket belongs to this user, or to root."""
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    return user in (os.geteuid(), _ROOT)


@final
class ExecServer:
    """Takes commands for a host."""

    def __init__(self, address: str, start: Start, stop_s: float) -> None:
        """Listens.

        Args:
            address: The host's address.
            start: Starts a command.
            stop_s: SIGTERM to SIGKILL for a command that nobody waits for any more.

        Raises:
            OSError: If the name is taken.
        """
        self._start = start
        self._stop_s = stop_s
        self._closed = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(socket_name(address))
        self._listener.listen(_BACKLOG)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Takes no more commands; those that run end with the host, and give no status."""
        self._closed = True
        # Wakes the thread that accepts, which close alone does not.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                # Closed, or out of descriptors for a while.
                time.sleep(_PAUSE_S)
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            if not is_friend(connection):
                return
            connection.settimeout(_REQUEST_S)
            data, streams, _, _ = socket.recv_fds(
                connection, LARGEST_COMMAND_BYTES, _STREAMS, socket.MSG_CMSG_CLOEXEC
            )
            try:
                if len(streams) != _STREAMS or self._closed:
                    return
                child = self._start(json.loads(data)["command"], streams)
            except (ValueError, KeyError, TypeError):
                return
            finally:
                for stream in streams:
                    os.close(stream)
            self._follow(child, connection)
            if not self._closed:
                connection.send(json.dumps({"status": child.status}).encode())

    def _follow(self, child: Child, connection: socket.socket) -> None:
        """Waits until a command has ended; ends it when its client goes away."""
        poller = select.poll()
        poller.register(child.fd, select.POLLIN)
        poller.register(connection, select.POLLIN)
        while child.cause is None:
            ready = {descriptor for descriptor, _ in poller.poll()}
            if child.poll() is None and connection.fileno() in ready:
                # It has nothing more to say, so that this is its end.
                self._end(child)

    def _end(self, child: Child) -> None:
        """Ends a command and what it has started; who has left its group is known by descent."""
        strays = descendants_of({child.pid})
        _signal(child.pid, strays, signal.SIGTERM)
        deadline = time.monotonic() + self._stop_s
        while _lives(child.pid) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        # The command itself is not reaped before this, so that the group's number is still its own.
        _signal(child.pid, strays & descendants_of({os.getpid()}), signal.SIGKILL)
        child.wait(self._stop_s)


def _signal(group: int, others: set[int], number: signal.Signals) -> None:
    # To the group as a whole: a process that is just being forked is not missed.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
    end_all(others, signum=number)


def _lives(group: int) -> bool:
    """Whether any process of a group runs; those that lose their parent become children of ours."""
    for pid in descendants_of({os.getpid()}):
        with contextlib.suppress(ProcessLookupError):
            if is_running(pid) and os.getpgid(pid) == group:
                return True
    return False
