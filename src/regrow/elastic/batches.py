"""How the global batch follows the number of slices, and what that does to the learning rate.

Both policies are plain values: ask one for the batch whenever the active slices have changed.

`ConstantGlobalBatch`: every step sees the same number of records, whatever is lost. The gradient of a
step is the same average over the same records, only summed in another order, so the learning rate, its
schedule and everything that counts steps stay as they are, and a run with losses follows the
undisturbed one. The price: fewer slices do the same work, so a step takes total/active times as long.

`ScaledGlobalBatch`: every slice keeps its share, so a step takes the same time and sees active/total
of the records. The gradient is an average over fewer records: its expectation is the same, its
variance is total/active times as large. To make the same progress for each record the learning rate
goes down with the batch: linearly for SGD, by the square root for optimizers that divide by the
gradient's own scale (Adam and its kin). Schedules (warm-up, decay, the end of training) must count
records and not steps, since the same records take more steps. Such a run does not equal the undisturbed
one; it is another, equally valid one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final

from regrow.errors import UsageError

LearningRateRule: TypeAlias = Literal["linear", "square root", "none"]
_POWERS: Final[dict[LearningRateRule, float]] = {"linear": 1.0, "square root": 0.5, "none": 0.0}


@final
@dataclass(frozen=True, slots=True)
class Batch:
    """The batch for a number of slices.

    Attributes:
        records: Of a step, over all slices.
        records_per_slice: The share of a slice.
        learning_rate_factor: What the learning rate for all slices is to be multiplied by.
    """

    records: int
    records_per_slice: int
    learning_rate_factor: float


@final
@dataclass(frozen=True, slots=True)
class ConstantGlobalBatch:
    """The same records in each step, shared by the slices that are there.

    Attributes:
        records: Of a step. Every number of active slices that comes up must divide it.
    """

    records: int

    def __post_init__(self) -> None:
        _check_positive("records", self.records)

    @classmethod
    def at_least(cls, records: int, total_slices: int) -> ConstantGlobalBatch:
        """The smallest batch of so many records or more that any number of slices can share."""
        _check_positive("total_slices", total_slices)
        shares = math.lcm(*range(1, total_slices + 1))
        return cls(-(-max(records, 1) // shares) * shares)

    def batch(self, active: int, total: int) -> Batch:
        """The batch for so many slices of all.

        Raises:
            UsageError: They cannot share it evenly.
        """
        _check_counts(active, total)
        share, rest = divmod(self.records, active)
        if rest:
            fits = self.at_least(self.records, total).records
            raise UsageError(
                f"{active} slices cannot share {self.records} records evenly; "
                f"{fits} suit any number up to {total}"
            )
        return Batch(self.records, share, 1.0)


@final
@dataclass(frozen=True, slots=True)
class ScaledGlobalBatch:
    """The same records for each slice, so fewer in a step when slices are gone.

    Attributes:
        records_per_slice: The share of a slice.
        rule: How the learning rate follows the batch: "linear" (SGD), "square root" (Adam), "none".
    """

    records_per_slice: int
    rule: LearningRateRule = "linear"

    def __post_init__(self) -> None:
        _check_positive("records_per_slice", self.records_per_slice)
        if self.rule not in _POWERS:
            raise UsageError(f"{self.rule!r} is no rule; there are: {', '.join(_POWERS)}")

    def batch(self, active: int, total: int) -> Batch:
        """The batch for so many slices of all.

        Raises:
            UsageError: These are no numbers of slices.
        """
        _check_counts(active, total)
        factor: float = (active / total) ** _POWERS[self.rule]
        return Batch(self.records_per_slice * active, self.records_per_slice, factor)


BatchPolicy: TypeAlias = ConstantGlobalBatch | ScaledGlobalBatch


def _check_counts(active: int, total: int) -> None:
    if not 1 <= active <= total:
        raise UsageError(f"{active} of {total} slices cannot be active")


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise UsageError(f"{name} is {value}; it must be 1 or more")
