"""The six methods, without sockets."""

from __future__ import annotations

import base64
import os
from typing import Any
from urllib.parse import unquote

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.errors import Code, StatusError
from regrow.wire import frames, grpc, schema
from regrow.wire.http2 import Limits
from regrow.wire.methods import Calls, Service
from regrow.wire.unary import Unary

SERVICE = "/xla.ifrt.proxy.GrpcIfrtService/"
SESSION_KEY = "ifrt-proxy-grpc-ifrt-session-metadata-bin"
STORE_KEY = "ifrt-proxy-grpc-host-buffer-store-metadata-bin"


def message(payload: bytes) -> bytes:
    return b"\0" + len(payload).to_bytes(4, "big") + payload


def data(stream: int, payload: bytes = b"", *, end: bool = False) -> bytes:
    flags = frames.END_STREAM if end else 0
    return frames.frame(frames.DATA, flags, stream, payload)


def b64(value: bytes) -> str:
    return base64.b64encode(value).decode().rstrip("=")


class Wire:
    """A service, and clients of it."""

    def __init__(self, h2_client: Any, gateway: Any, metadata: Any, **options: Any) -> None:
        self.gateway = gateway
        self.metadata = metadata
        self.service = Service(gateway, options.get("message_limit_bytes", 1 << 20))
        self._h2_client = h2_client
        self._next = 1

    def client(self, **options: Any) -> Any:
        calls = Calls(self.service, "process 7", tcp=False)
        return self._h2_client(calls.accept, options.pop("limits", None), **options)

    def next_stream(self) -> int:
        self._next += 2
        return self._next - 2

    def open(self, client: Any, **attributes: Any) -> tuple[int, Any]:
        stream = self.next_stream()
        value = b64(self.metadata(**attributes))
        client.send(client.request(stream, SERVICE + "IfrtSession", {SESSION_KEY: value}))
        client.pump()
        return stream, self.gateway.sessions.get(len(self.gateway.opened))

    def call(self, client: Any, method: str, request: Any, *, pump: bool = True) -> int:
        stream = self.next_stream()
        sent = request if isinstance(request, bytes) else request.SerializeToString()
        client.send(client.request(stream, SERVICE + method))
        client.send(data(stream, message(sent), end=True))
        if pump:
            client.pump()
        return stream

    def begin_store(self, client: Any, session: int, handle: int, size: int) -> int:
        stream = self.next_stream()
        metadata = schema.proxy.GrpcHostBufferStoreMetadata(
            session_id=session, handle=handle, buffer_size=size
        )
        value = b64(metadata.SerializeToString())
        client.send(client.request(stream, SERVICE + "HostBufferStore", {STORE_KEY: value}))
        return stream

    def store(self, client: Any, session: int, handle: int, content: bytes, chunk: int = 99) -> Any:
        stream = self.begin_store(client, session, handle, len(content))
        for start in range(0, len(content), chunk):
            client.send(data(stream, part(content[start : start + chunk])))
        client.send(data(stream, end=True))
        client.pump()
        return client.replies[stream]


def part(content: bytes) -> bytes:
    request = schema.proxy.GrpcHostBufferStoreRequest(data=content)
    return message(request.SerializeToString())


def lookup_request(session: int, handle: int) -> Any:
    return schema.proxy.GrpcHostBufferLookupRequest(session_id=session, handle=handle)


def delete_request(session: int, handle: int) -> Any:
    return schema.proxy.GrpcHostBufferDeleteRequest(session_id=session, handle=handle)


def told(reply: Any) -> tuple[int, str]:
    return reply.status, unquote(reply.headers[b"grpc-message"].decode())


@pytest.fixture
def wire(h2_client: Any, gateway: Any, new_session_metadata: Any) -> Wire:
    return Wire(h2_client, gateway, new_session_metadata)


# Messages and statuses.


