"""Exceptions and the status messages of the wire, each made from the other."""

from __future__ import annotations

import re
from typing import Any, Final

from regrow.errors import (
    Code,
    ResourceError,
    StatusError,
    UnsupportedError,
)

MAX_MESSAGE_CHARS: Final = 16384

_ABSL = re.compile(
    r"(?:[\w.]*(?:Error|Exception): )?"
    rf"(?P<code>{'|'.join(code.name for code in Code if code is not Code.OK)})"
    r"(?:: |\Z)(?P<message>.*)",
    re.DOTALL,
)
_CODES_BY_TYPE: Final[tuple[tuple[type[BaseException], Code], ...]] = (
    (ResourceError, Code.RESOURCE_EXHAUSTED),
    (MemoryError, Code.RESOURCE_EXHAUSTED),
    (UnsupportedError, Code.UNIMPLEMENTED),
    (NotImplementedError, Code.UNIMPLEMENTED),
)
# XLA answers with these for a fault of its own; callers of JAX would take them for a lost slice.
_FAULTS_OF_XLA: Final = frozenset({Code.INTERNAL, Code.DATA_LOSS, Code.DEADLINE_EXCEEDED})


def from_exception(exc: BaseException) -> StatusError:
    """The status that tells a JAX client about `exc`.

    A StatusError stays as it is. XLA's errors carry their code in front of their text. Whatever is
    not a StatusError comes out free of the words that mean a lost slice (see `StatusError.user`):
    only who knows that a slice is lost may say so.
    """
    if isinstance(exc, StatusError):
        return exc
    text = str(exc)
    match = _ABSL.match(text)
    if match:
        return _from_absl(Code[match["code"]], match["message"])
    for kind, code in _CODES_BY_TYPE:
        if isinstance(exc, kind):
            return StatusError.user(code, _shortened(text or type(exc).__name__))
    name = type(exc).__name__
    return StatusError.user(Code.UNKNOWN, _shortened(f"{name}: {text}" if text else name))


def _from_absl(code: Code, message: str) -> StatusError:
    message = _shortened(message)
    shown = Code.UNKNOWN if code in _FAULTS_OF_XLA else code
    error = StatusError.user(shown, message)
    if error.code is code:
        return error
    return StatusError.user(error.code, f"{code.name}: {message}")


def _shortened(message: str) -> str:
    """XLA puts whole programs into some messages; a client needs the beginning and the end."""
    cut = len(message) - MAX_MESSAGE_CHARS
    if cut <= 0:
        return message
    half = MAX_MESSAGE_CHARS // 2
    return f"{message[:half]} … ({cut} characters left out) … {message[-half:]}"


def fill(status_proto: Any, err: StatusError) -> None:
    """Writes `err` into a `tensorflow.StatusProto`."""
    status_proto.code = int(err.code)
    status_proto.message = err.message.encode("utf-8", "replace").decode("utf-8")


def from_proto(status_proto: Any) -> StatusError | None:
    """Reads a `tensorflow.StatusProto`; None means OK."""
    if status_proto.code == Code.OK:
        return None
    try:
        code = Code(status_proto.code)
    except ValueError:
        code = Code.UNKNOWN
    return StatusError(code, status_proto.message)
