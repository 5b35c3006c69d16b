"""What a connection has to send: flow control, fair turns among streams, and batches.

A stream's bytes wait in the stream until the windows of stream and connection, and the socket, have
room for them; only then they become frames in the outbox. So a large answer is never copied, and
never stands in the way of another stream for more than a batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Final, final

from regrow.wire import frames
from regrow.wire.frames import Buffer
from regrow.wire.streams import Stream

_BATCH_BYTES: Final = 512 << 10
_TURN_BYTES: Final = 128 << 10
_JOIN_BYTES: Final = 32 << 10
_MAX_BUFFERS: Final = 128


@final
class Outbox:
    """The sending half of a connection.

    Attributes:
        window: What the peer's window of the connection still allows.
        stream_window: The window that a new stream starts with.
        max_frame: The largest frame that the peer takes.
        bytes_out: What waits for the socket.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.window = frames.DEFAULT_WINDOW
        self.stream_window = frames.DEFAULT_WINDOW
        self.max_frame = frames.DEFAULT_FRAME
        self.bytes_out = 0
        self.on_end: Callable[[Stream], None] = _nothing
        self.on_drain: Callable[[Stream], None] = _nothing
        self._wake = wake
        self._out: deque[Buffer] = deque()
        self._ready: deque[Stream] = deque()
        self._position = 0  # of the next byte to be queued, counted from the start
        self._marks: deque[tuple[int, Stream]] = deque()

    def control(self, frame: bytes) -> None:
        """Send a frame that flow control does not apply to."""
        self._out.append(frame)
        self.bytes_out += len(frame)
        self._position += len(frame)
        self._wake()

    def queue(self, stream: Stream) -> None:
        """Give the stream a turn."""
        stream.queued = True
        self._ready.append(stream)
        self._wake()

    def credit(self, stream: Stream | None, count: int) -> bool:
        """More window from the peer, for a stream or the connection; false if it overflows."""
        if stream is None:
            self.window += count
            if self._ready:
                self._wake()
            return self.window <= frames.MAX_WINDOW
        stream.window += count
        if stream.pending and not stream.queued:
            self.queue(stream)
        return stream.window <= frames.MAX_WINDOW

    def end(self, stream: Stream) -> None:
        """Send the stream's trailers; all else of it is in the outbox."""
        assert stream.trailers is not None
        flags = frames.END_HEADERS | frames.END_STREAM
        frame = frames.frame(frames.HEADERS, flags, stream.number, stream.trailers)
        if not stream.peer_ended:
            frame += frames.rst_stream(stream.number, frames.NO_ERROR)
        stream.trailers = None
        self.control(frame)
        self._marks.append((self._position, stream))
        self.on_end(stream)

    def reset(self, stream: Stream, code: int) -> None:
        """Break a stream off and tell the peer."""
        stream.break_off()
        self.control(frames.rst_stream(stream.number, code))
        self.on_end(stream)
        stream.end()

    def detach(self) -> None:
        """Copy what has been framed already and points into memory of others."""
        if any(type(chunk) is memoryview for chunk in self._out):
            self._out = deque(
                bytes(chunk) if type(chunk) is memoryview else chunk for chunk in self._out
            )

    def collect(self) -> list[Buffer]:
        """The next buffers to hand to the socket; tell `sent` how much of them it took."""
        if self._ready and self.bytes_out < _BATCH_BYTES:
            self._fill()
        out = self._out
        if len(out) > 1 and self.bytes_out <= _JOIN_BYTES:
            joined = b"".join(out)
            out.clear()
            out.append(joined)
            return [joined]
        return list(islice(out, _MAX_BUFFERS))

    def sent(self, count: int) -> None:
        """The socket took `count` bytes of what `collect` gave."""
        out = self._out
        self.bytes_out -= count
        if not self.bytes_out:
            out.clear()
            count = 0
        while count:
            first = out[0]
            if len(first) > count:
                out[0] = memoryview(first)[count:]
                break
            count -= len(first)
            out.popleft()
        marks = self._marks
        done = self._position - self.bytes_out
        while marks and marks[0][0] <= done:
            marks.popleft()[1].end()

    def lost(self) -> None:
        """The socket is gone: let go of everything, also of its owners."""
        self._out.clear()
        self._ready.clear()
        self.bytes_out = 0
        self.on_end = self.on_drain = _nothing
        self._wake = _nobody
        while self._marks:
            self._marks.popleft()[1].end()

    def _fill(self) -> None:
        """Turn what streams have to send into frames, one frame for each in turn."""
        ready = self._ready
        limit = min(self.max_frame, _TURN_BYTES)
        while ready and self.bytes_out < _BATCH_BYTES:
            if not ready[0].pending:
                ready.popleft().queued = False
                continue
            room = min(self.window, limit)
            if room <= 0:
                return
            stream = ready.popleft()
            room = min(room, stream.window)
            stream.queued = False
            if room > 0:
                self._frame(stream, room)

    def _frame(self, stream: Stream, room: int) -> None:
        """Make one DATA frame of at most `room` bytes, and queue the stream again if it has more."""
        pending = stream.pending
        chunks: list[Buffer] = []
        size = 0
        while pending:
            chunk = pending[0]
            rest = room - size
            if len(chunk) > rest:
                if rest:
                    view = memoryview(chunk)
                    chunks.append(view[:rest])
                    pending[0] = view[rest:]
                    size = room
                break
            chunks.append(pending.popleft())
            size += len(chunk)
        self.window -= size
        stream.window -= size
        stream.pending_bytes -= size
        self._out.append(frames.pack_header(size << 8, 0, stream.number))
        self._out.extend(chunks)
        self.bytes_out += size + frames.HEADER_BYTES
        self._position += size + frames.HEADER_BYTES
        if pending:
            stream.queued = True
            self._ready.append(stream)
        elif stream.trailers is not None:
            self.end(stream)
        self.on_drain(stream)


def _nothing(stream: Stream) -> None:
    """The default of a connection's callbacks."""


def _nobody() -> None:
    """Whom an outbox wakes that has no socket."""
