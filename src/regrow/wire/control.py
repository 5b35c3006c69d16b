"""The frames of an HTTP/2 connection that carry no data: they open, steer and end its streams."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final, TypeAlias, final

from regrow.errors import ProtocolError
from regrow.wire import frames
from regrow.wire.headers import HeaderDecoder, Headers
from regrow.wire.sending import Outbox
from regrow.wire.streams import IGNORE, Handler, Stream


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What a peer may ask of one connection.

    Attributes:
        streams: Streams open at the same time.
        header_bytes: Size of a request's headers, coded and decoded.
        stream_window_bytes: What a peer may send on a stream before it gets credit.
        unsent_bytes: Above this much unsent answer a stream gets no more credit.
        control_bytes: Unsent control frames, beyond which the peer is cut off.
    """

    streams: int = 1000
    header_bytes: int = 64 << 10
    stream_window_bytes: int = 64 << 20
    unsent_bytes: int = 64 << 20
    control_bytes: int = 4 << 20


Accept: TypeAlias = Callable[[Stream, Headers], Handler]


@final
class Control:
    """What is known of a connection and its streams.

    Attributes:
        streams: The streams that are open, by number.
        last_stream: The highest number that was opened.
        settled: The peer has sent its settings.
        amid_block: A header block is begun, which only CONTINUATION frames may follow.
        going_away: The peer said that it will open no more streams.
    """

    def __init__(self, accept: Accept, outbox: Outbox, limits: Limits) -> None:
        self._accept = accept
        self._outbox = outbox
        self._limits = limits
        self._decoder = HeaderDecoder(limits.header_bytes)
        self._block = b""
        self._block_stream = 0
        self._block_ends = False
        self.streams: dict[int, Stream] = {}
        self.last_stream = 0
        self.settled = False
        self.amid_block = False
        self.going_away = False

    def greet(self) -> None:
        """Send our settings, and open the connection's window: streams have one each."""
        values = {
            frames.MAX_CONCURRENT_STREAMS: self._limits.streams,
            frames.INITIAL_WINDOW_SIZE: self._limits.stream_window_bytes,
            frames.MAX_FRAME_SIZE: frames.MAX_FRAME,
            frames.MAX_HEADER_LIST_SIZE: self._limits.header_bytes,
            frames.GRPC_TRUE_BINARY_METADATA: 1,
        }
        credit = frames.MAX_WINDOW - frames.DEFAULT_WINDOW
        self._outbox.control(frames.settings(values) + frames.window_update(0, credit))

    def knows(self, kind: int) -> bool:
        """Whether frames of that type are to be handled; others are skipped."""
        return kind in self._handlers

    def handle(self, kind: int, flags: int, number: int, payload: memoryview) -> None:
        """Handle a whole frame.

        Raises:
            ProtocolError: The peer broke the protocol.
        """
        self._handlers[kind](self, flags, number, payload)

    def peer_ended(self, stream: Stream) -> None:
        """The peer has sent everything on a stream."""
        stream.peer_ended = True
        stream.handler.ended()

    def _on_headers(self, flags: int, number: int, payload: memoryview) -> None:
        if flags & frames.PADDED:
            payload = _unpad(payload)
        if flags & frames.HAS_PRIORITY:
            payload = payload[5:]
        if not number & 1:
            raise ProtocolError(f"a request on stream {number}")
        self._block = bytes(payload)
        self._block_stream = number
        self._block_ends = bool(flags & frames.END_STREAM)
        self.amid_block = True
        if flags & frames.END_HEADERS:
            self._end_of_block()

    def _on_continuation(self, flags: int, number: int, payload: memoryview) -> None:
        if not self.amid_block or number != self._block_stream:
            raise ProtocolError("a CONTINUATION frame without a header block")
        if not payload and not flags & frames.END_HEADERS:
            raise ProtocolError("an empty CONTINUATION frame", frames.ENHANCE_YOUR_CALM)
        self._block += payload
        if len(self._block) > self._limits.header_bytes:
            raise ProtocolError("the request's headers are too large", frames.ENHANCE_YOUR_CALM)
        if flags & frames.END_HEADERS:
            self._end_of_block()

    def _end_of_block(self) -> None:
        headers = self._decoder.decode(self._block)
        number, self._block, self.amid_block = self._block_stream, b"", False
        if number > self.last_stream:
            self._open(number, headers)
            return
        stream = self.streams.get(number)
        if stream is None or stream.peer_ended:
            return  # crossed our reset or our answer on the way
        if not self._block_ends:
            raise ProtocolError("trailers that do not end their stream")
        self.peer_ended(stream)

    def _open(self, number: int, headers: Headers) -> None:
        self.last_stream = number
        if len(self.streams) >= self._limits.streams:
            self._outbox.control(frames.rst_stream(number, frames.REFUSED_STREAM))
            return
        stream = Stream(self._outbox, number)
        stream.handler = IGNORE
        stream.peer_ended = self._block_ends
        self.streams[number] = stream
        stream.handler = self._accept(stream, headers)
        if self._block_ends:
            stream.handler.ended()

    def _on_rst_stream(self, flags: int, number: int, payload: memoryview) -> None:
        if len(payload) != 4:
            raise ProtocolError("a RST_STREAM frame of the wrong size", frames.FRAME_SIZE_ERROR)
        if not number or number > self.last_stream:
            raise ProtocolError(f"reset of stream {number}, which was never opened")
        stream = self.streams.pop(number, None)
        if stream is not None:
            stream.break_off()
            stream.end()

    def _on_settings(self, flags: int, number: int, payload: memoryview) -> None:
        if number:
            raise ProtocolError("SETTINGS on a stream")
        if flags & frames.ACK:
            return
        if len(payload) % 6:
            raise ProtocolError("a SETTINGS frame of the wrong size", frames.FRAME_SIZE_ERROR)
        self.settled = True
        for key, value in frames.parse_settings(payload):
            if key == frames.INITIAL_WINDOW_SIZE:
                self._set_stream_window(value)
            elif key == frames.MAX_FRAME_SIZE:
                if not frames.DEFAULT_FRAME <= value <= frames.MAX_FRAME:
                    raise ProtocolError(f"a maximum frame size of {value}")
                self._outbox.max_frame = value
        self._outbox.control(frames.frame(frames.SETTINGS, frames.ACK, 0))

    def _set_stream_window(self, value: int) -> None:
        if value > frames.MAX_WINDOW:
            raise ProtocolError(f"a window of {value} bytes", frames.FLOW_CONTROL_ERROR)
        change = value - self._outbox.stream_window
        self._outbox.stream_window = value
        for stream in list(self.streams.values()):
            if not self._outbox.credit(stream, change):
                raise ProtocolError("a stream's window overflows", frames.FLOW_CONTROL_ERROR)

    def _on_ping(self, flags: int, number: int, payload: memoryview) -> None:
        if number or len(payload) != 8:
            raise ProtocolError("a PING frame of the wrong size", frames.FRAME_SIZE_ERROR)
        if not flags & frames.ACK:
            self._outbox.control(frames.frame(frames.PING, frames.ACK, 0, payload))

    def _on_goaway(self, flags: int, number: int, payload: memoryview) -> None:
        if number:
            raise ProtocolError("GOAWAY on a stream")
        self.going_away = True

    def _on_window_update(self, flags: int, number: int, payload: memoryview) -> None:
        if len(payload) != 4:
            raise ProtocolError("a WINDOW_UPDATE frame of the wrong size", frames.FRAME_SIZE_ERROR)
        credit = int.from_bytes(payload, "big") & frames.MAX_WINDOW
        if not credit:
            raise ProtocolError("a WINDOW_UPDATE of nothing")
        if not number:
            if not self._outbox.credit(None, credit):
                raise ProtocolError("the window overflows", frames.FLOW_CONTROL_ERROR)
            return
        if number > self.last_stream:
            raise ProtocolError(f"window of stream {number}, which was never opened")
        stream = self.streams.get(number)
        if stream is not None and not self._outbox.credit(stream, credit):
            stream.reset(frames.FLOW_CONTROL_ERROR)

    def _on_priority(self, flags: int, number: int, payload: memoryview) -> None:
        """Priorities are advice, which we do not take."""

    def _on_push_promise(self, flags: int, number: int, payload: memoryview) -> None:
        raise ProtocolError("a client cannot push")

    _handlers: Final = {
        frames.HEADERS: _on_headers,
        frames.PRIORITY: _on_priority,
        frames.RST_STREAM: _on_rst_stream,
        frames.SETTINGS: _on_settings,
        frames.PUSH_PROMISE: _on_push_promise,
        frames.PING: _on_ping,
        frames.GOAWAY: _on_goaway,
        frames.WINDOW_UPDATE: _on_window_update,
        frames.CONTINUATION: _on_continuation,
    }


def _unpad(payload: memoryview) -> memoryview:
    if not payload or payload[0] >= len(payload):
        raise ProtocolError("a frame's padding is larger than the frame")
    return payload[1 : len(payload) - payload[0]]
