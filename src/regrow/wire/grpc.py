"""gRPC over HTTP/2: messages, statuses and metadata, without sockets."""

from __future__ import annotations

import base64
import binascii
import logging
import struct
from collections.abc import Iterator
from typing import Final, final
from urllib.parse import quote

from regrow.errors import Code, StatusError
from regrow.wire import headers
from regrow.wire.headers import Headers
from regrow.wire.streams import Stream

_log = logging.getLogger(__name__)

_PREFIX: Final = struct.Struct(">BI")
PREFIX_BYTES: Final = 5
unpack_prefix: Final = _PREFIX.unpack_from

# Clients take no more than 8 KiB of metadata by default.
_MAX_MESSAGE_BYTES: Final = 4000

# Every printable character but the percent sign stands for itself.
_PLAIN: Final = "".join(map(chr, range(32, 127))).replace("%", "")

RESPONSE: Final = headers.STATUS_200 + headers.encode([(b"content-type", b"application/grpc")])
TRAILERS_OK: Final = headers.encode([(b"grpc-status", b"0")])


def prefix(size: int) -> bytes:
    """What stands in front of a message of `size` bytes."""
    return _PREFIX.pack(0, size)


def varint(value: int) -> bytes:
    """A protobuf varint."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def trailers(code: Code, message: str) -> bytes:
    """The header block that tells a status."""
    quoted = quote(message, safe=_PLAIN, errors="replace")
    while len(quoted) > _MAX_MESSAGE_BYTES:
        message = message[: len(message) * 7 // 8]
        quoted = quote(message, safe=_PLAIN, errors="replace")
    return headers.encode([(b"grpc-status", b"%d" % code), (b"grpc-message", quoted.encode())])


def fail(stream: Stream, error: StatusError, *, answered: bool = False) -> None:
    """End a call with an error; `answered` if the response's headers were sent already."""
    block = trailers(error.code, error.message)
    stream.finish(block if answered else RESPONSE + block)


def answer(stream: Stream, message: bytes) -> None:
    """End a call that has one answer."""
    stream.headers(RESPONSE)
    stream.write(prefix(len(message)) + message)
    stream.finish(TRAILERS_OK)


def status_of(error: Exception, what: str) -> StatusError:
    """The status that a client sees for an exception; unexpected ones are logged."""
    if isinstance(error, StatusError):
        return error
    _log.error("%s failed", what, exc_info=error)
    return StatusError.user(Code.UNKNOWN, f"{what} failed in the server; its log tells more")


def binary_metadata(fields: Headers, key: bytes) -> bytes:
    """The value of a `-bin` header: base64 with or without padding, or after a zero byte as it is.

    Raises:
        StatusError: It is not there, or damaged.
    """
    value = fields.get(key)
    if value is None:
        raise StatusError(Code.INVALID_ARGUMENT, f"the metadata {key.decode()} is missing")
    if value[:1] == b"\0":
        return value[1:]
    try:
        return base64.b64decode(value + b"=" * (-len(value) % 4), validate=True)
    except binascii.Error as error:
        raise StatusError(
            Code.INVALID_ARGUMENT, f"the metadata {key.decode()} is not base64"
        ) from error


@final
class Budget:
    """A bound on what one connection may make us keep of messages that are not complete."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0

    def check(self, size: int) -> None:
        """Refuse a message that is too large in any case."""
        if size > self._limit_bytes:
            raise StatusError(
                Code.RESOURCE_EXHAUSTED,
                f"a message of {size} bytes is larger than the limit of {self._limit_bytes} bytes",
            )

    def change(self, count: int) -> None:
        """Take bytes, or give them back if `count` is negative."""
        if count > 0 and self._used_bytes + count > self._limit_bytes:
            raise StatusError(
                Code.RESOURCE_EXHAUSTED,
                "this connection's unfinished messages are larger than the limit of "
                f"{self._limit_bytes} bytes",
            )
        self._used_bytes += count


@final
class Messages:
    """Cuts a stream's bytes into messages."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._partial = bytearray()
        self._need = PREFIX_BYTES

    def feed(self, view: memoryview) -> Iterator[bytes]:
        """The messages that are complete with these bytes.

        Raises:
            StatusError: A message is too large or compressed.
        """
        partial = self._partial
        while len(view):
            step = min(self._need - len(partial), len(view))
            self._budget.change(step)
            partial += view[:step]
            view = view[step:]
            if len(partial) < self._need:
                return
            if self._need == PREFIX_BYTES:
                self._need += self._size()
            if len(partial) == self._need:
                message = bytes(memoryview(partial)[PREFIX_BYTES:])
                self.drop()
                yield message

    def whole(self) -> bool:
        """Whether no message is begun."""
        return not self._partial

    def drop(self) -> None:
        """Forget what is there of a message."""
        self._budget.change(-len(self._partial))
        self._partial.clear()
        self._need = PREFIX_BYTES

    def _size(self) -> int:
        compressed, size = unpack_prefix(self._partial)
        if compressed:
            raise StatusError(Code.UNIMPLEMENTED, "compressed messages are not supported")
        self._budget.check(size)
        return int(size)
