"""HTTP/2 frames (RFC 9113): their numbers, and how they are written."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_BYTES: Final = 9
MAX_WINDOW: Final = (1 << 31) - 1
DEFAULT_WINDOW: Final = (1 << 16) - 1
DEFAULT_FRAME: Final = 1 << 14
MAX_FRAME: Final = (1 << 24) - 1

# Frame types.
DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

# Flags.
ACK: Final = 0x01  # SETTINGS, PING
END_STREAM: Final = 0x01  # DATA, HEADERS
END_HEADERS: Final = 0x04
PADDED: Final = 0x08
HAS_PRIORITY: Final = 0x20

# Settings.
HEADER_TABLE_SIZE: Final = 1
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6
GRPC_TRUE_BINARY_METADATA: Final = 0xFE03  # of gRPC: `-bin` values need no base64

# Error codes.
NO_ERROR: Final = 0
PROTOCOL_ERROR: Final = 1
INTERNAL_ERROR: Final = 2
FLOW_CONTROL_ERROR: Final = 3
STREAM_CLOSED: Final = 5
FRAME_SIZE_ERROR: Final = 6
REFUSED_STREAM: Final = 7
CANCEL: Final = 8
COMPRESSION_ERROR: Final = 9
ENHANCE_YOUR_CALM: Final = 11

# Length (24 bits) and type, flags, stream: the length comes out as `first >> 8`.
_HEADER: Final = struct.Struct(">IBI")
unpack_header: Final = _HEADER.unpack_from
pack_header: Final = _HEADER.pack

_SETTING: Final = struct.Struct(">HI")


def frame(kind: int, flags: int, stream: int, payload: Buffer = b"") -> bytes:
    """A whole frame."""
    return pack_header(len(payload) << 8 | kind, flags, stream) + payload


def settings(values: Mapping[int, int]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*pair) for pair in values.items()))


def parse_settings(payload: Buffer) -> list[tuple[int, int]]:
    """The pairs of a SETTINGS frame, whose length is a multiple of 6."""
    return list(_SETTING.iter_unpack(payload))


def window_update(stream: int, credit: int) -> bytes:
    """A WINDOW_UPDATE frame; stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream, credit.to_bytes(4, "big"))


def rst_stream(stream: int, code: int) -> bytes:
    """A RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream, code.to_bytes(4, "big"))


def goaway(last_stream: int, code: int, text: str = "") -> bytes:
    """A GOAWAY frame."""
    payload = last_stream.to_bytes(4, "big") + code.to_bytes(4, "big") + text.encode()
    return frame(GOAWAY, 0, 0, payload)
