"""Frames: what crosses the socket between head and worker.

A frame is a header of three little-endian u32 (payload length, sequence number, acknowledgement) and
the payload. A length of 0 is a bare acknowledgement; a message is never empty. The payload is opaque
here. Small payloads arrive as `bytes`; from `LARGE_BYTES` on, the caller's `recv_into` writes straight
into the payload's own memory and it arrives as a `memoryview`, without a copy.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, TypeAlias, final

import numpy as np

from regrow.errors import FrameError

Buffer: TypeAlias = bytes | bytearray | memoryview

HEADER: Final = struct.Struct("<III")
HEADER_BYTES: Final = HEADER.size
MAX_PAYLOAD_BYTES: Final = 1 << 30
LARGE_BYTES: Final = 64 << 10
_CHUNK_BYTES: Final = 256 << 10


Frame: TypeAlias = tuple[int, int, bytes | memoryview]
"""Sequence number, acknowledgement, and payload; the payload of a bare acknowledgement is empty."""


@final
class FrameReader:
    """Cuts a byte stream into frames; no I/O of its own.

    Receive into `buffer()`, then tell `received(count)`, which hands over the frames that are complete.
    """

    __slots__ = (
        "_chunk",
        "_end",
        "_filled",
        "_header",
        "_large",
        "_max_payload_bytes",
        "_on_frames",
        "_view",
    )

    def __init__(
        self,
        on_frames: Callable[[list[Frame]], None],
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        self._on_frames = on_frames
        self._max_payload_bytes = max_payload_bytes
        self._chunk = bytearray(_CHUNK_BYTES)
        self._view = memoryview(self._chunk)
        self._end = 0
        self._large: memoryview | None = None
        self._filled = 0
        self._header = (0, 0)

    def buffer(self) -> memoryview:
        """Where the next bytes go; never empty."""
        if self._large is not None:
            return self._large[self._filled :]
        return self._view[self._end :]

    def received(self, count: int) -> None:
        """Takes note of `count` bytes in `buffer()`.

        Raises:
            FrameError: The bytes are no frame; the connection is of no more use.
        """
        if self._large is None:
            self._end += count
            self._on_frames(self._parse())
            return
        self._filled += count
        if self._filled == len(self._large):
            payload, self._large = self._large, None
            self._on_frames([(*self._header, payload)])

    def _parse(self) -> list[Frame]:
        frames: list[Frame] = []
        view, start, end = self._view, 0, self._end
        while end - start >= HEADER_BYTES:
            length, seq, ack = HEADER.unpack_from(view, start)
            if length > self._max_payload_bytes:
                raise FrameError(
                    f"a frame of {length} bytes; the limit is {self._max_payload_bytes}"
                )
            body = start + HEADER_BYTES
            if body + length <= end:
                start = body + length
                frames.append((seq, ack, bytes(view[body:start])))
                continue
            if length >= LARGE_BYTES:
                self._begin_large(length, seq, ack, body)
                start = end
            break
        left = end - start
        if start and left:
            self._chunk[:left] = self._chunk[start:end]
        self._end = left
        return frames

    def _begin_large(self, length: int, seq: int, ack: int, body: int) -> None:
        # numpy's memory is not zeroed first, which for large payloads costs as much as receiving them.
        large = np.empty(length, np.uint8).data
        self._filled = self._end - body
        large[: self._filled] = self._view[body : self._end]
        self._large = large
        self._header = (seq, ack)