@given(st.lists(st.binary(max_size=300), max_size=6), st.lists(st.integers(1, 99), max_size=40))
def test_messages_come_whole_whatever_the_pieces(sent: list[bytes], sizes: list[int]) -> None:
    messages = grpc.Messages(grpc.Budget(1000))
    stream, found, position = b"".join(map(message, sent)), [], 0
    for size in [*sizes, len(stream)]:
        found += messages.feed(memoryview(stream[position : position + size]))
        position += size
    assert found == sent
    assert messages.whole()


def test_unfinished_messages_of_a_connection_are_bounded_together() -> None:
    budget = grpc.Budget(1000)
    first, second = grpc.Messages(budget), grpc.Messages(budget)
    assert not list(first.feed(memoryview(message(bytes(900))[:800])))
    with pytest.raises(StatusError, match="unfinished messages") as caught:
        list(second.feed(memoryview(message(bytes(900))[:800])))
    assert caught.value.code == Code.RESOURCE_EXHAUSTED
    second.drop()
    first.drop()
    assert list(second.feed(memoryview(message(bytes(900))))) == [bytes(900)]


@given(st.text(max_size=300))
def test_status_messages_are_percent_encoded(text: str) -> None:
    block = grpc.trailers(Code.ABORTED, text)
    fields = dict(hpack.Decoder().decode(block, raw=True))
    assert fields[b"grpc-status"] == b"10"
    assert all(32 <= char < 127 for char in fields[b"grpc-message"])
    encoded = text.encode("utf-8", "replace").decode()
    assert unquote(fields[b"grpc-message"].decode()) == encoded


def test_long_status_messages_are_cut_between_characters() -> None:
    fields = dict(hpack.Decoder().decode(grpc.trailers(Code.ABORTED, "x" + "ä" * 5000), raw=True))
    assert 3000 < len(fields[b"grpc-message"]) <= 4000
    assert set(unquote(fields[b"grpc-message"].decode(), errors="strict")) == {"x", "ä"}


@given(st.binary(max_size=60))
def test_binary_metadata(value: bytes) -> None:
    coded = base64.b64encode(value)
    for text in (coded, coded.rstrip(b"="), b"\0" + value):
        assert grpc.binary_metadata({b"k-bin": text}, b"k-bin") == value


@pytest.mark.parametrize(("text", "match"), [(b"a*b!", "not base64"), (None, "missing")])
def test_damaged_metadata(text: bytes | None, match: str) -> None:
    fields = {} if text is None else {b"k-bin": text}
    with pytest.raises(StatusError, match=match):
        grpc.binary_metadata(fields, b"k-bin")


def test_unexpected_errors_name_no_lost_slice(caplog: Any) -> None:
    status = grpc.status_of(ValueError("INTERNAL secret"), "HostBufferStore")
    assert status.code == Code.UNKNOWN
    assert "secret" not in status.message
    assert "secret" in caplog.text


# GetVersion.


def test_version_is_negotiated(wire: Wire) -> None:
    client = wire.client()
    request = schema.proxy.GrpcGetVersionRequest()
    request.min_version.protocol_version = 16
    request.max_version.protocol_version = 40
    request.max_version.ifrt_serdes_version_number = 6
    reply = client.replies[wire.call(client, "GetVersion", request)]
    assert reply.status == 0
    assert reply.headers[b":status"] == b"200"
    assert reply.headers[b"content-type"] == b"application/grpc"
    version = schema.proxy.GrpcGetVersionResponse.FromString(reply.messages[0]).version
    assert (version.protocol_version, version.ifrt_serdes_version_number) == (25, 6)
    request.min_version.protocol_version = 30
    reply = client.replies[wire.call(client, "GetVersion", request)]
    assert told(reply) == (9, "this server talks protocols 16 to 25")


