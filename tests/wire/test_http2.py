from __future__ import annotations

import gc
import tracemalloc
import weakref
from typing import Any

import hpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from regrow.errors import ProtocolError
from regrow.wire import frames
from regrow.wire.headers import HeaderDecoder, encode
from regrow.wire.http2 import Connection, Limits
from regrow.wire.streams import Stream

TRAILERS = encode([(b"grpc-status", b"0")])
SMALL = Limits(
    streams=5, header_bytes=2000, stream_window_bytes=40_000, unsent_bytes=1000, control_bytes=4000
)


class Recorder:
    """A handler that keeps what came; with `direct` it lets payload be received in place."""

    def __init__(self, stream: Stream, headers: dict[bytes, bytes], direct: int = 0) -> None:
        self.stream = stream
        self.headers = headers
        self.received = b""
        self.end_count = 0
        self.over_count = 0
        self.target = bytearray(direct)
        self.filled_bytes = 0

    def data(self, view: memoryview) -> None:
        assert not self.end_count
        self.received += view

    def room(self) -> memoryview | None:
        return memoryview(self.target) if self.target else None

    def filled(self, count: int) -> None:
        self.received += self.target[:count]
        self.filled_bytes += count

    def ended(self) -> None:
        self.end_count += 1

    def over(self) -> None:
        self.over_count += 1


class Recorders(dict[int, Recorder]):
    """The handlers of a connection, by stream."""

    def __init__(self, direct: int = 0) -> None:
        super().__init__()
        self._direct = direct

    def accept(self, stream: Stream, headers: dict[bytes, bytes]) -> Recorder:
        self[stream.number] = Recorder(stream, dict(headers), self._direct)
        return self[stream.number]

    def story(self) -> list[Any]:
        return [
            (number, found.headers, found.received, found.end_count, found.over_count)
            for number, found in self.items()
        ]


def data(stream: int, payload: bytes = b"", *, end: bool = False, padding: int = -1) -> bytes:
    flags = frames.END_STREAM if end else 0
    if padding >= 0:
        flags |= frames.PADDED
        payload = bytes((padding,)) + payload + bytes(padding)
    return frames.frame(frames.DATA, flags, stream, payload)


# Receiving.


def test_a_conversation(h2_client: Any) -> None:
    found = Recorders()
    client = h2_client(found.accept)
    client.send(client.request(1) + data(1, b"one") + data(1, b"two", end=True))
    assert found[1].received == b"onetwo"
    assert found[1].headers[b":path"] == b"/x"
    assert found[1].end_count == 1
    found[1].stream.headers(encode([(b"a", b"b")]))
    found[1].stream.write(b"answer")
    found[1].stream.finish(TRAILERS)
    client.pump()
    reply = client.replies[1]
    assert reply.data == b"answer"
    assert reply.headers == {b"a": b"b", b"grpc-status": b"0"}
    assert reply.ended
    assert reply.reset is None
    assert found[1].over_count == 1
    assert not client.connection.control.streams


def test_settings_and_pings_are_answered(h2_client: Any) -> None:
    client = h2_client(Recorders().accept)
    client.send(frames.frame(frames.PING, 0, 0, b"12345678"))
    client.send(frames.frame(frames.PING, frames.ACK, 0, b"12345678"))
    kinds = [(frame.kind, frame.flags) for frame in client.pump()]
    assert kinds[0] == (frames.SETTINGS, 0)
    assert (frames.SETTINGS, frames.ACK) in kinds
    assert kinds.count((frames.PING, frames.ACK)) == 1


def test_an_early_answer_tells_the_client_to_stop(h2_client: Any) -> None:
    found = Recorders()
    client = h2_client(found.accept)
    client.send(client.request(1) + data(1, b"one"))
    found[1].stream.finish(TRAILERS)
    client.send(data(1, b"still coming", end=True))
    client.pump()
    assert client.replies[1].reset == frames.NO_ERROR
    assert found[1].received == b"one"
    assert found[1].over_count == 1


