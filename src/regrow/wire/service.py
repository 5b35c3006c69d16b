"""Serves the IFRT proxy's gRPC service on a Unix socket and a TCP port, on an asyncio loop.

asyncio's own transports copy what they receive and send; here non-blocking sockets hang on the loop
directly, so that bulk data moves between the socket and its final place in one system call.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol, final

from regrow.errors import ProtocolError
from regrow.wire import frames, methods, sockets
from regrow.wire.control import Accept
from regrow.wire.http2 import Connection, Limits
from regrow.wire.methods import Gateway
from regrow.wire.transfers import Session

__all__ = ["Gateway", "Limits", "Server", "Service", "Session", "serve"]

_log = logging.getLogger(__name__)

_CALLBACK_MAGIC: Final = b"RGCB\0\0\0\0"
_PREFACE_BYTES: Final = len(frames.PREFACE)
_PREFACE_TIMEOUT_S: Final = 10.0
_CLOSE_TIMEOUT_S: Final = 1.0
_ACCEPT_PAUSE_S: Final = 0.5
_MESSAGE_LIMIT_BYTES: Final = 1 << 30
# Reads and writes of one connection before the others have their turn.
_TURNS: Final = 4


async def serve(
    gateway: Gateway,
    *,
    unix_path: str | os.PathLike[str] | None,
    tcp: tuple[str, int] | None,
    limits: Limits | None = None,
    message_limit_bytes: int = _MESSAGE_LIMIT_BYTES,
) -> Server:
    """Start to serve; at least one of the addresses is given.

    Args:
        gateway: Opens sessions.
        unix_path: The Unix socket to create, for its owner only.
        tcp: Host and port; port 0 takes a free one.
        limits: What a client may ask of a connection.
        message_limit_bytes: The largest request, and what a connection may have incomplete.

    Raises:
        ClusterStartError: An address cannot be served.
    """
    service = methods.Service(gateway, message_limit_bytes)
    server = Server(service, limits or Limits())
    try:
        if unix_path is not None:
            server.listen(sockets.listen_unix(Path(unix_path)), Path(unix_path))
        if tcp is not None:
            server.listen(sockets.listen_tcp(*tcp), None)
    except BaseException:
        await server.close()
        raise
    return server


class Service(Protocol):
    """What a server serves."""

    def calls(self, peer: str, tcp: bool) -> Accept:
        """Who takes the calls of a new connection."""

    def callback_connection(self, sock: socket.socket, nonce: str) -> None:
        """A connection that is for callbacks; its first 24 bytes have been read."""


@final
class Server:
    """The listening sockets and all their connections.

    Attributes:
        port: The TCP port, if there is one.
    """

    def __init__(self, service: Service, limits: Limits) -> None:
        self.port: int | None = None
        self._service = service
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._listeners: list[socket.socket] = []
        self._unix: list[tuple[Path, int]] = []
        self._peers: set[_Peer] = set()
        self._greetings: set[_Greeting] = set()

    def listen(self, sock: socket.socket, unix_path: Path | None) -> None:
        """Accept connections from a listening socket, and own it."""
        if unix_path is not None:
            self._unix.append((unix_path, unix_path.lstat().st_ino))
        else:
            self.port = sock.getsockname()[1]
        self._listeners.append(sock)
        self._loop.add_reader(sock, self._acceptable, sock)

    async def close(self) -> None:
        """Stop to serve: end every session, close every socket, remove the Unix socket."""
        for sock in self._listeners:
            self._loop.remove_reader(sock)
            sock.close()
        self._listeners.clear()
        for path, inode in self._unix:
            sockets.remove_unix(path, inode)
        self._unix.clear()
        for greeting in list(self._greetings):
            greeting.close()
        peers = list(self._peers)
        await asyncio.gather(*(peer.close_gracefully() for peer in peers))

    def _acceptable(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # Most likely out of file descriptors: without a pause this would spin.
            _log.error("cannot accept a connection: %s", error)
            self._loop.remove_reader(listener)
            self._loop.call_later(_ACCEPT_PAUSE_S, self._accept_again, listener)
            return
        sockets.tune(sock)
        name = sockets.peer_name(sock, address)
        self._greetings.add(_Greeting(sock, name, self._greeted, self._greetings.discard))

    def _accept_again(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._loop.add_reader(listener, self._acceptable, listener)

    def _greeted(self, sock: socket.socket, name: str, preface: bytes) -> None:
        """A connection's first 24 bytes are there."""
        if preface.startswith(_CALLBACK_MAGIC):
            nonce = preface[len(_CALLBACK_MAGIC) :].decode("ascii", "replace")
            self._service.callback_connection(sock, nonce)
            return
        accept = self._service.calls(name, sock.family != socket.AF_UNIX)
        peer = _Peer(sock, name, accept, self._limits, self._peers.discard)
        self._peers.add(peer)
        peer.start(preface)


