"""What the program is told when a host callback raises."""

from __future__ import annotations

import traceback
from typing import Final

from regrow.channel import rgcb
from regrow.errors import Code

_SLICE_LOST: Final = "DATA_LOSS: slice "
_MAX_TEXT_CHARS: Final = 12000


def answer_to(error: BaseException) -> bytes:
    """The answer for a callback that raised `error`.

    The error is the user's own, except where the callback used the cluster and met a lost slice:
    then the program fails with that loss.
    """
    message = _message_of(error)
    trace = _trace_of(error)
    if message.startswith(_SLICE_LOST):
        text = f"{message.removeprefix('DATA_LOSS: ')}\nA host callback met this{trace}"
        return rgcb.failure(Code.DATA_LOSS, _shortened(text))
    name = type(error).__name__
    first = f"{name}: {message}" if message else name
    return rgcb.failure(Code.UNKNOWN, _shortened(f"{first}\nA host callback raised this{trace}"))


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:  # noqa: BLE001 (an exception of the user's may have a broken text)
        return f"(its text cannot be told: {type(second).__name__})"


def _trace_of(error: BaseException) -> str:
    start = error.__traceback__
    while start is not None and _is_ours(start.tb_frame.f_code.co_filename):
        start = start.tb_next
    if start is None:
        return "."
    try:
        lines = traceback.format_exception(type(error), error, start)
    except Exception as second:  # noqa: BLE001 (as above)
        return f" (no traceback: {type(second).__name__})."
    return ":\n" + "".join(lines).rstrip()


def _is_ours(file: str) -> bool:
    file = file.replace("\\", "/")
    return "/regrow/client/" in file or "/jax/_src/" in file


def _shortened(text: str) -> str:
    cut = len(text) - _MAX_TEXT_CHARS
    if cut <= 0:
        return text
    half = _MAX_TEXT_CHARS // 2
    return f"{text[:half]}\n… ({cut} characters left out) …\n{text[-half:]}"
