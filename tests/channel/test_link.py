from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.channel.frames import HEADER, MAX_PAYLOAD_BYTES, Buffer, Frame, FrameReader
from regrow.channel.link import Link
from regrow.errors import ChannelError, FrameError, ResourceError


class End:
    """One end of a simulated connection: a link, and the bytes that are on their way to the peer."""

    def __init__(self, start: int) -> None:
        self.link = Link()
        self.link.sent = self.link.acked = self.link.received = self.link._told = start
        self.wire = bytearray()
        self.connected = True
        self.sent: list[bytes] = []
        self.got: list[bytes] = []
        self.reader = FrameReader(self.on_frames)

    def on_frames(self, frames: list[Frame]) -> None:
        for seq, ack, payload in frames:
            if self.link.accept(seq, ack, len(payload)):
                self.got.append(bytes(payload))

    def send(self, payload: bytes) -> None:
        self.sent.append(payload)
        self.put(self.link.send(self.link.prepare(payload)))

    def put(self, bufs: list[Buffer]) -> None:
        if self.connected:
            self.wire += b"".join(bufs)

    def take(self, peer: End, count: int) -> None:
        """Receives up to `count` of the peer's bytes."""
        while count > 0 and peer.wire:
            buffer = self.reader.buffer()
            size = min(count, len(buffer), len(peer.wire))
            buffer[:size] = peer.wire[:size]
            del peer.wire[:size]
            count -= size
            self.reader.received(size)


def cut(ends: tuple[End, End]) -> None:
    for end in ends:
        end.connected = False
        end.wire.clear()


def rejoin(ends: tuple[End, End]) -> None:
    a, b = ends
    for end, peer in ((a, b), (b, a)):
        end.connected = True
        end.reader = FrameReader(end.on_frames)
        end.wire = bytearray(b"".join(end.link.resume(peer.link.received)))


def settle(ends: tuple[End, End]) -> None:
    a, b = ends
    for _ in range(3):
        for end, peer in ((a, b), (b, a)):
            end.take(peer, 1 << 30)
            if end.link.ack_owed:
                end.put([end.link.ack_frame()])


def steps(rng: random.Random, ends: tuple[End, End]) -> list[Callable[[], None]]:
    side = rng.randrange(2)
    end, peer = ends[side], ends[1 - side]
    payload = rng.randbytes(rng.choice((1, 5, 100, 5000, 70_000)))
    return [
        lambda: end.send(payload),
        lambda: end.take(peer, rng.choice((1, 13, 200, 100_000))),
        lambda: end.put([end.link.ack_frame()]),
        lambda: cut(ends),
        lambda: rejoin(ends),
    ]


@given(seed=st.integers(0, 1 << 32), start=st.sampled_from((0, (1 << 32) - 5, (1 << 31) - 3)))
@settings(max_examples=60, deadline=None)
def test_everything_arrives_once_and_in_order_whatever_breaks(seed: int, start: int) -> None:
    rng = random.Random(seed)
    ends = (End(start), End(start))
    for _ in range(rng.randrange(150)):
        step = rng.choices(steps(rng, ends), weights=(8, 10, 2, 1, 1))[0]
        if step is not None:
            step()
    cut(ends)
    rejoin(ends)
    settle(ends)

    for end, peer in (ends, ends[::-1]):
        assert peer.got == end.sent
        assert end.link.acked == end.link.sent
        assert end.link.unacked_bytes == 0


@given(frames=st.lists(st.tuples(*[st.integers(0, 0xFFFFFFFF)] * 2, st.integers(0, 9)), max_size=9))
def test_no_header_of_a_hostile_peer_does_more_than_raise_channel_error(
    frames: list[tuple[int, int, int]],
) -> None:
    link = Link()
    for _ in range(3):
        link.send(link.prepare(b"x"))
    for seq, ack, length in frames:
        try:
            link.accept(seq, ack, length)
        except ChannelError:
            break
    assert link.acked <= link.sent == 3


def test_a_missing_message_is_an_error() -> None:
    link = Link()
    assert link.accept(1, 0, 5)
    with pytest.raises(ChannelError, match="message 2 is missing, 1 after it came"):
        link.accept(3, 0, 5)


def test_an_acknowledgement_of_what_was_never_sent_is_an_error() -> None:
    link = Link()
    with pytest.raises(ChannelError, match="acknowledges 1 messages after 0"):
        link.accept(1, 1, 5)


def test_a_repeated_message_is_dropped() -> None:
    link = Link()
    assert link.accept(1, 0, 5)
    assert not link.accept(1, 0, 5)
    assert link.received == 1


def test_it_cannot_resume_where_messages_are_forgotten_or_were_never_sent() -> None:
    link = Link()
    for _ in range(3):
        link.send(link.prepare(b"x"))
    link.accept(1, 2, 1)
    assert not link.can_resume(1)
    with pytest.raises(ChannelError, match="cannot resume after message 1: 2 are acknowledged"):
        link.resume(1)
    with pytest.raises(ChannelError, match="cannot resume after message 4"):
        link.resume(4)
    assert len(link.resume(2)) == 1


@pytest.mark.parametrize("payload", [b"", [], [b"", bytearray()]])
def test_an_empty_message_is_refused(payload: bytes | list[bytes]) -> None:
    with pytest.raises(FrameError, match="a message of 0 bytes"):
        Link().prepare(payload)


def test_a_message_above_the_frame_limit_is_refused() -> None:
    whole = memoryview(bytearray(1 << 20))
    with pytest.raises(FrameError):
        Link().prepare([whole] * (MAX_PAYLOAD_BYTES // len(whole) + 1))


def test_no_more_is_kept_than_allowed() -> None:
    link = Link(max_unacked_bytes=100)
    link.send(link.prepare(b"x" * 101))
    with pytest.raises(ResourceError, match="not acknowledged: 101 bytes wanted, the limit is 100"):
        link.prepare(b"y")
    link.accept(1, 1, 1)
    link.prepare(b"y")


def test_parts_of_any_shape_are_counted_in_bytes() -> None:
    link = Link()
    grid = memoryview(bytearray(24)).cast("I", (2, 3))
    empty = memoryview(bytearray(24)).cast("I", (2, 3))[:0]
    length, parts = link.prepare([b"ab", bytearray(b"cd"), grid, empty])
    assert length == 28
    assert [len(part) for part in parts] == [2, 2, 24, 0]


def test_large_parts_are_sent_without_a_copy() -> None:
    link = Link()
    large = memoryview(bytearray(1 << 20))
    frame = link.send(link.prepare([b"head", large]))
    assert HEADER.unpack(frame[0])[0] == (1 << 20) + 4
    assert isinstance(frame[2], memoryview)
    assert frame[2].obj is large.obj


def test_a_bare_acknowledgement_is_due_after_many_messages_or_many_bytes() -> None:
    link = Link()
    for seq in range(1, 64):
        link.accept(seq, 0, 1)
    assert link.ack_owed
    assert not link.ack_due
    link.accept(64, 0, 1)
    assert link.ack_due
    link.ack_frame()
    assert not link.ack_owed
    link.accept(65, 0, 300 << 10)
    assert link.ack_due
