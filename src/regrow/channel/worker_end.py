"""A worker's end of the channel to the head, on threads.

    channel = WorkerChannel(endpoint, secret, Identity("worker", 0, 0, 1, os.getpid()),
                            on_payload, on_lost)
    channel.connect(timeout_s=10)     # waits for the head; then a thread calls on_payload(payload)
    channel.send(b"...")              # from any thread, also from a finalizer; does not wait for others
    channel.flush(timeout_s=5)        # waits until the head has everything
    channel.close()

When the connection breaks, the channel connects again within `budget_s` and nothing is lost or repeated;
when the budget is over, or the head refuses, `on_lost(cause)` is called once from the reader thread.
`on_payload` runs on that thread too: what it takes long for, other messages wait for. Buffers given to
`send` are kept, not copied, until the head acknowledges them: they must not change. Small payloads arrive
as `bytes`, large ones as `memoryview`.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, final

from regrow.channel.frames import Buffer, Frame, FrameReader
from regrow.channel.handshake import (
    LENGTH,
    Hello,
    Identity,
    Welcome,
    WorkerHandshake,
    body_bytes,
    new_link_id,
)
from regrow.channel.link import MAX_UNACKED_BYTES, Link, Message
from regrow.channel.stream import BlockingStream, Endpoint, connect, describe, tune
from regrow.errors import ChannelError, HandshakeError, WaitTimeout

log = logging.getLogger(__name__)

_IDLE_ACK_S: Final = 0.25
_FIRST_PAUSE_S: Final = 0.005
_LONGEST_PAUSE_S: Final = 0.1
_HANDSHAKE_S: Final = 2.0


@final
class WorkerChannel:
    """The worker's end; see the module's text for its use."""

    def __init__(
        self,
        endpoint: Endpoint,
        secret: bytes,
        identity: Identity,
        on_payload: Callable[[bytes | memoryview], None],
        on_lost: Callable[[str], None],
        *,
        budget_s: float = 3.0,
        max_unacked_bytes: int = MAX_UNACKED_BYTES,
    ) -> None:
        """Makes an end that is not connected yet.

        Args:
            endpoint: Where the head listens.
            secret: The cluster's secret.
            identity: Who this process is.
            on_payload: Called on the reader thread for each message, in order, each once.
            on_lost: Called once, with the cause, when the head is out of reach for good.
            budget_s: How long to try to connect again after a break.
            max_unacked_bytes: `send` refuses once so much is kept for the head.
        """
        self._endpoint = endpoint
        self._secret = secret
        self._identity = identity
        self._link_id = new_link_id()
        self._on_payload = on_payload
        self._on_lost = on_lost
        self._budget_s = budget_s
        self._link = Link(max_unacked_bytes)
        self._inbox: deque[Message] = deque()
        self._ack_wanted = False
        # Guards the sending half of the link and `_stream`. Senders only try it: who holds it also
        # sends what others queue meanwhile, so that no thread (and no finalizer) waits for another's.
        self._sending = threading.Lock()
        self._stream: BlockingStream | None = None
        self._all_acked = threading.Condition()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def connect(self, timeout_s: float) -> Welcome:
        """Connects to the head and starts the reader thread.

        Raises:
            WaitTimeout: The head did not answer in that time.
            HandshakeError: The head refuses this process, or does not know the secret.
        """
        stream, welcome = self._connect(timeout_s)
        self._resume(stream, welcome)
        self._thread = threading.Thread(
            target=self._run, args=(stream,), name="regrow-channel", daemon=True
        )
        self._thread.start()
        return welcome

    def send(self, payload: Buffer | Sequence[Buffer]) -> None:
        """Sends one message; kept for later while the connection is broken.

        Raises:
            ResourceError: The head is too far behind.
            FrameError: The message is empty or larger than a frame may be.
        """
        self._inbox.append(self._link.prepare(payload))
        self._pump()

    def flush(self, timeout_s: float) -> None:
        """Waits until the head has acknowledged everything that was sent.

        Raises:
            WaitTimeout: It has not in that time.
        """
        link = self._link
        with self._all_acked:
            done = self._all_acked.wait_for(
                lambda: not self._inbox and link.acked == link.sent, timeout_s
            )
        if not done:
            raise WaitTimeout("the head to acknowledge what this worker sent", timeout_s)

    def close(self) -> None:
        """Ends the channel at once; `on_lost` is not called."""
        self._closing.set()
        stream = self._stream
        if stream is not None:
            stream.shutdown()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_HANDSHAKE_S + 1)

    def _pump(self) -> None:
        # After the release the queue is looked at again: another thread may have failed to get the
        # lock just before it, and left its message to us.
        while (self._inbox or self._ack_wanted) and self._sending.acquire(blocking=False):
            try:
                self._send_queued()
            finally:
                self._sending.release()

    def _send_queued(self) -> None:
        out: list[Buffer] = []
        while self._inbox:
            # Taken off the queue only when the link counts it, or `flush` would overlook it.
            out.extend(self._link.send(self._inbox[0]))
            self._inbox.popleft()
        if self._ack_wanted:
            self._ack_wanted = False
            if self._link.ack_owed:
                out.append(self._link.ack_frame())
        if out and self._stream is not None:
            self._write(self._stream, out)

    def _write(self, stream: BlockingStream, bufs: list[Buffer]) -> None:
        try:
            stream.write(bufs)
        except OSError as error:
            log.info("writing to the head failed: %s", error)
            self._stream = None
            stream.shutdown()  # Wakes the reader, which connects again; the link kept the messages.

    def _resume(self, stream: BlockingStream, welcome: Welcome) -> None:
        with self._sending:
            frames = self._link.resume(welcome.last_received)
            self._stream = stream
            self._write(stream, frames)
        self._pump()

    def _run(self, stream: BlockingStream) -> None:
        while True:
            try:
                cause = self._read_until_broken(stream)
                log.info("the connection to the head broke: %s", cause)
                stream, welcome = self._connect(self._budget_s)
                self._resume(stream, welcome)
            except (ChannelError, WaitTimeout) as error:
                if not self._closing.is_set():
                    self._on_lost(str(error))
                return

    def _read_until_broken(self, stream: BlockingStream) -> str:
        reader, link = FrameReader(self._on_frames), self._link
        try:
            while not self._closing.is_set():
                if link.ack_owed and not stream.readable(_IDLE_ACK_S):
                    self._ack()
                count = stream.recv_into(reader.buffer())
                if not count:
                    return "the head closed the connection"
                reader.received(count)
            return "this end closed the connection"
        except OSError as error:
            return str(error)
        finally:
            stream.shutdown()
            with self._sending:
                self._stream = None
                stream.close()

    def _on_frames(self, frames: list[Frame]) -> None:
        link = self._link
        acked = link.acked
        for seq, ack, payload in frames:
            if link.accept(seq, ack, len(payload)):
                self._deliver(payload)
        if link.ack_due:
            self._ack()
        if link.acked != acked and link.acked == link.sent:
            with self._all_acked:
                self._all_acked.notify_all()

    def _deliver(self, payload: bytes | memoryview) -> None:
        try:
            self._on_payload(payload)
        except Exception:
            log.exception("a message from the head was not handled")

    def _ack(self) -> None:
        self._ack_wanted = True
        self._pump()

    def _connect(self, timeout_s: float) -> tuple[BlockingStream, Welcome]:
        deadline = time.monotonic() + timeout_s
        pause_s, left_s = _FIRST_PAUSE_S, timeout_s
        last_error: OSError | None = None
        while left_s > 0 and not self._closing.is_set():
            try:
                return self._try_connect(min(left_s, _HANDSHAKE_S))
            except OSError as error:
                last_error = error
            self._closing.wait(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            left_s = deadline - time.monotonic()
        raise WaitTimeout(f"the head at {describe(self._endpoint)} ({last_error})", timeout_s)

    def _try_connect(self, timeout_s: float) -> tuple[BlockingStream, Welcome]:
        sock = connect(self._endpoint, timeout_s)
        with contextlib.ExitStack() as on_error:
            on_error.callback(sock.close)
            tune(sock)
            hello = Hello(self._identity, self._link_id, self._link.received)
            handshake = WorkerHandshake(self._secret, hello)
            sock.sendall(handshake.answer(_read_message(sock)))
            welcome = handshake.finish(_read_message(sock))
            if not self._link.can_resume(welcome.last_received):
                raise HandshakeError(f"cannot resume after message {welcome.last_received}")
            on_error.pop_all()
        return BlockingStream(sock), welcome


def _read_message(sock: socket.socket) -> bytes:
    length = _read_exactly(sock, LENGTH.size)
    return _read_exactly(sock, body_bytes(length))


def _read_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionError("the head closed the connection in the handshake")
        data += piece
    return bytes(data)
