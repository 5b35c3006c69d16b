"""By how much a loss may differ when only the order of additions has changed. No I/O.

The derivation is in docs/prove.md, section "The tolerance".
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, final

from regrow.chaos.committed import Committed

AMPLIFICATION: Final = 16.0
"""What the data's cancellation and the network add to the rounding of one sum; see docs/prove.md."""

# 2^-p for a significand of p bits, the hidden one included.
_UNIT_ROUNDOFFS: Final = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
}
_UNKNOWN: Final = "float32"


@final
@dataclass(frozen=True, slots=True)
class Tolerance:
    """The relative difference of losses that other slices explain.

    Attributes:
        replicas: The most replicas that any step ran on.
        dtype: The coarsest floating-point type of the loss and the state.
    """

    replicas: int
    dtype: str

    @property
    def of_a_step(self) -> float:
        """What one step may add, relative to the loss."""
        return AMPLIFICATION * 2 * max(self.replicas - 1, 1) * _UNIT_ROUNDOFFS[self.dtype]

    def after(self, steps: int, fall: float = 1.0) -> float:
        """What so many steps on other slices may have added, relative to the loss.

        Args:
            steps: The first step on other slices counts as one.
            fall: The largest loss so far over the present one, at least 1: a loss that has fallen
                is what differences of larger numbers have left.
        """
        error = steps * self.of_a_step
        return error * math.sqrt(fall) + error * error * fall


def tolerance_of(*runs: Committed, slices: int = 1) -> Tolerance:
    """The tolerance for runs, from what was recorded of them; `slices` where no step tells its own."""
    steps = [one for run in runs for one in run.steps]
    replicas = max((len(one.slices) for one in steps if one.slices is not None), default=slices)
    dtypes = {one.loss.dtype for one in steps}
    for run in runs:
        if run.steps:
            dtypes |= _dtypes((run.steps[-1].state or {}).values())
    known = [dtype for dtype in dtypes if dtype in _UNIT_ROUNDOFFS]
    return Tolerance(replicas, max(known, key=_UNIT_ROUNDOFFS.__getitem__, default=_UNKNOWN))


def _dtypes(hashes: Iterable[str]) -> set[str]:
    return {text.partition("[")[0] for text in hashes}
