"""The step that an execution belongs to, as it travels in the id of the execution's stream.

An id that nobody has set is a hash of the thread, any 64 bits; a step is told from it by its upper half.
"""

from __future__ import annotations

from typing import Final

_MARK: Final = 0x52475354  # "RGST"
_BITS: Final = 32
_LARGEST: Final = (1 << _BITS) - 1


def stamp_of(step: int) -> int:
    """The id of the stream for the executions of a step; 0, which JAX replaces, if it is too large."""
    return _MARK << _BITS | step if 0 <= step <= _LARGEST else 0


def step_of(stamp: int) -> int | None:
    """The step of an execution; None: it carries none."""
    return stamp & _LARGEST if stamp >> _BITS == _MARK else None