def test_trailers_of_the_client_end_its_side(h2_client: Any) -> None:
    found = Recorders()
    client = h2_client(found.accept)
    client.send(client.request(1) + data(1, b"one"))
    block = frames.frame(frames.HEADERS, 5, 1, encode([(b"t", b"u")]))
    client.send(block)
    assert found[1].end_count == 1


def test_unknown_frames_and_flags_are_skipped(h2_client: Any) -> None:
    found = Recorders()
    client = h2_client(found.accept)
    client.send(frames.frame(99, 255, 7, bytes(70_000)) + client.request(1))
    client.send(frames.frame(frames.DATA, 0xF0, 1, b"abc"))
    assert found[1].received == b"abc"


def test_goaway_leaves_streams_alone(h2_client: Any) -> None:
    found = Recorders()
    client = h2_client(found.accept)
    client.send(client.request(1) + frames.goaway(0, 0, "bye") + data(1, b"rest", end=True))
    assert client.connection.control.going_away
    assert found[1].received == b"rest"


def test_payload_goes_in_place(h2_client: Any) -> None:
    found = Recorders(direct=1 << 20)
    client = h2_client(found.accept)
    payload = bytes(range(256)) * 8192  # 2 MiB
    client.send(client.request(1) + data(1, payload, end=True) + client.request(3))
    assert found[1].received == payload
    assert found[1].filled_bytes > len(payload) * 3 // 4
    assert found[1].end_count == 1
    assert 3 in found


def _errors(client: Any) -> dict[str, tuple[bytes, int]]:
    open_1 = client.request(1)
    block = client.block("/x")
    window = (1 << 31) - 1
    return {
        "data on stream 0": (data(0, b"x"), frames.PROTOCOL_ERROR),
        "data on an idle stream": (data(1, b"x"), frames.PROTOCOL_ERROR),
        "data after the end": (
            open_1 + data(1, end=True) + data(1, b"x"),
            frames.STREAM_CLOSED,
        ),
        "part of data after the end": (
            open_1 + data(1, end=True) + data(1, bytes(99))[:50],
            frames.STREAM_CLOSED,
        ),
        "empty padded": (open_1 + frames.frame(0, 8, 1, b""), frames.FRAME_SIZE_ERROR),
        "too much padding": (open_1 + frames.frame(0, 8, 1, b"\x05abc"), frames.PROTOCOL_ERROR),
        "even stream": (frames.frame(1, 5, 2, block), frames.PROTOCOL_ERROR),
        "headers on stream 0": (frames.frame(1, 5, 0, block), frames.PROTOCOL_ERROR),
        "headers with too much padding": (
            frames.frame(1, 5 | 8, 1, b"\xff" + block),
            frames.PROTOCOL_ERROR,
        ),
        "damaged headers": (frames.frame(1, 5, 1, b"\xff\xff\xff\xff"), frames.COMPRESSION_ERROR),
        "trailers without end": (open_1 + frames.frame(1, 4, 1, block), frames.PROTOCOL_ERROR),
        "continuation alone": (frames.frame(9, 4, 1, block), frames.PROTOCOL_ERROR),
        "continuation on stream 0": (frames.frame(9, 4, 0, block), frames.PROTOCOL_ERROR),
        "continuation of another": (
            frames.frame(1, 0, 1, block) + frames.frame(9, 4, 3, block),
            frames.PROTOCOL_ERROR,
        ),
        "interrupted headers": (
            open_1 + frames.frame(1, 0, 3, block) + data(1, b"x"),
            frames.PROTOCOL_ERROR,
        ),
        "empty continuations": (
            frames.frame(1, 0, 1, block) + frames.frame(9, 0, 1),
            frames.ENHANCE_YOUR_CALM,
        ),
        "endless continuations": (
            frames.frame(1, 0, 1, block) + frames.frame(9, 0, 1, bytes(900)) * 3,
            frames.ENHANCE_YOUR_CALM,
        ),
        "header bomb": (
            frames.frame(1, 4, 1, b"\x40\x01a\x7f\xf1\x05" + b"b" * 880 + b"\xbe" * 9),
            frames.ENHANCE_YOUR_CALM,
        ),
        "large control frame": (frames.frame(1, 4, 1, bytes(3000)), frames.FRAME_SIZE_ERROR),
        "reset of stream 0": (frames.rst_stream(0, 0), frames.PROTOCOL_ERROR),
        "reset of an idle stream": (frames.rst_stream(1, 0), frames.PROTOCOL_ERROR),
        "short reset": (open_1 + frames.frame(3, 0, 1, b"abc"), frames.FRAME_SIZE_ERROR),
        "settings on a stream": (frames.frame(4, 0, 1), frames.PROTOCOL_ERROR),
        "odd settings": (frames.frame(4, 0, 0, b"abc"), frames.FRAME_SIZE_ERROR),
        "window setting": (frames.settings({4: 1 << 31}), frames.FLOW_CONTROL_ERROR),
        "frame setting": (frames.settings({5: 100}), frames.PROTOCOL_ERROR),
        "window setting overflow": (
            open_1 + frames.window_update(1, window - 65535) + frames.settings({4: 65536}),
            frames.FLOW_CONTROL_ERROR,
        ),
        "push": (frames.frame(5, 4, 1, bytes(8)), frames.PROTOCOL_ERROR),
        "short ping": (frames.frame(6, 0, 0, b"abc"), frames.FRAME_SIZE_ERROR),
        "goaway on a stream": (frames.frame(7, 0, 1, bytes(8)), frames.PROTOCOL_ERROR),
        "no credit": (frames.window_update(0, 0), frames.PROTOCOL_ERROR),
        "short credit": (frames.frame(8, 0, 0, b"abc"), frames.FRAME_SIZE_ERROR),
        "credit on an idle stream": (frames.window_update(1, 1), frames.PROTOCOL_ERROR),
        "too much credit": (frames.window_update(0, window), frames.FLOW_CONTROL_ERROR),
        "more than the window": (
            open_1 + data(1, bytes(40_001)),
            frames.FLOW_CONTROL_ERROR,
        ),
    }


