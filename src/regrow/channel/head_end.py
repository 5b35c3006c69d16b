"""The head's end of the channels to its workers, on the asyncio loop.

    secret = new_secret()                                     # the workers get the same 32 bytes

    def authorize(hello: Hello) -> HeadChannel | str:         # a text refuses, with that reason
        return channels.get(hello.identity.slice_index, "no such slice")

    server = await serve_workers("/run/user/1000/x/workers.sock", secret, authorize)
    channel = HeadChannel("slice 0 host 0", on_payload, on_broken, on_attached)
    channel.send(b"...")           # any time from the loop's thread, also before the worker is there
    channel.send([head, array])    # several parts make one message
    channel.close(); await server.close()

One `HeadChannel` lives as long as one incarnation of one worker process. A broken connection calls
`on_broken(cause)`; when the worker is back (within the budget that the caller measures) `on_attached` is
called and nothing was lost or repeated. Buffers given to `send` are kept, not copied, until the worker
acknowledges them: they must not change. Small payloads arrive as `bytes`, large ones as `memoryview`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias, final

from regrow.channel.frames import Buffer, Frame, FrameReader
from regrow.channel.handshake import LENGTH, HeadHandshake, Hello, body_bytes
from regrow.channel.link import Link
from regrow.channel.stream import Endpoint, Stream, describe, listen, remove_socket_file, tune
from regrow.errors import ChannelError, HandshakeError, WaitTimeout

log = logging.getLogger(__name__)

Authorize: TypeAlias = "Callable[[Hello], HeadChannel | str]"

# Far more than between two steps of a training: their messages carry the acknowledgements along.
_IDLE_ACK_S: Final = 0.25
_ACCEPT_PAUSE_S: Final = 0.2
_BACKLOG: Final = 128
_UCRED: Final = struct.Struct("iII")


@final
class HeadChannel:
    """The head's end of the channel to one worker process."""

    def __init__(
        self,
        name: str,
        on_payload: Callable[[bytes | memoryview], None],
        on_broken: Callable[[str], None],
        on_attached: Callable[[], None] | None = None,
    ) -> None:
        """Makes an end that no worker is attached to yet.

        Args:
            name: Who is at the other end, for messages.
            on_payload: Called for each message, in order, each once.
            on_broken: Called with the cause when a connection breaks; not after `close`. A worker
                that breaks the protocol is not let in again.
            on_attached: Called each time the worker is connected.
        """
        self.name = name
        self._on_payload = on_payload
        self._on_broken = on_broken
        self._on_attached = on_attached
        self._link = Link()
        self._link_id: bytes | None = None
        self._stream: Stream | None = None
        self._ack_planned = False
        self._closed = False

    @property
    def connected(self) -> bool:
        """Whether the worker is connected now."""
        return self._stream is not None

    @property
    def unacked_bytes(self) -> int:
        """Payload bytes that are kept for the worker."""
        return self._link.unacked_bytes

    def send(self, payload: Buffer | Sequence[Buffer]) -> None:
        """Sends one message at once; kept for later if the worker is not connected.

        Raises:
            ResourceError: The worker is too far behind.
            FrameError: The message is empty or larger than a frame may be.
        """
        if self._closed:
            return
        frame = self._link.send(self._link.prepare(payload))
        if self._stream is not None:
            self._stream.write(frame, now=True)

    def offer(self, hello: Hello) -> int:
        """Prepares for a new connection of the worker; the number of the last message received.

        An older connection is given up: the worker has done so, or it would not connect again.

        Raises:
            HandshakeError: The channel belongs to another process, is closed or cannot resume.
        """
        if self._closed:
            raise HandshakeError(f"{self.name} is closed")
        if self._link_id not in (None, hello.link_id):
            raise HandshakeError(f"another process is {self.name}")
        if not self._link.can_resume(hello.last_received):
            raise HandshakeError(f"{self.name} cannot resume after message {hello.last_received}")
        self._link_id = hello.link_id
        self._drop_stream("the worker connects again")
        return self._link.received

    def attach(self, sock: socket.socket, peer_last_received: int) -> None:
        """Goes on over a connected socket that has been through the handshake."""
        self._drop_stream("another connection is attached")
        frames = self._link.resume(peer_last_received)
        self._stream = Stream(sock, FrameReader(self._on_frames), self._on_closed)
        self._stream.write(frames)
        if self._on_attached is not None:
            self._tell(self._on_attached)

    def sever(self) -> None:
        """Breaks the connection, as a network may do at any time."""
        if self._stream is not None:
            self._stream.shutdown()

    def close(self) -> None:
        """Ends the channel for good: what was kept is dropped, and the worker refused from now on."""
        self._closed = True
        self._link = Link()
        # Whom it tells may well hold it.
        self._on_payload = self._on_broken = _to_nobody
        self._on_attached = None
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _on_frames(self, frames: list[Frame]) -> None:
        link = self._link
        for seq, ack, payload in frames:
            if link.accept(seq, ack, len(payload)):
                self._deliver(payload)
        if link.ack_due:
            self._send_ack()
        elif link.ack_owed and not self._ack_planned:
            self._ack_planned = True
            asyncio.get_running_loop().call_later(_IDLE_ACK_S, self._idle_ack)

    def _deliver(self, payload: bytes | memoryview) -> None:
        try:
            self._on_payload(payload)
        except Exception as error:  # noqa: BLE001 (the loop's handler is told)
            _report(f"a message from {self.name} was not handled", error)

    def _idle_ack(self) -> None:
        self._ack_planned = False
        if self._link.ack_owed:
            self._send_ack()

    def _send_ack(self) -> None:
        if self._stream is not None:
            self._stream.write((self._link.ack_frame(),))

    def _tell(self, listener: Callable[..., None], *args: str) -> None:
        try:
            listener(*args)
        except Exception as error:  # noqa: BLE001 (the loop's handler is told)
            _report(f"news of {self.name} was not handled", error)

    def _on_closed(self, cause: Exception) -> None:
        self._stream = None
        # A peer that breaks the protocol would do so again with each connection.
        self._closed = self._closed or isinstance(cause, ChannelError)
        self._tell(self._on_broken, str(cause))

    def _drop_stream(self, cause: str) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
            self._tell(self._on_broken, cause)


