"""An HTTP/2 server's end of a connection, without sockets (RFC 9113).

The socket's owner asks `buffers()` where to receive to, tells `received()` how much came, and sends
what `outbox.collect()` gives. Payload of large DATA frames goes straight to where the stream's
handler wants it, and is never copied here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

from regrow.errors import ProtocolError
from regrow.wire import frames
from regrow.wire.control import Accept, Control, Limits
from regrow.wire.frames import Buffer
from regrow.wire.sending import Outbox
from regrow.wire.streams import Stream

__all__ = ["Accept", "Connection", "Limits"]

_RING_BYTES: Final = 256 << 10
# A smaller rest of a frame is cheaper to copy than to receive into a place of its own.
_DIRECT_BYTES: Final = 8 << 10
# Behind a direct place there is only room for the next frame's head: its payload can be direct too.
_BEHIND_DIRECT_BYTES: Final = 4 << 10


@final
class Connection:
    """One connection from a client, from its preface on.

    Attributes:
        outbox: What is to be sent.
        control: The streams.
    """

    def __init__(
        self, accept: Accept, wake: Callable[[], None], limits: Limits | None = None
    ) -> None:
        self._limits = limits or Limits()
        self._credit_at = max(self._limits.stream_window_bytes // 4, 1)
        self._ring = bytearray(_RING_BYTES)
        self._view = memoryview(self._ring)
        self._whole = [self._view]
        self._position = 0
        self._have = 0
        self._preface_left: bytes = frames.PREFACE
        self._taken_bytes = 0
        # The DATA frame that is being received: its stream, and the bytes that are to come.
        self._stream: Stream | None = None
        self._end_stream = False
        self._left = 0
        self._skip = 0
        self._direct = 0
        self.outbox = Outbox(wake)
        self.outbox.on_end = self._retire
        self.outbox.on_drain = self._drained
        self.control = Control(accept, self.outbox, self._limits)
        self.control.greet()

    def buffers(self) -> list[memoryview]:
        """Where the next bytes are to be received to, in this order."""
        self._direct = 0
        rest = self._have - self._position
        if not rest and not self._left:
            self._position = self._have = 0
            return self._whole
        if self._position:
            if rest:
                self._ring[:rest] = self._ring[self._position : self._have]
            self._position, self._have = 0, rest
        tail = self._view[rest:]
        if self._left >= _DIRECT_BYTES and self._stream is not None:
            room = self._stream.handler.room()
            if room is not None and len(room) >= _DIRECT_BYTES:
                room = room[: self._left]
                self._direct = len(room)
                return [room, tail[:_BEHIND_DIRECT_BYTES]]
        return [tail]

    def feed(self, data: Buffer) -> None:
        """Take bytes from memory rather than from a socket."""
        view = memoryview(data)
        while len(view):
            count = 0
            for place in self.buffers():
                step = min(len(place), len(view))
                place[:step] = view[:step]
                view = view[step:]
                count += step
            self.received(count)

    def received(self, count: int) -> None:
        """`count` bytes are in `buffers()`.

        Raises:
            ProtocolError: The peer broke the protocol; send the outbox (it ends with a GOAWAY that
                tells why), then close.
        """
        try:
            if self._direct:
                count -= self._took_direct(count)
            self._have += count
            self._parse()
            if self.outbox.bytes_out > self._limits.control_bytes:
                raise ProtocolError(
                    "the peer does not read what it asked for", frames.ENHANCE_YOUR_CALM
                )
        except ProtocolError as error:
            self.outbox.control(frames.goaway(self.control.last_stream, error.code, str(error)))
            raise

    def lost(self) -> None:
        """The connection is gone; every stream is over."""
        streams = list(self.control.streams.values())
        self.control.streams.clear()
        self._stream = None
        # Whoever may still hold on to this connection, its buffer goes at once.
        self._ring = bytearray()
        self._view = memoryview(self._ring)
        self._whole = [self._view]
        self._position = self._have = self._left = 0
        self.outbox.lost()
        for stream in streams:
            stream.break_off()
            stream.end()

    def go_away(self) -> None:
        """Ask the peer to open no more streams."""
        last, text = self.control.last_stream, "the server closes"
        self.outbox.control(frames.goaway(last, frames.NO_ERROR, text))

    def _parse(self) -> None:
        """Handle every frame that is complete, and what is there of a DATA frame that is not."""
        ring, view, control = self._ring, self._view, self.control
        have, credit_at = self._have, self._credit_at
        if self._preface_left or self._left or self._skip:
            self._resume()
        position = self._position
        # Nothing may come amid a header block: then the fast path knows no stream.
        streams = {} if control.amid_block else control.streams
        while have - position >= 9:
            word, flags, number = frames.unpack_header(ring, position)
            start = position + 9
            end = start + (word >> 8)
            if not word & 255 and flags < 2 and end <= have and number in streams:
                # A whole DATA frame without padding: nearly all there is.
                stream = streams[number]
                if stream.peer_ended:
                    raise ProtocolError("data on a stream that has ended", frames.STREAM_CLOSED)
                position = end
                stream.handler.data(view[start:end])
                end -= start
                stream.taken_bytes += end
                self._taken_bytes += end
                if stream.taken_bytes >= credit_at or self._taken_bytes >= credit_at:
                    self._give_credit(stream)
                if flags and number in streams:
                    control.peer_ended(stream)
                continue
            self._position = position
            if not self._other_frame(word & 255, flags, number & 0x7FFFFFFF, start, end):
                return
            position = self._position
            streams = {} if control.amid_block else control.streams
        self._position = position

    def _resume(self) -> None:
        """Go on with what has come in part only: the preface, data, padding or an unknown frame."""
        if self._preface_left:
            step = min(len(self._preface_left), self._have - self._position)
            found = self._ring[self._position : self._position + step]
            if found != self._preface_left[:step]:
                raise ProtocolError("the peer does not speak HTTP/2")
            self._preface_left = self._preface_left[step:]
            self._position += step
        if self._left:
            step = min(self._left, self._have - self._position)
            view = self._view[self._position : self._position + step]
            self._position += step
            self._left -= step
            if self._stream is not None and step:
                self._stream.handler.data(view)
            self._took(self._stream, step)
            if not self._left:
                self._end_of_data()
        if self._skip and not self._left:
            step = min(self._skip, self._have - self._position)
            self._position += step
            self._skip -= step

    def _other_frame(self, kind: int, flags: int, number: int, start: int, end: int) -> bool:
        """Handle a frame that is not a plain DATA frame; false if more of it has to come."""
        control, length = self.control, end - start
        if not control.settled and kind != frames.SETTINGS:
            raise ProtocolError("the connection does not begin with SETTINGS")
        if control.amid_block and kind != frames.CONTINUATION:
            raise ProtocolError("a header block is interrupted by another frame")
        if kind == frames.DATA:
            return self._data_frame(flags, number, start, length)
        if not control.knows(kind):
            self._position = start
            self._skip = length
            self._resume()
            return not self._skip
        if length > self._limits.header_bytes:
            raise ProtocolError("a control frame is too large", frames.FRAME_SIZE_ERROR)
        if end > self._have:
            return False
        self._position = end
        control.handle(kind, flags, number, self._view[start:end])
        return True

    def _data_frame(self, flags: int, number: int, start: int, length: int) -> bool:
        """Begin to receive a DATA frame that is padded, incomplete or on a closed stream."""
        padding = 0
        if flags & frames.PADDED:
            if not length:
                raise ProtocolError("a padded frame is empty", frames.FRAME_SIZE_ERROR)
            if start >= self._have:
                return False
            padding = self._ring[start] + 1
            start += 1
            if padding > length:
                raise ProtocolError("a frame's padding is larger than the frame")
        if number == 0 or number > self.control.last_stream:
            raise ProtocolError(f"data on stream {number}, which was never opened")
        stream = self.control.streams.get(number)
        if stream is not None and stream.peer_ended:
            raise ProtocolError("data on a stream that has ended", frames.STREAM_CLOSED)
        self._position = start
        self._stream = stream
        self._end_stream = bool(flags & frames.END_STREAM)
        self._left = length - padding
        self._skip = max(padding - 1, 0)
        self._took(stream, padding)
        if not self._left:
            self._end_of_data()
        self._resume()
        return not self._left and not self._skip

    def _took_direct(self, count: int) -> int:
        """Account for bytes that a handler's own memory has received; returns how many."""
        stream, count = self._stream, min(count, self._direct)
        assert stream is not None
        stream.handler.filled(count)
        self._left -= count
        self._took(stream, count)
        if not self._left:
            self._end_of_data()
        return count

    def _end_of_data(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None and self._end_stream:
            self.control.peer_ended(stream)

    def _took(self, stream: Stream | None, count: int) -> None:
        """Account for received payload, and give the peer credit for it."""
        self._taken_bytes += count
        if stream is not None:
            stream.taken_bytes += count
        self._give_credit(stream)

    def _give_credit(self, stream: Stream | None) -> None:
        if self._taken_bytes >= self._credit_at:
            self.outbox.control(frames.window_update(0, self._taken_bytes))
            self._taken_bytes = 0
        if stream is None or stream.taken_bytes < self._credit_at or stream.peer_ended:
            return
        if stream.taken_bytes > self._limits.stream_window_bytes:
            raise ProtocolError("more data than the stream's window", frames.FLOW_CONTROL_ERROR)
        if stream.number not in self.control.streams:
            return
        if stream.pending_bytes <= self._limits.unsent_bytes:
            self.outbox.control(frames.window_update(stream.number, stream.taken_bytes))
            stream.taken_bytes = 0

    def _drained(self, stream: Stream) -> None:
        """Some of the stream's answer has left: credit that was held back may be due."""
        if stream.taken_bytes >= self._credit_at:
            self._give_credit(stream)

    def _retire(self, stream: Stream) -> None:
        """The stream needs no more frames."""
        self.control.streams.pop(stream.number, None)
        if self._stream is stream:
            self._stream = None