NAMES = [
    "data on stream 0", "data on an idle stream", "data after the end",
    "part of data after the end", "empty padded", "too much padding", "even stream",
    "headers on stream 0", "headers with too much padding", "damaged headers",
    "trailers without end", "continuation alone", "continuation on stream 0",
    "continuation of another", "interrupted headers", "empty continuations",
    "endless continuations", "header bomb", "large control frame", "reset of stream 0",
    "reset of an idle stream", "short reset", "settings on a stream", "odd settings",
    "window setting", "frame setting", "window setting overflow", "push", "short ping",
    "goaway on a stream", "no credit", "short credit", "credit on an idle stream",
    "too much credit", "more than the window",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_breach_ends_the_connection(h2_client: Any, name: str) -> None:
    client = h2_client(Recorders().accept, SMALL)
    sent, code = _errors(client)[name]
    with pytest.raises(ProtocolError) as caught:
        client.send(sent)
    assert caught.value.code == code
    client.pump()
    assert client.goaway_code() == code


def test_every_breach_is_tested(h2_client: Any) -> None:
    assert set(NAMES) == set(_errors(h2_client(Recorders().accept)))


@pytest.mark.parametrize("preface", [b"GET / HTTP/1.1\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\r"])
def test_another_protocol_is_refused(h2_client: Any, preface: bytes) -> None:
    client = h2_client(Recorders().accept)
    from regrow.wire.http2 import Connection

    with pytest.raises(ProtocolError, match="does not speak HTTP/2"):
        Connection(Recorders().accept, lambda: None).feed(preface)
    connection = Connection(Recorders().accept, lambda: None)
    with pytest.raises(ProtocolError, match="begin with SETTINGS"):
        connection.feed(frames.PREFACE + frames.frame(frames.PING, 0, 0, bytes(8)))
    assert client.connection.control.settled


def test_too_many_streams_are_refused_and_forgotten(h2_client: Any) -> None:
    found = Recorders()
    client = h2_client(found.accept, SMALL)
    for number in range(1, 15, 2):
        client.send(client.request(number))
    client.pump()
    assert list(found) == [1, 3, 5, 7, 9]
    assert client.replies[11].reset == frames.REFUSED_STREAM
    client.send(data(11, b"ignored") + frames.rst_stream(1, frames.CANCEL) + client.request(15))
    assert 15 in found


def test_who_never_reads_is_cut_off(h2_client: Any) -> None:
    client = h2_client(Recorders().accept, SMALL)
    pings = frames.frame(frames.PING, 0, 0, bytes(8)) * 1000
    with pytest.raises(ProtocolError, match="does not read") as caught:
        client.send(pings)
    assert caught.value.code == frames.ENHANCE_YOUR_CALM


# Nothing that comes may break more than the connection.


def run(h2_client: Any, sent: bytes, chunks: list[int], direct: int = 0) -> tuple[Any, Any]:
    found = Recorders(direct)
    client = h2_client(found.accept, SMALL)
    error: Any = None
    position = 0
    try:
        for size in chunks:
            client.send(sent[position : position + size])
            position += size
            client.pump()
        client.send(sent[position:])
    except ProtocolError as caught:
        error = (str(caught), caught.code)
    client.pump()
    client.connection.lost()
    assert all(handler.over_count == 1 for handler in found.values())
    return found.story(), error


chunk_sizes = st.lists(st.integers(1, 50), max_size=30)


@given(st.binary(max_size=300), chunk_sizes)
def test_any_bytes(h2_client: Any, sent: bytes, chunks: list[int]) -> None:
    assert run(h2_client, sent, []) == run(h2_client, sent, chunks)


def _payloads() -> st.SearchStrategy[bytes]:
    block = hpack.Encoder().encode([(":path", "/x"), (":method", "POST")])
    window = st.integers(0, 70_000).map(lambda value: value.to_bytes(4, "big"))
    return st.one_of(st.binary(max_size=40), st.just(bytes(block)), window)


any_frames = st.lists(
    st.builds(
        frames.frame,
        st.integers(0, 10),
        st.sampled_from([0, 1, 4, 5, 8, 9, 13, 0x25, 0xFF]),
        st.sampled_from([0, 1, 1, 1, 3, 3, 5, 2, 99]),
        _payloads(),
    ),
    max_size=12,
).map(b"".join)


@settings(max_examples=200)
@given(any_frames, chunk_sizes)
@example(frames.frame(0x30, 0, 0, bytes(20)) + frames.frame(1, 4, 1, b"\x82"), [9, 9, 9])
def test_any_frames_in_any_pieces(h2_client: Any, sent: bytes, chunks: list[int]) -> None:
    client = h2_client(Recorders().accept)
    sent = client.request(1) + client.request(3) + sent
    assert run(h2_client, sent, []) == run(h2_client, sent, chunks)


well_formed = st.lists(
    st.one_of(
        st.builds(
            data,
            st.sampled_from([1, 3, 5]),
            st.binary(max_size=200),
            padding=st.integers(-1, 30),
        ),
        st.just(data(1, bytes(9000))),
        st.just(frames.frame(77, 0, 0, bytes(50))),
        st.just(frames.window_update(0, 100)),
        st.just(frames.frame(frames.PRIORITY, 0, 1, bytes(5))),
    ),
    max_size=10,
).map(b"".join)


@given(well_formed, st.lists(st.integers(1, 3000), max_size=40), st.sampled_from([0, 8192, 20_000]))
def test_what_arrives_does_not_depend_on_the_pieces(
    h2_client: Any, sent: bytes, chunks: list[int], direct: int
) -> None:
    client = h2_client(Recorders().accept)
    begin = client.request(1) + client.request(3)
    block = client.block("/in/pieces")
    begin += frames.frame(frames.HEADERS, 0, 5, block[:7])
    begin += frames.frame(frames.CONTINUATION, 4, 5, block[7:])
    sent = begin + sent + b"".join(data(number, b"last", end=True) for number in (1, 3, 5))
    whole = run(h2_client, sent, [])
    assert whole[1] is None
    assert [entry[3] for entry in whole[0]] == [1, 1, 1]
    assert whole == run(h2_client, sent, chunks, direct)


# Flow control: receiving.


def test_a_stream_may_send_without_end(h2_client: Any) -> None:
    found = Recorders()
    client = h2_client(found.accept, SMALL)
    client.send(client.request(1))
    client.pump()
    allowed = {0: frames.MAX_WINDOW, 1: SMALL.stream_window_bytes}
    client.credit.clear()
    sent = 0
    while sent < 3_000_000:
        size = min(allowed[1], allowed[0], 16_384)
        assert size > 0, f"stalled after {sent} bytes"
        client.send(data(1, bytes(size), padding=3 if size < 200 else -1))
        sent += size + (4 if size < 200 else 0)
        for number in allowed:
            allowed[number] -= size + (4 if size < 200 else 0)
        client.pump()
        for number, credit in client.credit.items():
            allowed[number] += credit
            assert allowed[number] <= (frames.MAX_WINDOW if not number else 40_000)
        client.credit.clear()
    assert allowed[0] > frames.MAX_WINDOW - SMALL.stream_window_bytes


def test_data_of_closed_streams_is_credited_to_the_connection(h2_client: Any) -> None:
    found = Recorders()
    client = h2_client(found.accept, SMALL)
    client.send(client.request(1) + frames.rst_stream(1, frames.CANCEL))
    client.pump()
    client.credit.clear()
    for _ in range(10):
        client.send(data(1, bytes(10_000)))
    client.pump()
    assert client.credit == {0: 100_000}


def test_who_does_not_take_answers_gets_no_more_credit(h2_client: Any) -> None:
    found = Recorders()
    client = h2_client(found.accept, SMALL, window=100)
    client.send(client.request(1))
    client.pump()
    client.credit.clear()
    found[1].stream.headers(encode([(b"a", b"b")]))
    found[1].stream.write(bytes(2000))
    client.send(data(1, bytes(15_000)) + data(1, bytes(15_000)))
    client.pump()
    assert 1 not in client.credit
    client.grant(1, 1000)
    client.pump()
    assert client.credit[1] == 30_000


# Flow control: sending.


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.sampled_from([1, 3, 5]), st.integers(0, 40_000)), max_size=12),
    st.lists(st.tuples(st.sampled_from([0, 1, 3, 5]), st.integers(1, 30_000)), max_size=12),
    st.integers(0, 70_000),
    st.sampled_from([16_384, 20_000, 1 << 20]),
    st.integers(1, 20_000),
)
def test_windows_are_kept_and_everything_arrives(
    h2_client: Any,
    writes: list[tuple[int, int]],
    grants: list[tuple[int, int]],
    window: int,
    max_frame: int,
    pump: int,
) -> None:
    found = Recorders()
    client = h2_client(found.accept, window=window, max_frame=max_frame)
    client.send(b"".join(client.request(number, end=True) for number in (1, 3, 5)))
    written: dict[int, bytes] = dict.fromkeys(found, b"")
    for number in found:
        found[number].stream.headers(encode([(b"a", b"b")]))
    for turn, (number, size) in enumerate(writes):
        chunk = bytes((turn,)) * size
        found[number].stream.write(memoryview(chunk) if turn % 2 else chunk)
        written[number] += chunk
        client.pump(pump)
        if turn < len(grants):
            client.grant(*grants[turn])
    for number in found:
        found[number].stream.finish(TRAILERS)
    client.pump(pump)
    client.grant(0, 10 << 20)
    for number in found:
        client.pump()
        client.grant(number, 1 << 20)
    client.pump()
    for number, handler in found.items():
        assert client.replies[number].data == written[number]
        assert client.replies[number].ended
        assert handler.over_count == 1
        assert handler.stream.pending_bytes == 0
    assert client.connection.outbox.bytes_out == 0