@final
class _Greeting:
    """A connection whose first 24 bytes are awaited: they tell HTTP/2 from callbacks."""

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        greeted: Callable[[socket.socket, str, bytes], None],
        forget: Callable[[_Greeting], None],
    ) -> None:
        self._sock = sock
        self._name = name
        self._greeted = greeted
        self._forget = forget
        self._received = b""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._readable)
        self._timer = self._loop.call_later(_PREFACE_TIMEOUT_S, self._expired)

    def close(self) -> None:
        """Give up."""
        self._detach()
        self._sock.close()

    def _detach(self) -> None:
        self._timer.cancel()
        self._loop.remove_reader(self._sock)
        self._forget(self)

    def _expired(self) -> None:
        _log.warning("%s said nothing for %g s after connecting", self._name, _PREFACE_TIMEOUT_S)
        self.close()

    def _readable(self) -> None:
        try:
            # No byte more: what follows is for whoever takes the socket over.
            data = self._sock.recv(_PREFACE_BYTES - len(self._received))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._received += data
        if len(self._received) == _PREFACE_BYTES:
            self._detach()
            self._greeted(self._sock, self._name, self._received)


@final
class _Peer:
    """One HTTP/2 connection on its socket."""

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        accept: Accept,
        limits: Limits,
        forget: Callable[[_Peer], None],
    ) -> None:
        self._sock = sock
        self._name = name
        self._forget = forget
        self._loop = asyncio.get_running_loop()
        self._closed = asyncio.Event()
        self._closing = False
        self._writing = False
        # A flush will come anyway: at the end of a read, of the loop's turn, or when writable.
        self._will_flush = True
        self._connection = Connection(accept, self._wake, limits)

    def start(self, preface: bytes) -> None:
        """Talk."""
        self._loop.add_reader(self._sock, self._readable)
        try:
            self._connection.feed(preface)
        except ProtocolError as error:
            self._refuse(error)
        else:
            self._flush()

    async def close_gracefully(self) -> None:
        """Tell the client that the server closes, then close."""
        self._connection.go_away()
        self._close_when_sent()
        await self._closed.wait()

    def close(self) -> None:
        """Close the socket, and end the connection's sessions."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._connection.lost()
        self._sock.close()
        self._forget(self)

    def _wake(self) -> None:
        if not self._will_flush:
            self._will_flush = True
            self._loop.call_soon(self._flush)

    def _readable(self) -> None:
        self._will_flush = True
        try:
            if not self._receive():
                self.close()
                return
        except ProtocolError as error:
            self._refuse(error)
            return
        except Exception:  # noqa: BLE001 - a fault of ours costs this client its connection only
            _log.exception("the connection of %s has to be closed", self._name)
            self.close()
            return
        self._flush()

    def _receive(self) -> bool:
        """Take what the socket has, within limits; false if the client is gone."""
        connection = self._connection
        for _ in range(_TURNS):
            try:
                count, full = self._read()
            except (BlockingIOError, InterruptedError):
                return True
            except OSError:
                return False
            if not count:
                return False
            connection.received(count)
            if not full:
                return True
        return True

    def _read(self) -> tuple[int, bool]:
        """Read once; returns how many bytes, and whether there may be more.

        On return nothing holds on to the places, whose memory a session may be about to free.
        """
        places = self._connection.buffers()
        if len(places) == 1:
            count = self._sock.recv_into(places[0])
            return count, count == len(places[0])
        count = self._sock.recvmsg_into(places)[0]
        return count, count == len(places[0]) + len(places[1])

    def _refuse(self, error: ProtocolError) -> None:
        """Say why, then close."""
        _log.warning("closing the connection of %s: %s", self._name, error)
        self._close_when_sent()

    def _close_when_sent(self) -> None:
        if self._closed.is_set():
            return
        self._loop.remove_reader(self._sock)
        self._closing = True
        self._loop.call_later(_CLOSE_TIMEOUT_S, self.close)
        self._flush()

    def _flush(self) -> None:
        if self._closed.is_set():
            return
        outbox = self._connection.outbox
        for _ in range(_TURNS):
            batch = outbox.collect()
            if not batch:
                self._all_sent()
                return
            try:
                count = self._sock.send(batch[0]) if len(batch) == 1 else self._sock.sendmsg(batch)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                self.close()
                return
            outbox.sent(count)
        self._will_flush = True
        if not self._writing:
            self._writing = True
            self._loop.add_writer(self._sock, self._flush)

    def _all_sent(self) -> None:
        self._will_flush = False
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._sock)
        if self._closing:
            self.close()
