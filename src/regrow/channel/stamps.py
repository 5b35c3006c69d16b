"""The step that an execution belongs to, as it travels in the id of the execution's stream.

An id that nobody has set is a hash of the thread, any 64 bits; a step is told from it by its upper half.
"""

from __future__ import annotations

from typing import Final

_TOLD: Final = 0x52475354  # "RGST"
_EXPECTED: Final = 0x52475358  # "RGSX"
_BITS: Final = 32
_LARGEST: Final = (1 << _BITS) - 1


def stamp_of(step: int, *, expected: bool = False) -> int:
    """The id of the stream for the executions of a step; 0, which JAX replaces, if it is too large.

    Args:
        step: The step.
        expected: Whether it is only what follows the step before: a program that goes back to a
            snapshot has not said so yet.
    """
    mark = _EXPECTED if expected else _TOLD
    return mark << _BITS | step if 0 <= step <= _LARGEST else 0


def step_of(stamp: int) -> int | None:
    """The step of an execution; None: it carries none."""
    return stamp & _LARGEST if stamp >> _BITS in (_TOLD, _EXPECTED) else None


def is_expected(stamp: int) -> bool:
    """Whether the step of an execution is only what was to be expected."""
    return stamp >> _BITS == _EXPECTED