def test_a_smaller_window_setting_may_make_windows_negative(h2_client: Any) -> None:
    found = Recorders()
    client = h2_client(found.accept, window=1000)
    client.send(client.request(1, end=True))
    found[1].stream.headers(encode([(b"a", b"b")]))
    found[1].stream.write(bytes(5000))
    client.pump()
    client.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 0}))
    client.stream_windows[1] -= 1000
    assert found[1].stream.window == -1000
    client.stream_windows[1] += 1500
    client.send(frames.window_update(1, 1500))
    client.pump()
    assert len(client.replies[1].data) == 1500


def test_an_answer_that_ends_needs_no_window(h2_client: Any) -> None:
    found = Recorders()
    client = h2_client(found.accept, window=0)
    client.send(client.request(1, end=True) + client.request(3, end=True))
    found[1].stream.headers(encode([(b"a", b"b")]))
    found[1].stream.write(b"blocked")
    client.pump()
    found[3].stream.finish(TRAILERS)
    client.pump()
    assert client.replies[3].ended
    assert not client.replies[1].data


def test_a_small_answer_does_not_wait_for_a_large_one(h2_client: Any) -> None:
    found = Recorders()
    client = h2_client(found.accept, window=64 << 20)
    client.send(client.request(1, end=True) + client.request(3, end=True))
    client.grant(0, 64 << 20)
    client.pump()
    for number in (1, 3):
        found[number].stream.headers(encode([(b"a", b"b")]))
    found[1].stream.write(memoryview(bytes(20 << 20)))
    client.pump(1 << 20)
    found[3].stream.write(b"small")
    found[3].stream.finish(TRAILERS)
    client.pump(1 << 20)
    assert client.replies[3].ended
    assert len(client.replies[1].data) < 3 << 20


