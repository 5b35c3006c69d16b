"""One stream of an HTTP/2 connection, and what the layer above attaches to it."""

from __future__ import annotations

import logging
from collections import deque
from typing import Final, Protocol, final

from regrow.wire import frames
from regrow.wire.frames import Buffer

_log = logging.getLogger(__name__)


class Handler(Protocol):
    """The receiving end of a stream: what the layer above attaches to it."""

    def data(self, view: memoryview) -> None:
        """The next bytes from the peer, or none; `view` is valid during the call only."""

    def room(self) -> memoryview | None:
        """Where the next bytes may be received to directly, if anywhere."""

    def filled(self, count: int) -> None:
        """The first `count` bytes of `room()` have been received."""

    def ended(self) -> None:
        """The peer has sent everything."""

    def over(self) -> None:
        """The stream is no more: its answer was handed to the socket, or it broke off. Once."""


class Sender(Protocol):
    """The sending half of the connection, as a stream uses it."""

    @property
    def stream_window(self) -> int:
        """The window that a new stream starts with."""

    def control(self, frame: bytes) -> None:
        """Send a frame that flow control does not apply to."""

    def queue(self, stream: Stream) -> None:
        """Give the stream a turn."""

    def end(self, stream: Stream) -> None:
        """Send the stream's trailers; all else of it has been sent."""

    def reset(self, stream: Stream, code: int) -> None:
        """Break the stream off and tell the peer."""

    def detach(self) -> None:
        """Copy what waits for the socket and points into memory of others."""


@final
class Stream:
    """One stream of a connection.

    Attributes:
        number: The stream's identifier.
        handler: Who receives; set by the connection.
        pending_bytes: What was written and waits for its turn.
        taken_bytes: What was received and not yet credited to the peer.
        peer_ended: The peer has sent everything.
        closed: Nothing more can be written.
    """

    __slots__ = (
        "_sender",
        "closed",
        "handler",
        "is_over",
        "number",
        "peer_ended",
        "pending",
        "pending_bytes",
        "queued",
        "taken_bytes",
        "trailers",
        "window",
    )

    handler: Handler

    def __init__(self, sender: Sender, number: int) -> None:
        self._sender = sender
        self.number = number
        self.window = sender.stream_window
        self.pending: deque[Buffer] = deque()
        self.pending_bytes = 0
        self.taken_bytes = 0
        self.trailers: bytes | None = None
        self.queued = False
        self.peer_ended = False
        self.closed = False
        self.is_over = False

    def headers(self, block: bytes) -> None:
        """Send the response's header block."""
        if not self.closed:
            self._sender.control(
                frames.frame(frames.HEADERS, frames.END_HEADERS, self.number, block)
            )

    def write(self, chunk: Buffer) -> None:
        """Send bytes, which must not change until they have left."""
        if self.closed:
            return
        self.pending.append(chunk)
        self.pending_bytes += len(chunk)
        if not self.queued:
            self._sender.queue(self)

    def finish(self, trailers: bytes) -> None:
        """End the response with a header block, after all that was written."""
        if self.closed:
            return
        self.closed = True
        self.trailers = trailers
        if not self.pending:
            self._sender.end(self)

    def break_off(self) -> None:
        """Send nothing more, and let go of all memory that was to be sent; the peer is not told."""
        self.closed = True
        self.pending.clear()
        self.pending_bytes = 0
        self.trailers = None
        self._sender.detach()

    def reset(self, code: int) -> None:
        """Break off, and tell the peer."""
        self._sender.reset(self, code)

    def end(self) -> None:
        """Tell the handler, once, that the stream is over."""
        if self.is_over:
            return
        self.is_over = True
        # Handlers know their stream: let go of them, or only the collector would find the two.
        handler, self.handler = self.handler, IGNORE
        try:
            handler.over()
        except Exception:  # noqa: BLE001 - the other streams have to be told all the same
            _log.exception("the end of stream %d could not be handled", self.number)


@final
class _Ignore:
    """The handler of a stream that is answered already: what still comes is dropped."""

    def data(self, view: memoryview) -> None:
        pass

    def room(self) -> memoryview | None:
        return None

    def filled(self, count: int) -> None:
        pass

    def ended(self) -> None:
        pass

    def over(self) -> None:
        pass


IGNORE: Final = _Ignore()
