"""Byte streams over sockets: `Stream` on an asyncio loop, `BlockingStream` for threads.

asyncio's own transports copy what they read and what they could not write at once; these receive into
memory that the receiver names and keep references to what is still to be written.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, Protocol, TypeAlias, final

from regrow.channel.frames import Buffer
from regrow.errors import RegrowError, UsageError

Endpoint: TypeAlias = str | tuple[str, int]
"""The path of a Unix socket, or a host and a TCP port."""

_SOCKET_BUFFER_BYTES: Final = 4 << 20
_IOV_MAX: Final = 512
_READ_BUDGET_BYTES: Final = 8 << 20
_WRITE_BUDGET_BYTES: Final = 16 << 20
_UNIX_PATH_BYTES: Final = 107
_DEAD_PEER_MS: Final = 5000


class Receiver(Protocol):
    """Where a stream puts what it reads."""

    def buffer(self) -> memoryview:
        """Where the next bytes go; not empty."""

    def received(self, count: int) -> None:
        """`count` bytes are in the buffer; a RegrowError closes the stream."""


def describe(endpoint: Endpoint) -> str:
    """An endpoint as a person writes it."""
    return f"unix:{endpoint}" if isinstance(endpoint, str) else f"{endpoint[0]}:{endpoint[1]}"


def tune(sock: socket.socket) -> None:
    """Sets what a channel's socket needs: large send buffer, no delay, an end to dead TCP peers."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_PEER_MS)


def listen(endpoint: Endpoint, backlog: int) -> socket.socket:
    """A non-blocking listening socket; a dead socket file in the way is replaced."""
    if not isinstance(endpoint, str):
        sock = socket.create_server(endpoint, backlog=backlog)
        sock.setblocking(False)
        return sock
    _check_unix_path(endpoint)
    remove_socket_file(endpoint)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(endpoint)
        Path(endpoint).chmod(0o600)
        sock.listen(backlog)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def remove_socket_file(path: str) -> None:
    """Removes the file of a Unix socket, if it is there and is one."""
    if Path(path).is_socket():
        Path(path).unlink(missing_ok=True)


def connect(endpoint: Endpoint, timeout_s: float) -> socket.socket:
    """A connected socket whose every operation has that timeout."""
    if not isinstance(endpoint, str):
        return socket.create_connection(endpoint, timeout_s)
    _check_unix_path(endpoint)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(timeout_s)
        sock.connect(endpoint)
    except BaseException:
        sock.close()
        raise
    return sock


def _check_unix_path(path: str) -> None:
    if len(os.fsencode(path)) > _UNIX_PATH_BYTES:
        raise UsageError(
            f"the socket path {path} is longer than the {_UNIX_PATH_BYTES} bytes that the system "
            "allows; choose a shorter folder"
        )


def drop_written(bufs: deque[Buffer], count: int) -> None:
    """Takes `count` written bytes, and empty buffers after them, off the front."""
    while bufs:
        first = bufs[0]
        size = first.nbytes if isinstance(first, memoryview) else len(first)
        if count < size:
            if count:
                bufs[0] = memoryview(first)[count:]
            return
        count -= size
        bufs.popleft()