def test_large_answers_take_turns(h2_client: Any) -> None:
    found = Recorders()
    client = h2_client(found.accept, window=64 << 20, max_frame=1 << 20)
    client.send(b"".join(client.request(number, end=True) for number in (1, 3, 5)))
    client.grant(0, 64 << 20)
    for handler in found.values():
        handler.stream.headers(encode([(b"a", b"b")]))
        handler.stream.write(memoryview(bytes(4 << 20)))
    client.pump(6 << 20)
    sizes = [len(client.replies[number].data) for number in found]
    assert max(sizes) - min(sizes) <= 1 << 19


def test_small_messages_share_a_frame(h2_client: Any) -> None:
    found = Recorders()
    client = h2_client(found.accept)
    client.send(client.request(1))
    found[1].stream.headers(encode([(b"a", b"b")]))
    client.pump()
    wakes = client.wakes
    for _ in range(50):
        found[1].stream.write(b"x" * 50)
    assert client.wakes == wakes + 1
    assert len(client.pump()) == 1


# The end of streams.


@pytest.mark.parametrize("how", ["by the peer", "by us", "with the connection"])
def test_memory_is_let_go(h2_client: Any, how: str) -> None:
    found = Recorders()
    client = h2_client(found.accept)
    client.send(client.request(1, end=True))
    stream = found[1].stream
    memory = bytearray(b"a" * 200_000)
    stream.headers(encode([(b"a", b"b")]))
    stream.write(memoryview(memory))
    client.pump(5000)
    if how == "by the peer":
        client.send(frames.rst_stream(1, frames.CANCEL))
    elif how == "by us":
        stream.reset(frames.CANCEL)
    else:
        client.connection.lost()
    memory[:] = b"b" * 200_000
    memory.clear()  # a bytearray that is still viewed would refuse
    assert found[1].over_count == 1
    if how != "with the connection":
        client.pump()
        assert set(client.replies[1].data) == {ord("a")}
        assert len(client.replies[1].data) < 70_000
    stream.write(b"x")
    stream.headers(b"x")
    stream.finish(TRAILERS)
    assert not client.pump()