@pytest.mark.parametrize(
    ("sent", "code", "text"),
    [
        (b"", 3, "the request of GetVersion is not complete"),
        (message(b"abc")[:6], 3, "the request of GetVersion is not complete"),
        (message(b"") * 2, 3, "GetVersion takes one message, not more"),
        (message(b"\xff\xff"), 3, "the request is no GrpcGetVersionRequest"),
        (b"\1\0\0\0\0", 12, "compressed messages are not supported"),
        (
            message(bytes(70_000)),
            8,
            "a message of 70000 bytes is larger than the limit of 65536 bytes",
        ),
    ],
)
def test_damaged_requests(wire: Wire, sent: bytes, code: int, text: str) -> None:
    client = wire.client()
    client.send(client.request(1, SERVICE + "GetVersion") + data(1, sent) + data(1, end=True))
    client.pump()
    assert told(client.replies[1]) == (code, text)
    assert client.replies[1].ended


@pytest.mark.parametrize("path", [SERVICE + "Nix", "/other/GetVersion", ""])
def test_unknown_methods(wire: Wire, path: str) -> None:
    client = wire.client()
    client.send(client.request(1, path) + data(1, b"whatever", end=True))
    client.pump()
    assert told(client.replies[1]) == (12, f"there is no method {path}")


# Sessions.


def test_a_session(wire: Wire) -> None:
    client = wire.client()
    stream, session = wire.open(client, token=b"abc", n=-3, ok=True, ids=[1, -2])
    assert wire.gateway.opened == [
        (25, 6, {"token": b"abc", "n": -3, "ok": True, "ids": [1, -2]}, "process 7", False, "")
    ]
    client.send(data(stream, message(b"one") + message(b"two")))
    client.send(data(stream, message(b"three")[:4]) + data(stream, message(b"three")[4:]))
    client.send(data(stream, message(b"four")) + data(stream, message(b"")))
    client.pump()
    assert session.requests == [b"one", b"two", b"three", b"four", b""]
    assert client.replies[stream].messages == session.requests
    client.send(data(stream, end=True))
    client.pump()
    assert client.replies[stream].status == 0
    assert client.replies[stream].ended
    assert session.events == ["closed"]
    session.send(b"too late")
    assert not client.pump()


@pytest.mark.parametrize("how", ["end", "reset", "lost"])
def test_a_session_ends_once(wire: Wire, how: str) -> None:
    client = wire.client()
    stream, session = wire.open(client)
    client.send(data(stream, message(b"one")[:3]))
    if how == "end":
        client.send(data(stream, end=True))
        client.pump()
    elif how == "reset":
        client.send(frames.rst_stream(stream, frames.CANCEL))
    client.connection.lost()
    assert session.events == ["closed"]
    assert session.requests == []


def test_a_session_may_be_refused(wire: Wire) -> None:
    client = wire.client()
    wire.gateway.refusal = StatusError(Code.UNAUTHENTICATED, "the token is wrong")
    stream, _ = wire.open(client)
    assert told(client.replies[stream]) == (16, "the token is wrong")
    assert client.replies[stream].headers[b":status"] == b"200"
    wire.gateway.refusal = ZeroDivisionError()
    stream, _ = wire.open(client)
    assert told(client.replies[stream])[0] == 2
    client.send(client.request(99, SERVICE + "IfrtSession"))
    client.pump()
    assert told(client.replies[99]) == (3, f"the metadata {SESSION_KEY} is missing")


@pytest.mark.parametrize("error", [ValueError("a fault"), StatusError(Code.ABORTED, "enough")])
def test_a_session_that_fails_ends_alone(wire: Wire, error: Exception) -> None:
    client = wire.client()
    stream, session = wire.open(client)
    other, healthy = wire.open(client)

    def fail(_: bytes) -> None:
        raise error

    session.on_request = fail
    client.send(data(stream, message(b"one") + message(b"two")))
    client.send(data(other, message(b"three")))
    client.pump()
    assert client.replies[stream].status == (10 if isinstance(error, StatusError) else 2)
    assert session.events == ["closed"]
    assert session.requests == [b"one"]
    assert healthy.requests == [b"three"]


