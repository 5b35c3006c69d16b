from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from regrow.channel.frames import (
    HEADER,
    HEADER_BYTES,
    LARGE_BYTES,
    MAX_PAYLOAD_BYTES,
    Frame,
    FrameReader,
)
from regrow.errors import FrameError

u32 = st.integers(0, 0xFFFFFFFF)


def frame_of(payload: bytes, seq: int = 1, ack: int = 0) -> bytes:
    return HEADER.pack(len(payload), seq, ack) + payload


def feed(reader: FrameReader, data: bytes, chunks: list[int]) -> None:
    position, turn = 0, 0
    while position < len(data):
        buffer = reader.buffer()
        assert len(buffer) > 0
        limit = chunks[turn % len(chunks)] if chunks else len(data)
        piece = data[position : position + min(limit, len(buffer))]
        buffer[: len(piece)] = piece
        reader.received(len(piece))
        position += len(piece)
        turn += 1


payloads = st.one_of(
    st.binary(max_size=300),
    st.builds(
        lambda size, seed: bytes([seed]) * size,
        st.one_of(st.integers(LARGE_BYTES - 2, LARGE_BYTES + 2), st.integers(0, 600_000)),
        st.integers(0, 255),
    ),
)


@given(
    frames=st.lists(st.tuples(u32, u32, payloads), max_size=8),
    chunks=st.lists(st.one_of(st.integers(1, 20), st.integers(1, 300_000)), max_size=6),
)
@example(frames=[(1, 0, b"x" * (256 << 10))], chunks=[])
@example(frames=[(1, 0, b"x" * LARGE_BYTES), (2, 0, b"y")], chunks=[HEADER_BYTES, 1])
def test_any_frames_in_any_chunks_come_out_as_they_went_in(
    frames: list[tuple[int, int, bytes]], chunks: list[int]
) -> None:
    got: list[Frame] = []
    wire = b"".join(frame_of(payload, seq, ack) for seq, ack, payload in frames)
    if len(wire) > 5000:
        chunks = [max(chunk, 500) for chunk in chunks]

    feed(FrameReader(got.extend), wire, chunks)

    assert [(seq, ack, bytes(payload)) for seq, ack, payload in got] == frames


@given(data=st.binary(max_size=400))
def test_arbitrary_bytes_are_frames_or_an_error_and_nothing_else(data: bytes) -> None:
    got: list[Frame] = []
    reader = FrameReader(got.extend, max_payload_bytes=1000)
    try:
        feed(reader, data, [7, 64])
    except FrameError:
        return
    rebuilt = b"".join(frame_of(bytes(payload), seq, ack) for seq, ack, payload in got)
    assert data.startswith(rebuilt)


def test_a_frame_above_the_limit_is_refused_before_its_memory_is_taken() -> None:
    reader = FrameReader(list[Frame]().extend)
    with pytest.raises(FrameError, match="1073741825 bytes; the limit is 1073741824"):
        feed(reader, HEADER.pack(MAX_PAYLOAD_BYTES + 1, 1, 0), [])


def test_a_payload_just_above_a_small_limit_is_refused_even_when_it_is_complete() -> None:
    got: list[Frame] = []
    reader = FrameReader(got.extend, max_payload_bytes=10)
    feed(reader, frame_of(b"x" * 10), [])
    with pytest.raises(FrameError):
        feed(reader, frame_of(b"x" * 11), [])
    assert len(got) == 1


def test_small_payloads_are_bytes_of_their_own_and_large_ones_are_views() -> None:
    got: list[Frame] = []
    reader = FrameReader(got.extend)
    feed(reader, frame_of(b"first"), [])
    feed(reader, frame_of(b"other"), [])
    feed(reader, frame_of(b"z" * (1 << 20)), [1 << 16])
    assert got[0][2] == b"first"
    assert isinstance(got[0][2], bytes)
    assert isinstance(got[2][2], memoryview)


def test_a_large_payload_is_received_into_its_own_memory() -> None:
    got: list[Frame] = []
    reader = FrameReader(got.extend)
    size = 1 << 20
    feed(reader, HEADER.pack(size, 1, 0), [])
    assert len(reader.buffer()) == size