def test_over_comes_when_the_last_byte_has_left(h2_client: Any) -> None:
    found = Recorders()
    client = h2_client(found.accept)
    client.send(client.request(1, end=True))
    client.pump()
    found[1].stream.headers(encode([(b"a", b"b")]))
    found[1].stream.write(memoryview(bytes(30_000)))
    found[1].stream.finish(TRAILERS)
    client.pump(30_000)
    assert not client.connection.control.streams
    assert found[1].over_count == 0
    client.pump()
    assert found[1].over_count == 1


def test_a_handler_that_fails_at_the_end_harms_no_other(h2_client: Any, caplog: Any) -> None:
    found = Recorders()
    client = h2_client(found.accept)
    client.send(client.request(1) + client.request(3))

    def fail() -> None:
        raise ValueError("a fault")

    found[1].over = fail  # type: ignore[method-assign]
    client.connection.lost()
    assert found[3].over_count == 1
    assert "a fault" in caplog.text


# Headers.


def same_headers(oracle: Any, decoder: HeaderDecoder, block: bytes) -> bool:
    """Compares the two; false if both refuse the block, as they then know no more."""
    try:
        expected = dict(oracle.decode(block, raw=True))
    except hpack.HPACKError:
        with pytest.raises(ProtocolError):
            decoder.decode(block)
        return False
    assert dict(decoder.decode(block)) == expected
    return True