def test_a_request_may_be_larger_than_the_window_but_not_than_the_limit(wire: Wire) -> None:
    client = wire.client(limits=Limits(stream_window_bytes=50_000))
    stream, session = wire.open(client)
    large = message(os.urandom(1_000_000))
    for start in range(0, len(large), 20_000):
        client.send(data(stream, large[start : start + 20_000]))
        client.pump()
    assert session.requests == [large[5:]]
    client.send(data(stream, message(bytes(1 << 21))[:100]))
    client.grant(0, 2_000_000)
    client.grant(stream, 2_000_000)
    client.pump()
    assert told(client.replies[stream])[0] == 8
    assert session.events == ["closed"]


# HostBufferStore.


@given(
    st.binary(max_size=500),
    st.integers(1, 200),
    st.lists(st.integers(1, 60), max_size=60),
    st.booleans(),
)
def test_a_buffer_is_stored_whatever_the_pieces(
    h2_client: Any,
    new_gateway: Any,
    new_session_metadata: Any,
    content: bytes,
    chunk: int,
    pieces: list[int],
    empty: bool,
) -> None:
    wire = Wire(h2_client, new_gateway(), new_session_metadata)
    client = wire.client()
    _, session = wire.open(client)
    stream = wire.begin_store(client, 1, 5, len(content))
    sent = b"".join(part(content[at : at + chunk]) for at in range(0, len(content), chunk))
    sent += part(b"") if empty else b""
    position = 0
    for size in [*pieces, len(sent)]:
        if sent[position:]:
            client.send(data(stream, sent[position : position + size]))
        position += size
    client.send(data(stream, end=True))
    client.pump()
    assert client.replies[stream].status == 0
    assert client.replies[stream].messages == [b""]
    assert session.buffers[5] == content
    assert session.events == [("begin", 5, len(content)), ("end", 5)]


def test_a_large_buffer_is_received_in_place(wire: Wire) -> None:
    client = wire.client()
    _, session = wire.open(client)
    content = os.urandom(3_000_000)
    stream = wire.begin_store(client, 1, 5, len(content))
    sent = b"".join(part(content[at : at + (1 << 20)]) for at in range(0, len(content), 1 << 20))
    frame = data(stream, sent, end=True)
    client.send(frame, [9 + 7, 5, 100, 70_000, 300_001])
    client.pump()
    assert client.replies[stream].status == 0
    assert session.buffers[5] == content


@pytest.mark.parametrize(
    ("size", "sent", "code", "text"),
    [
        (5, part(b"abc"), 3, "host buffer 5 was to have 5 bytes, but 3 came"),
        (5, part(b"abcde")[:-1], 3, "host buffer 5 was to have 5 bytes, but 4 came"),
        (5, part(b"abcde") + b"\0", 3, "host buffer 5 was to have 5 bytes, but 5 came"),
        (2, part(b"abc"), 3, "host buffer 5 was to have 2 bytes, but more came"),
        (2, part(b"ab") + part(b"c"), 3, "host buffer 5 was to have 2 bytes, but more came"),
        (0, part(b"a"), 3, "host buffer 5 was to have 0 bytes, but more came"),
        (5, message(b"\x12\x03abc"), 3, "a message of a host buffer has no data"),
        (5, message(b"\x0a\x03abcxx"), 3, "a message of a host buffer has more than data"),
        (5, message(b"\x0a" + b"\xff" * 20), 3, "a message of a host buffer is damaged"),
        (5, b"\1" + part(b"abcde")[1:], 12, "compressed messages are not supported"),
        (-1, b"", 3, "a host buffer of -1 bytes"),
        (1 << 40, b"", 8, "1099511627776 bytes are too much — 100%"),
    ],
)
def test_a_store_that_is_wrong(wire: Wire, size: int, sent: bytes, code: int, text: str) -> None:
    client = wire.client()
    _, session = wire.open(client)
    stream = wire.begin_store(client, 1, 5, size)
    client.send(data(stream, sent))
    client.pump()
    # Told only when all has been sent: a client whose writes fail makes an error of its own.
    assert not client.replies.get(stream)
    client.send(data(stream, bytes(100_000)) if code != 3 or size < 0 else b"")
    client.send(data(stream, end=True))
    client.pump()
    assert told(client.replies[stream]) == (code, text)
    expected = [] if size < 0 or size > 99 else [("begin", 5, size), ("abort", 5)]
    assert session.events == expected


