"""The connections over which a program calls back into the user's process.

The client opens them to the address at which it reached the head. They begin with a preface that is
as long as that of HTTP/2, so one listening socket serves both:

    preface     b"RGCB", 4 zero bytes, the nonce of the client's session in 16 hexadecimal digits

The nonce is made by the client and travels in the session's initialization data, so a connection is
as trusted as the session, and ends with it. Then frames, each a u64 length and as many bytes:

    head -> client   u8 kind, 3 zero bytes, u32 index, u64 token, values (of a CALL) or a text (of a BYE)
    client -> head   u8 outcome, 3 zero bytes, u32 code, values or a text in UTF-8

The head says HELLO once; each CALL is answered before the next one on the same connection. Where no
connection of a session is idle the client opens another, so calls within calls never starve. FREE
says that no executable uses the callbacks of a token any longer, BYE why the head ends; they have no
answer.

A client that knocks gives a nonce of zeros, then a frame with its token, and gets a frame back: empty,
or the reason why it would be refused. (The stock client never shows the reason, and tries for long.)

Imports the standard library only: it also runs in the user's process.
"""

from __future__ import annotations

import re
import struct
from typing import Final, NamedTuple

from regrow.errors import Code, ProtocolError

MAGIC: Final = b"RGCB"
PREFACE_BYTES: Final = 24
MAX_FRAME_BYTES: Final = 1 << 31
LENGTH: Final = struct.Struct("<Q")

TOKEN_KEY: Final = "regrow.token"  # noqa: S105 (a name)
NONCE_KEY: Final = "regrow.nonce"
CLIENT_KEY: Final = "regrow.client"
"""Keys of the initialization data of a session; the values are bytes."""

ATTRIBUTE: Final = "regrow.callbacks"
"""Frontend attribute of a program with host callbacks: `regrow:NONCE:TOKEN:COUNT;`."""

PARTITIONING: Final = "regrow.partitioning"
"""Frontend attribute of a program whose client takes part in its compilation; likewise."""

PROPAGATE: Final = 0
PARTITION: Final = 1
INFER: Final = 2
INSPECT: Final = 3
"""Indices of the functions that take part in a compilation (see `worker/partitioning.py`)."""

WHERE: Final = 0
"""Token of the function that tells where the client's main thread is; programs have higher ones."""

KNOCK: Final = "0" * 16
MAX_TOKEN_BYTES: Final = 4096

CALL: Final = 1
FREE: Final = 2
HELLO: Final = 3
BYE: Final = 4

VALUES: Final = 0
FAILED: Final = 1

_TEXT: Final = re.compile(rb"regrow:([0-9a-f]{16}):([0-9]{1,18}):([0-9]{1,6});")
_PARTITIONING_TEXT: Final = re.compile(rb"regrow-p:([0-9a-f]{16}):([0-9]{1,18}):([0-9]{1,6});")
_REQUEST: Final = struct.Struct("<B3xIQ")
_ANSWER: Final = struct.Struct("<B3xI")
ANSWER_BYTES: Final = _ANSWER.size


def preface(nonce: str) -> bytes:
    """The first bytes of a connection of the session with that nonce."""
    return MAGIC + bytes(4) + nonce.encode("ascii")


class ProgramCallbacks(NamedTuple):
    """The host callbacks of a program: whose they are, which, and how many."""

    nonce: str
    token: int
    number: int


def attribute(callbacks: ProgramCallbacks) -> str:
    """The text of the frontend attribute."""
    return f"regrow:{callbacks.nonce}:{callbacks.token}:{callbacks.number};"


def partitioning_attribute(callbacks: ProgramCallbacks) -> str:
    """The text of the frontend attribute PARTITIONING."""
    return attribute(callbacks).replace("regrow:", "regrow-p:", 1)


def callbacks_of(program: bytes | memoryview) -> ProgramCallbacks | None:
    """The host callbacks of a serialised program, or None.

    The text of an attribute stands in the serialised program as it is, so it needs no MLIR.
    """
    return _found(_TEXT, program)


def partitioning_of(program: bytes | memoryview) -> ProgramCallbacks | None:
    """The functions of its client that take part in a program's compilation, or None."""
    return _found(_PARTITIONING_TEXT, program)


def _found(text: re.Pattern[bytes], program: bytes | memoryview) -> ProgramCallbacks | None:
    found = text.search(program)
    if found is None:
        return None
    return ProgramCallbacks(found[1].decode("ascii"), int(found[2]), int(found[3]))


def request(kind: int, token: int = 0, index: int = 0) -> bytes:
    """The head of a frame to the client."""
    return _REQUEST.pack(kind, index, token)


def parse_request(frame: memoryview) -> tuple[int, int, int, memoryview]:
    """Kind, token, index and values of a frame to the client.

    Raises:
        ProtocolError: The frame is too short.
    """
    if frame.nbytes < _REQUEST.size:
        raise ProtocolError("a frame of a callback connection is too short")
    kind, index, token = _REQUEST.unpack_from(frame)
    return kind, token, index, frame[_REQUEST.size :]


def values_answer() -> bytes:
    """The head of an answer that carries values."""
    return _ANSWER.pack(VALUES, 0)


def failure(code: Code, text: str) -> bytes:
    """A whole answer that carries an error."""
    return _ANSWER.pack(FAILED, code) + text.encode("utf-8", "replace")


def parse_answer(frame: memoryview) -> memoryview | tuple[Code, str]:
    """The values of an answer, or its error.

    Raises:
        ProtocolError: The frame is no answer.
    """
    if frame.nbytes < _ANSWER.size:
        raise ProtocolError("the answer of a host callback is too short")
    outcome, number = _ANSWER.unpack_from(frame)
    rest = frame[_ANSWER.size :]
    if outcome == VALUES:
        return rest
    if outcome != FAILED:
        raise ProtocolError(f"the answer of a host callback has the unknown outcome {outcome}")
    try:
        code = Code(number)
    except ValueError:
        code = Code.UNKNOWN
    return code, bytes(rest).decode("utf-8", "replace")
