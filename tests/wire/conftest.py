"""A client's end of HTTP/2 without sockets, and a head that only stores host buffers."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Iterable
from typing import Any

import hpack
import pytest
from hypothesis import settings

from regrow.errors import Code, StatusError
from regrow.wire import frames, schema
from regrow.wire.http2 import Connection, Limits
from regrow.wire.streams import Stream

# Machines that run tests are busy: how long an example takes says nothing.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@dataclasses.dataclass
class Frame:
    kind: int
    flags: int
    stream: int
    payload: bytes


@dataclasses.dataclass
class Reply:
    """What came on one stream."""

    headers: dict[bytes, bytes] = dataclasses.field(default_factory=dict)
    data: bytes = b""
    ended: bool = False
    reset: int | None = None

    @property
    def status(self) -> int:
        return int(self.headers[b"grpc-status"])

    @property
    def messages(self) -> list[bytes]:
        found, rest = [], self.data
        while rest:
            size = int.from_bytes(rest[1:5], "big")
            assert rest[0] == 0
            assert len(rest) >= size + 5
            found.append(rest[5 : 5 + size])
            rest = rest[5 + size :]
        return found


class H2Client:
    """Talks to a Connection in memory, keeps the windows, and checks that they are kept."""

    def __init__(
        self,
        accept: Callable[[Stream, Any], Any],
        limits: Limits | None = None,
        *,
        window: int = frames.DEFAULT_WINDOW,
        max_frame: int = frames.DEFAULT_FRAME,
    ) -> None:
        self.wakes = 0
        self.connection = Connection(accept, self._woken, limits)
        self.frames: list[Frame] = []
        self.replies: dict[int, Reply] = {}
        self.window = frames.DEFAULT_WINDOW  # what the server may send on the connection
        self.initial_window = window
        self.stream_windows: dict[int, int] = {}
        self.max_frame = max_frame
        self.credit: dict[int, int] = {}
        self._encoder = hpack.Encoder()
        self._decoder = hpack.Decoder()
        self._partial = b""
        settings = {frames.INITIAL_WINDOW_SIZE: window, frames.MAX_FRAME_SIZE: max_frame}
        self.send(frames.PREFACE + frames.settings(settings))

    def _woken(self) -> None:
        self.wakes += 1

    def send(self, data: bytes, chunks: Iterable[int] = ()) -> None:
        """Hands bytes to the server in pieces of the given sizes, the rest in one."""
        position = 0
        for size in chunks:
            self.connection.feed(data[position : position + size])
            position += size
        self.connection.feed(data[position:])

    def block(self, path: str, metadata: dict[str, bytes | str] | None = None) -> bytes:
        fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "here"}
        fields |= {"content-type": "application/grpc", "te": "trailers"}
        return bytes(self._encoder.encode([*fields.items(), *(metadata or {}).items()]))

    def request(
        self, stream: int, path: str = "/x", metadata: Any = None, *, end: bool = False
    ) -> bytes:
        flags = frames.END_HEADERS | (frames.END_STREAM if end else 0)
        self.stream_windows[stream] = self.initial_window
        return frames.frame(frames.HEADERS, flags, stream, self.block(path, metadata))

    def grant(self, stream: int, count: int) -> None:
        if stream:
            self.stream_windows[stream] += count
        else:
            self.window += count
        self.send(frames.window_update(stream, count))

    def pump(self, limit: int | None = None) -> list[Frame]:
        """Takes what the server has to send, up to a number of bytes."""
        new: list[Frame] = []
        outbox = self.connection.outbox
        while batch := outbox.collect():
            data = b"".join(batch)
            if limit is not None:
                data = data[:limit]
                limit -= len(data)
            outbox.sent(len(data))
            self._partial += data
            new += self._parse()
            if limit == 0:
                break
        self.frames += new
        return new

    def _parse(self) -> list[Frame]:
        new = []
        while len(self._partial) >= 9:
            word, flags, stream = frames.unpack_header(self._partial)
            end = 9 + (word >> 8)
            if len(self._partial) < end:
                break
            new.append(Frame(word & 255, flags, stream, self._partial[9:end]))
            self._partial = self._partial[end:]
            self._take(new[-1])
        return new

    def _take(self, frame: Frame) -> None:
        reply = self.replies.setdefault(frame.stream, Reply())
        if frame.kind == frames.DATA:
            size = len(frame.payload)
            assert size <= self.max_frame
            self.window -= size
            self.stream_windows[frame.stream] -= size
            assert self.window >= 0
            assert self.stream_windows[frame.stream] >= 0
            assert reply.headers
            assert not reply.ended
            reply.data += frame.payload
        elif frame.kind == frames.HEADERS:
            assert not reply.ended
            reply.headers |= dict(self._decoder.decode(frame.payload, raw=True))
        elif frame.kind == frames.RST_STREAM:
            reply.reset = int.from_bytes(frame.payload, "big")
        elif frame.kind == frames.WINDOW_UPDATE:
            credit = int.from_bytes(frame.payload, "big")
            self.credit[frame.stream] = self.credit.get(frame.stream, 0) + credit
        if frame.kind in (frames.DATA, frames.HEADERS) and frame.flags & frames.END_STREAM:
            reply.ended = True

    def goaway_code(self) -> int | None:
        """The code of the last GOAWAY that came."""
        found = [frame for frame in self.frames if frame.kind == frames.GOAWAY]
        return int.from_bytes(found[-1].payload[4:8], "big") if found else None


class FakeSession:
    """Answers each request with itself, and keeps host buffers in a dictionary."""

    def __init__(self, session_id: int, send: Callable[[bytes], None]) -> None:
        self.session_id = session_id
        self.send = send
        self.requests: list[bytes] = []
        self.events: list[Any] = []
        self.buffers: dict[int, memoryview] = {}
        self.limit_bytes = 4 << 30
        self.on_request: Callable[[bytes], None] = send

    def request(self, data: bytes) -> None:
        assert type(data) is bytes
        self.requests.append(data)
        self.on_request(data)

    def store_begin(self, handle: int, size: int) -> memoryview:
        if size > self.limit_bytes:
            raise StatusError(Code.RESOURCE_EXHAUSTED, f"{size} bytes are too much — 100%")
        self.events.append(("begin", handle, size))
        self.buffers[handle] = memoryview(bytearray(size))
        return self.buffers[handle]

    def store_end(self, handle: int) -> None:
        self.events.append(("end", handle))

    def store_abort(self, handle: int) -> None:
        self.events.append(("abort", handle))
        del self.buffers[handle]

    def lookup(self, handle: int) -> memoryview | None:
        return self.buffers.get(handle)

    def delete(self, handle: int) -> None:
        self.events.append(("delete", handle))
        self.buffers.pop(handle, None)

    def closed(self) -> None:
        self.events.append("closed")


class FakeGateway:
    """Sessions by number; `opened` has the arguments of each `open`."""

    def __init__(self) -> None:
        self.sessions: dict[int, FakeSession] = {}
        self.opened: list[tuple[Any, ...]] = []
        self.callbacks: list[tuple[socket.socket, str]] = []
        self.refusal: Exception | None = None

    def negotiate(self, min_protocol: int, max_protocol: int, max_serdes: int) -> tuple[int, int]:
        if min_protocol > 25:
            raise StatusError(Code.FAILED_PRECONDITION, "this server talks protocols 16 to 25")
        return min(25, max_protocol), max_serdes

    def open(self, *args: Any) -> FakeSession:
        if self.refusal is not None:
            raise self.refusal
        self.opened.append(args[:-1])
        number = len(self.opened)
        self.sessions[number] = FakeSession(number, args[-1])
        return self.sessions[number]

    def session(self, session_id: int) -> FakeSession | None:
        found = self.sessions.get(session_id)
        return None if found is None or "closed" in found.events else found

    def callback_connection(self, sock: socket.socket, nonce: str) -> None:
        self.callbacks.append((sock, nonce))


def session_metadata(**attributes: Any) -> bytes:
    """A serialized GrpcIfrtSessionMetadata."""
    message = schema.proxy.GrpcIfrtSessionMetadata()
    message.version.protocol_version = 25
    message.version.ifrt_serdes_version_number = 6
    for key, value in attributes.items():
        field = message.initialization_data.attributes[key]
        if isinstance(value, list):
            field.int64_list_value.elements.extend(value)
        else:
            kind = {bytes: "string", bool: "bool", int: "int64", float: "float"}[type(value)]
            setattr(field, f"{kind}_value", value)
    return bytes(message.SerializeToString())


@pytest.fixture(scope="session")
def h2_client() -> type[H2Client]:
    return H2Client


@pytest.fixture
def gateway() -> FakeGateway:
    return FakeGateway()


@pytest.fixture(scope="session")
def new_gateway() -> type[FakeGateway]:
    return FakeGateway


@pytest.fixture(scope="session")
def new_session_metadata() -> Callable[..., bytes]:
    return session_metadata