def test_a_store_for_no_session(wire: Wire) -> None:
    client = wire.client()
    reply = wire.store(client, 77, 1, b"abc")
    assert told(reply) == (9, "there is no session 77 (any more)")
    stream = wire.next_stream()
    client.send(client.request(stream, SERVICE + "HostBufferStore", {STORE_KEY: "!!"}, end=True))
    client.pump()
    assert told(client.replies[stream])[0] == 3


def test_a_store_that_breaks_off(wire: Wire) -> None:
    client = wire.client()
    _, session = wire.open(client)
    first = wire.begin_store(client, 1, 5, 10)
    client.send(data(first, part(b"abc")) + frames.rst_stream(first, frames.CANCEL))
    assert session.events == [("begin", 5, 10), ("abort", 5)]
    second = wire.begin_store(client, 1, 6, 10)
    client.send(data(second, part(b"abc")))
    client.connection.lost()
    assert session.events.count(("abort", 6)) == 1
    assert session.events.count("closed") == 1


def test_a_store_does_not_outlive_its_session(wire: Wire) -> None:
    control, bulk = wire.client(), wire.client()
    stream, session = wire.open(control)
    store = wire.begin_store(bulk, 1, 5, 1 << 20)
    frame = data(store, part(bytes(1 << 20)))
    bulk.send(frame[:100_000])
    view = session.buffers[5]
    assert len(bulk.connection.buffers()) == 2
    control.send(data(stream, end=True))
    assert session.events == [("begin", 5, 1 << 20), ("abort", 5), "closed"]
    assert len(bulk.connection.buffers()) == 1
    memory: Any = view.obj
    session.buffers.clear()
    view.release()
    memory.clear()  # refused as long as anyone has a view of it
    bulk.send(frame[100_000:] + data(store, end=True))
    bulk.pump()
    assert told(bulk.replies[store]) == (9, "the session has ended")


def test_a_session_that_refuses_what_it_got(wire: Wire) -> None:
    client = wire.client()
    _, session = wire.open(client)

    def refuse(handle: int) -> None:
        raise StatusError(Code.ALREADY_EXISTS, f"there is a host buffer {handle}")

    session.store_end = refuse
    assert told(wire.store(client, 1, 5, b"abc")) == (6, "there is a host buffer 5")


# HostBufferLookup and HostBufferDelete.


@pytest.mark.parametrize("size", [0, 1, 300, 70_000, (4 << 20) + 17])
def test_lookup(wire: Wire, size: int) -> None:
    client = wire.client(window=8 << 20, max_frame=1 << 20)
    client.grant(0, 8 << 20)
    _, session = wire.open(client)
    content = os.urandom(size)
    session.buffers[5] = memoryview(content)
    stream = wire.call(client, "HostBufferLookup", lookup_request(1, 5))
    reply = client.replies[stream]
    parts = map(schema.proxy.GrpcHostBufferLookupResponse.FromString, reply.messages)
    assert b"".join(part.data for part in parts) == content
    assert reply.messages
    assert reply.status == 0


def test_a_buffer_of_numbers_is_sent_as_bytes(wire: Wire) -> None:
    client = wire.client()
    _, session = wire.open(client)
    session.buffers[5] = memoryview(b"abcdefgh").cast("I")
    stream = wire.call(client, "HostBufferLookup", lookup_request(1, 5))
    assert client.replies[stream].messages[0] == b"\x0a\x08abcdefgh"


def test_what_is_not_there(wire: Wire) -> None:
    client = wire.client()
    wire.open(client)
    stream = wire.call(client, "HostBufferLookup", lookup_request(1, 5))
    assert told(client.replies[stream]) == (3, "there is no host buffer 5")
    for method, request in (
        ("HostBufferLookup", lookup_request(9, 5)),
        ("HostBufferDelete", delete_request(9, 5)),
    ):
        stream = wire.call(client, method, request)
        assert told(client.replies[stream]) == (9, "there is no session 9 (any more)")