names = st.sampled_from([b":path", b"te", b"x-a", b"grpc-timeout", b"long-" * 30])
fields = st.lists(st.tuples(names, st.binary(max_size=200)), max_size=8)


@given(st.lists(st.tuples(fields, st.booleans(), st.booleans()), max_size=8))
def test_header_blocks_read_as_hpack_reads_them(
    blocks: list[tuple[list[tuple[bytes, bytes]], bool, bool]],
) -> None:
    encoder, oracle, decoder = hpack.Encoder(), hpack.Decoder(), HeaderDecoder(1 << 16)
    for found, huffman, literal in blocks:
        block = encoder.encode([(b":method", b"POST"), (b"te", b"trailers")], huffman=huffman)
        block += encode(found) if literal else encoder.encode(found, huffman=huffman)
        for _ in range(2):
            if not same_headers(oracle, decoder, bytes(block)):
                return


@given(st.lists(st.binary(max_size=30), max_size=5))
def test_any_header_block(blocks: list[bytes]) -> None:
    oracle, decoder = hpack.Decoder(), HeaderDecoder(1 << 16)
    for block in blocks:
        if not same_headers(oracle, decoder, block):
            return


def test_the_cache_of_header_runs_is_bounded() -> None:
    decoder = HeaderDecoder(1 << 16)
    oracle = hpack.Decoder()
    for first in range(0x81, 0xBD):
        for second in (0x82, 0x83, 0x84):
            block = bytes((first, second))
            assert dict(decoder.decode(block)) == dict(oracle.decode(block, raw=True))
    assert len(decoder._runs) <= 64


def test_encode_reads_back() -> None:
    pairs = [(b"a", b"b" * 126), (b"c" * 200, b"d" * 5000)]
    assert list(hpack.Decoder(1 << 16).decode(encode(pairs), raw=True)) == pairs


def test_a_lost_connection_keeps_no_memory_until_garbage_is_collected() -> None:
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(20):
            # Whoever owns it is known to it, and knows it.
            owner: list[Connection] = []
            owner.append(Connection(Recorders().accept, owner.clear))
            owner[0].lost()
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()
        gc.enable()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("how", ["answered", "by the peer", "by us", "with the connection"])
def test_a_stream_that_is_over_lets_go_of_its_handler(h2_client: Any, how: str) -> None:
    found = Recorders()
    client = h2_client(found.accept)
    client.send(client.request(1, end=True))
    handler = found.pop(1)
    match how:
        case "answered":
            handler.stream.finish(TRAILERS)
            client.pump()
        case "by the peer":
            client.send(frames.rst_stream(1, frames.CANCEL))
        case "by us":
            handler.stream.reset(frames.CANCEL)
        case _:
            client.connection.lost()
    assert handler.over_count == 1
    gone = weakref.ref(handler)
    del handler
    assert gone() is None


@pytest.mark.usefixtures("without_collector")
def test_a_lost_connection_lets_go_of_its_owner() -> None:
    class Owner:
        def __init__(self) -> None:
            self.connection = Connection(Recorders().accept, self.wake)

        def wake(self) -> None:
            pass

    owner = Owner()
    owner.connection.lost()
    gone = weakref.ref(owner), weakref.ref(owner.connection)
    del owner
    assert [ref() for ref in gone] == [None, None]