def _to_nobody(_: object) -> None:
    """Hears what a channel tells that is closed."""


def _report(what: str, error: Exception) -> None:
    context = {"message": what, "exception": error}
    asyncio.get_running_loop().call_exception_handler(context)


@final
class WorkerServer:
    """Accepts connections of workers, until `close`."""

    def __init__(
        self,
        listener: socket.socket,
        endpoint: Endpoint,
        secret: bytes,
        authorize: Authorize,
        handshake_s: float,
        max_half_open: int,
    ) -> None:
        self._listener = listener
        self._endpoint = endpoint
        self._secret = secret
        self._authorize = authorize
        self._handshake_s = handshake_s
        self._max_half_open = max_half_open
        self._half_open: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._resume: asyncio.TimerHandle | None = None
        self._loop.add_reader(listener.fileno(), self._on_acceptable)

    @property
    def endpoint(self) -> Endpoint:
        """Where workers connect; a TCP port of 0 has become the real one."""
        if isinstance(self._endpoint, str):
            return self._endpoint
        return self._endpoint[0], int(self._listener.getsockname()[1])

    async def close(self) -> None:
        """Stops listening and drops handshakes; attached channels go on."""
        if self._listener.fileno() < 0:
            return
        self._loop.remove_reader(self._listener.fileno())
        if self._resume is not None:
            self._resume.cancel()
        self._listener.close()
        if isinstance(self._endpoint, str):
            remove_socket_file(self._endpoint)
        tasks = list(self._half_open)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_acceptable(self) -> None:
        try:
            sock, _peer = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            self._pause(error)
            return
        if len(self._half_open) >= self._max_half_open:
            sock.close()  # A worker tries again; the bound keeps strangers from using up descriptors.
            return
        task = self._loop.create_task(self._welcome(sock))
        self._half_open.add(task)
        task.add_done_callback(self._half_open.discard)

    def _pause(self, error: OSError) -> None:
        # Out of descriptors, most likely: the connection stays in the backlog and would wake us at once.
        log.warning("cannot accept a worker at %s: %s", describe(self._endpoint), error)
        self._loop.remove_reader(self._listener.fileno())
        self._resume = self._loop.call_later(
            _ACCEPT_PAUSE_S, self._loop.add_reader, self._listener.fileno(), self._on_acceptable
        )

    async def _welcome(self, sock: socket.socket) -> None:
        attached = False
        try:
            sock.setblocking(False)
            tune(sock)
            async with asyncio.timeout(self._handshake_s):
                channel, last_received = await self._shake_hands(sock)
            channel.attach(sock, last_received)
            attached = True
        except TimeoutError:
            log.info("%s", WaitTimeout("a worker's handshake", self._handshake_s))
        except (ChannelError, OSError) as error:
            log.info("a connection to %s ends: %s", describe(self._endpoint), error)
        finally:
            if not attached:
                sock.close()

    async def _shake_hands(self, sock: socket.socket) -> tuple[HeadChannel, int]:
        handshake = HeadHandshake(self._secret)
        try:
            _check_owner(sock)
            await self._loop.sock_sendall(sock, handshake.challenge())
            hello = handshake.verify(await self._read_message(sock))
            channel = self._authorize(hello)
            if isinstance(channel, str):
                raise HandshakeError(channel)
            last_received = channel.offer(hello)
        except HandshakeError as error:
            await self._loop.sock_sendall(sock, handshake.refusal(str(error)))
            raise
        await self._loop.sock_sendall(sock, handshake.welcome(last_received))
        return channel, hello.last_received

    async def _read_message(self, sock: socket.socket) -> bytes:
        length = await self._read_exactly(sock, LENGTH.size)
        return await self._read_exactly(sock, body_bytes(length))

    async def _read_exactly(self, sock: socket.socket, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = await self._loop.sock_recv(sock, size - len(data))
            if not piece:
                raise HandshakeError("the connection ended in the handshake")
            data += piece
        return bytes(data)


def _check_owner(sock: socket.socket) -> None:
    if sock.family != socket.AF_UNIX:
        return
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _pid, uid, _gid = _UCRED.unpack(credentials)
    if uid != os.geteuid():
        raise HandshakeError(f"user {uid} does not own this cluster")


async def serve_workers(
    endpoint: Endpoint,
    secret: bytes,
    authorize: Authorize,
    *,
    handshake_s: float = 2.0,
    max_half_open: int = 64,
) -> WorkerServer:
    """Listens for workers.

    Args:
        endpoint: Path of a Unix socket, or host and TCP port (0: any).
        secret: What workers must know.
        authorize: Called with the hello of each process that knows the secret; gives its channel, or
            the reason to refuse it (a stale incarnation, say). It may be called again for a connection
            that is re-made.
        handshake_s: A connection that is not through the handshake by then is closed.
        max_half_open: More connections than this in the handshake are closed at once.
    """
    return WorkerServer(
        listen(endpoint, _BACKLOG), endpoint, secret, authorize, handshake_s, max_half_open
    )