def test_delete(wire: Wire) -> None:
    client = wire.client()
    _, session = wire.open(client)
    wire.store(client, 1, 5, b"abc")
    stream = wire.call(client, "HostBufferDelete", delete_request(1, 5))
    assert client.replies[stream].messages == [b""]
    assert client.replies[stream].status == 0
    assert session.events[-1] == ("delete", 5)


def test_a_delete_waits_for_lookups(wire: Wire) -> None:
    client = wire.client()
    client.grant(0, 1 << 20)
    _, session = wire.open(client)
    session.buffers[5] = memoryview(bytes(100_000))
    streams = [wire.call(client, "HostBufferLookup", lookup_request(1, 5)) for _ in range(2)]
    deleted = wire.call(client, "HostBufferDelete", delete_request(1, 5))
    assert client.replies[deleted].status == 0
    late = wire.call(client, "HostBufferLookup", lookup_request(1, 5))
    assert told(client.replies[late]) == (3, "there is no host buffer 5")
    client.send(frames.rst_stream(streams[0], frames.CANCEL))
    assert session.events == []
    client.grant(streams[1], 100_000)
    client.pump()
    assert client.replies[streams[1]].status == 0
    assert session.events == [("delete", 5)]


def test_a_lookup_does_not_outlive_its_session(wire: Wire) -> None:
    control, bulk = wire.client(), wire.client()
    stream, session = wire.open(control)
    memory = bytearray(b"a" * 200_000)
    session.buffers[5] = memoryview(memory)
    lookup = wire.call(bulk, "HostBufferLookup", lookup_request(1, 5), pump=False)
    bulk.pump(20_000)
    session.buffers.clear()
    control.send(data(stream, end=True))
    memory[:] = b"b" * 200_000
    memory.clear()  # refused as long as anyone has a view of it
    bulk.pump()
    assert bulk.replies[lookup].reset == frames.CANCEL
    assert set(bulk.replies[lookup].data[16:]) == {ord("a")}
    assert session.events == ["closed"]


# HostBufferReadFromDisk.


def disk_request(handle: int, size: int) -> Any:
    request = schema.proxy.GrpcHostBufferReadFromDiskRequest()
    request.metadata.session_id = 1
    request.metadata.handle = handle
    request.metadata.buffer_size = size
    return request


def test_buffers_from_files_are_refused(wire: Wire) -> None:
    client = wire.client()
    wire.open(client)
    stream = wire.call(client, "HostBufferReadFromDisk", disk_request(5, 3))
    code, text = told(client.replies[stream])
    assert code == 12
    assert "unset IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_DIRECTORY" in text


# Nothing that a client sends may break more than its connection.


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["IfrtSession", "HostBufferStore", "GetVersion", "HostBufferLookup"]),
            st.binary(max_size=30),
            st.binary(max_size=60),
        ),
        max_size=5,
    )
)
def test_any_metadata_and_messages(
    h2_client: Any,
    new_gateway: Any,
    new_session_metadata: Any,
    calls: list[tuple[str, bytes, bytes]],
) -> None:
    wire = Wire(h2_client, new_gateway(), new_session_metadata)
    client = wire.client()
    for method, metadata, sent in calls:
        stream = wire.next_stream()
        fields = {SESSION_KEY: b64(metadata), STORE_KEY: b64(metadata)}
        client.send(client.request(stream, SERVICE + method, fields))
        client.send(data(stream, sent, end=True))
        client.pump()
        assert client.replies[stream].ended
    assert client.goaway_code() is None


def test_a_request_that_breaks_off_gives_its_memory_back() -> None:
    budget = grpc.Budget(100)
    for _ in range(3):
        no_stream: Any = None
        call = Unary(no_stream, "Method", grpc.Messages(budget), lambda request: None)
        call.data(memoryview(grpc.prefix(80) + bytes(79)))
        call.over()
    budget.change(100)