@final
class Stream:
    """A socket on the running loop. All methods are for the loop's thread.

    Everything written in one turn of the loop goes out in one `sendmsg`; what is written while
    received bytes are handled goes out right after that. Buffers must be flat and must not change
    until they are out.

    Attributes:
        open: False once the stream is closed, by either side.
    """

    def __init__(
        self, sock: socket.socket, receiver: Receiver, on_closed: Callable[[Exception], None]
    ) -> None:
        """Takes over a connected socket.

        Args:
            sock: The socket; the stream closes it.
            receiver: Gets what comes in.
            on_closed: Called once, with the cause, when the peer or an error closes the stream;
                not after `close`.
        """
        sock.setblocking(False)
        self.open = True
        self._sock = sock
        self._fd = sock.fileno()
        self._receiver = receiver
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._out: deque[Buffer] = deque()
        self._flush_planned = False
        self._waiting_writable = False
        self._deaf = False
        self._loop.add_reader(self._fd, self._on_readable)

    def write(self, bufs: Iterable[Buffer], *, now: bool = False) -> None:
        """Queues buffers to be sent; dropped if the stream is closed.

        Args:
            bufs: What to send.
            now: Nothing else will be written in this turn: what can go out does so at once.
        """
        if not self.open or self._deaf:
            return
        self._out.extend(bufs)
        if self._flush_planned or self._waiting_writable:
            return
        if now:
            self._flush_now()
        else:
            self._flush_planned = True
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Closes the socket at once; what is queued is dropped."""
        if not self.open:
            return
        self.open = False
        self._loop.remove_reader(self._fd)
        if self._waiting_writable:
            self._loop.remove_writer(self._fd)
        self._out.clear()
        self._sock.close()

    def shutdown(self) -> None:
        """Ends both directions, as a broken connection does: reading will find the end."""
        with contextlib.suppress(OSError):  # The peer was faster.
            self._sock.shutdown(socket.SHUT_RDWR)

    def _fail(self, cause: Exception) -> None:
        if self.open:
            self.close()
            self._on_closed(cause)

    def _on_readable(self) -> None:
        # Stops `write` from planning a flush: this method ends with one.
        planned, self._flush_planned = self._flush_planned, True
        try:
            self._read()
        except (BlockingIOError, InterruptedError):
            pass
        except (OSError, RegrowError) as error:
            self._fail(error)
        finally:
            self._flush_planned = planned
        if self._out and not self._waiting_writable:
            self._flush_now()

    def _read(self) -> None:
        budget = _READ_BUDGET_BYTES
        receiver = self._receiver
        while self.open and budget > 0:
            buffer = receiver.buffer()
            count = self._sock.recv_into(buffer)
            if not count:
                raise ConnectionError("the peer closed the connection")
            receiver.received(count)
            if count < len(buffer):
                return
            budget -= count

    def _flush(self) -> None:
        self._flush_planned = False
        if self.open and self._out and not self._waiting_writable:
            self._flush_now()

    def _on_writable(self) -> None:
        self._waiting_writable = False
        self._loop.remove_writer(self._fd)
        self._flush_now()

    def _flush_now(self) -> None:
        try:
            self._send_some()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            # The peer is gone, but its last words may wait to be read: reading will find the end.
            self._deaf = True
            self._out.clear()
        if self._out:
            self._waiting_writable = True
            self._loop.add_writer(self._fd, self._on_writable)

    def _send_some(self) -> None:
        out, budget = self._out, _WRITE_BUDGET_BYTES
        while out and budget > 0:
            if len(out) == 1:
                count = self._sock.send(out[0])
            else:
                count = self._sock.sendmsg(islice(out, _IOV_MAX))
            drop_written(out, count)
            budget -= count


@final
class BlockingStream:
    """A blocking socket that one thread reads and another writes."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock.fileno(), select.POLLIN)

    def readable(self, timeout_s: float) -> bool:
        """Whether bytes, or the end of the stream, come in within that time."""
        return bool(self._poll.poll(timeout_s * 1000))

    def recv_into(self, buffer: memoryview) -> int:
        """Waits for bytes; 0 at the end of the stream."""
        return self._sock.recv_into(buffer)

    def write(self, bufs: Sequence[Buffer]) -> None:
        """Sends all of it.

        Raises:
            OSError: The connection is broken.
        """
        if len(bufs) == 1:
            self._sock.sendall(bufs[0])
            return
        out = deque(bufs)
        while out:
            drop_written(out, self._sock.sendmsg(islice(out, _IOV_MAX)))

    def shutdown(self) -> None:
        """Ends both directions, which wakes the threads that wait in them."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # The peer was faster.

    def close(self) -> None:
        """Closes the socket; nobody may be waiting in it."""
        self._sock.close()
