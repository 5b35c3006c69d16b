"""How far an array reaches in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from regrow.errors import Code, StatusError


def c_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The strides of C order, in bytes."""
    strides = []
    step = itemsize
    for dim in reversed(shape):
        strides.append(step)
        step *= dim
    return tuple(reversed(strides))


def extent(shape: Sequence[int], strides: Sequence[int] | None, itemsize: int) -> int:
    """The bytes from the first element to the end of the last; without strides in C order.

    Raises:
        StatusError: There can be no such array.
    """
    if min(shape, default=0) < 0:
        raise _refusal(f"array of shape {list(shape)}")
    if strides is None:
        return math.prod(shape) * itemsize
    if len(strides) != len(shape) or min(strides, default=0) < 0:
        raise _refusal(f"array of shape {list(shape)} with strides {list(strides)}")
    if 0 in shape:
        return 0
    return sum((d - 1) * s for d, s in zip(shape, strides, strict=True)) + itemsize


def check_extent(
    size: int, shape: Sequence[int], strides: Sequence[int] | None, itemsize: int
) -> None:
    """Checks that a buffer of that size holds an array.

    Raises:
        StatusError: It does not.
    """
    if extent(shape, strides, itemsize) > size:
        laid = "" if strides is None else f" with strides {list(strides)}"
        raise StatusError.user(
            Code.INVALID_ARGUMENT,
            f"a host buffer of {size} bytes does not hold an array of shape {list(shape)}{laid}",
        )


def _refusal(what: str) -> StatusError:
    return StatusError.user(Code.INVALID_ARGUMENT, f"there can be no {what}")
