"""The losses that a script prints, for proofs of scripts that record nothing. No I/O.

A printed loss is known to the digits that are printed, and nothing tells which slices it comes from.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Final

from regrow.elastic.journal import Loss, StepRecord
from regrow.errors import UsageError

PRINTED: Final = "printed"
"""What stands for the type of a printed loss; its bits are those of the text."""

DEFAULT: Final = (
    r"\bstep\W{0,3}(?P<step>\d+)\b.*?"
    r"\bloss\W{0,3}(?P<loss>[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|\.\d+|nan|inf))"
)
"""How "step 12 loss 0.5" is found, also "Step: 12, loss=0.5" and as JSON."""


def pattern_of(text: str) -> re.Pattern[str]:
    """The pattern for lines that tell a step and its loss.

    Raises:
        UsageError: It is no regular expression, or lacks a group.
    """
    try:
        pattern = re.compile(text, re.IGNORECASE)
    except re.error as error:
        raise UsageError(f"--losses {text!r} is no regular expression: {error}") from None
    if missing := {"step", "loss"} - set(pattern.groupindex):
        group = max(missing)
        raise UsageError(f"--losses {text!r} has no group (?P<{group}>...); it needs step and loss")
    return pattern


def steps_in(lines: Iterable[tuple[float, str]], pattern: re.Pattern[str]) -> list[StepRecord]:
    """What lines tell of steps, each with the time at which it came; others are left out."""
    found = ((at, pattern.search(line)) for at, line in lines)
    made = (_record(at, match) for at, match in found if match is not None)
    return [one for one in made if one is not None]


def _record(at: float, match: re.Match[str]) -> StepRecord | None:
    text = match["loss"]
    try:
        step, value = int(match["step"]), float(text)
    except (TypeError, ValueError):
        return None
    return StepRecord(step, Loss(PRINTED, text.encode().hex(), value), at=at)


def resolution(loss: Loss) -> float:
    """The unit of the last digit of a loss that was printed; 0 of any other."""
    if loss.dtype != PRINTED or not math.isfinite(loss.value):
        return 0.0
    exponent = Decimal(bytes.fromhex(loss.bits).decode()).as_tuple().exponent
    return 10.0**exponent if isinstance(exponent, int) else 0.0
