"""A reliable link over connections that may break: each message arrives once and in order.

Sans-IO. Both ends number their messages from 1, keep each until it is acknowledged, and tell the other
end at (re)connection the last number they received; `resume` then gives what has to be sent again.
Acknowledgements ride on messages; a bare one is due when the peer's kept bytes grow or the line is idle.

One thread (or loop) may use the sending half while another uses the receiving half: no field is written
by both. `resume` needs both halves to rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, TypeAlias, final

from regrow.channel.frames import HEADER, MAX_PAYLOAD_BYTES, Buffer
from regrow.errors import ChannelError, FrameError, ResourceError

_MASK: Final = 0xFFFFFFFF
_ACK_AFTER_BYTES: Final = 256 << 10
_ACK_AFTER_MESSAGES: Final = 64
_JOIN_BYTES: Final = 4 << 10  # Below this a copy costs less than one more buffer for the kernel.
MAX_UNACKED_BYTES: Final = 4 << 30

Message: TypeAlias = tuple[int, tuple[Buffer, ...]]
"""The length and the parts of a message that may be sent."""


@final
class Link:
    """Numbers, keeps, acknowledges and drops duplicates for one end of a channel.

    Attributes:
        sent: Number of the last message given to `send`.
        acked: Number of the last message that the peer has acknowledged.
        received: Number of the last message that came in.
    """

    __slots__ = (
        "_acked_bytes",
        "_kept",
        "_max_unacked_bytes",
        "_received_bytes",
        "_sent_bytes",
        "_told",
        "_told_bytes",
        "acked",
        "received",
        "sent",
    )

    def __init__(self, max_unacked_bytes: int = MAX_UNACKED_BYTES) -> None:
        self._max_unacked_bytes = max_unacked_bytes
        self._kept: deque[tuple[int, list[Buffer]]] = deque()
        self.sent = 0
        self._sent_bytes = 0
        self.acked = 0
        self._acked_bytes = 0
        self.received = 0
        self._received_bytes = 0
        self._told = 0
        self._told_bytes = 0

    @property
    def unacked_bytes(self) -> int:
        """Payload bytes that are kept because the peer has not acknowledged them."""
        return self._sent_bytes - self._acked_bytes

    @property
    def ack_owed(self) -> bool:
        """Whether the peer has not been told of everything that came in."""
        return self.received != self._told

    @property
    def ack_due(self) -> bool:
        """Whether so much is owed that a bare acknowledgement should not wait."""
        return (
            self.received - self._told >= _ACK_AFTER_MESSAGES
            or self._received_bytes - self._told_bytes >= _ACK_AFTER_BYTES
        )

    def prepare(self, payload: Buffer | Sequence[Buffer]) -> Message:
        """Checks that a message, given whole or in parts, may be sent.

        Raises:
            ResourceError: The peer is so far behind that no more is kept for it.
            FrameError: The message is empty or larger than a frame may be.
        """
        parts: tuple[Buffer, ...]
        if isinstance(payload, bytes):
            length, parts = len(payload), (payload,)
        else:
            given = (payload,) if isinstance(payload, (bytearray, memoryview)) else payload
            parts = tuple([_flat(part) for part in given])
            length = sum(map(len, parts))
        if not 0 < length <= MAX_PAYLOAD_BYTES:
            raise FrameError(f"a message of {length} bytes; 1 to {MAX_PAYLOAD_BYTES} can be sent")
        if self._sent_bytes - self._acked_bytes > self._max_unacked_bytes:
            raise ResourceError(
                "messages that the peer has not acknowledged",
                self.unacked_bytes,
                self._max_unacked_bytes,
            )
        return length, parts

    def send(self, message: Message) -> list[Buffer]:
        """Numbers and keeps a message; returns its frame in parts, not to be changed."""
        length, parts = message
        header = self._header(length, self.sent + 1)
        frame: list[Buffer] = (
            [b"".join((header, *parts))] if length <= _JOIN_BYTES else [header, *parts]
        )
        # Kept before it is counted, so that an acknowledgement never finds it missing.
        self._kept.append((length, frame))
        self.sent += 1
        self._sent_bytes += length
        return frame

    def ack_frame(self) -> bytes:
        """A bare acknowledgement of everything that came in."""
        return self._header(0, self.sent)

    def _header(self, length: int, seq: int) -> bytes:
        received = self.received
        self._told_bytes = self._received_bytes
        self._told = received
        return HEADER.pack(length, seq & _MASK, received & _MASK)

    def accept(self, seq: int, ack: int, length: int) -> bool:
        """Takes note of a frame; true if its payload is new and to be delivered.

        Raises:
            ChannelError: The peer acknowledges what was never sent, or left a message out.
        """
        newly_acked = (ack - self.acked) & _MASK
        # A frame that is sent again carries the acknowledgement of its first time, which may be old.
        if 0 < newly_acked <= _MASK >> 1:
            self._forget(newly_acked)
        if not length:
            return False
        ahead = (seq - self.received - 1) & _MASK
        if ahead > _MASK >> 1:
            return False
        if ahead:
            raise ChannelError(f"message {self.received + 1} is missing, {ahead} after it came")
        self._received_bytes += length
        self.received += 1
        return True

    def _forget(self, count: int) -> None:
        if count > self.sent - self.acked:
            raise ChannelError(
                f"the peer acknowledges {count} messages after {self.acked}, "
                f"the last that was sent is {self.sent}"
            )
        for _ in range(count):
            length, _frame = self._kept.popleft()
            self._acked_bytes += length
            self.acked += 1

    def can_resume(self, peer_last_received: int) -> bool:
        """Whether the messages after that number are still here."""
        return self.acked <= peer_last_received <= self.sent

    def resume(self, peer_last_received: int) -> list[Buffer]:
        """The frames to send first on a new connection.

        Raises:
            ChannelError: The peer's number is outside what can be resumed.
        """
        if not self.can_resume(peer_last_received):
            raise ChannelError(
                f"cannot resume after message {peer_last_received}: "
                f"{self.acked} are acknowledged and {self.sent} sent"
            )
        self._forget(peer_last_received - self.acked)
        return [buf for _length, frame in self._kept for buf in frame]


def _flat(part: Buffer) -> Buffer:
    # What is left of a part after a partial write is counted in bytes, whatever its items are.
    if isinstance(part, bytes):
        return part
    view = memoryview(part)
    return view.cast("B") if view.nbytes else b""
