"""Runs to be compared, made by hand."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from regrow.chaos.committed import Committed
from regrow.elastic.journal import Loss, StepRecord

ALL, FEWER = (0, 1, 2), (0, 2)


def loss(value: float, dtype: str = "float32") -> Loss:
    bits = struct.pack("<f", value)
    return Loss(dtype, bits.hex(), struct.unpack("<f", bits)[0])


def step(number: int, slices: Sequence[int] | None = ALL, **changes: Any) -> StepRecord:
    """Step `number`, which uses records 4 * number to 4 * number + 3."""
    made: dict[str, Any] = {
        "loss": loss(10.0 - number),
        "state": {"params/w": f"float32[8] {number}", "opt/m": f"float32[8] {number + 100}"},
        "ids": tuple(range(4 * number, 4 * number + 4)),
        "slices": None if slices is None else tuple(slices),
    }
    return StepRecord(number, **made | changes)


def run(*records: StepRecord) -> Committed:
    return Committed.of(records)


def steps(first: int, last: int, slices: Sequence[int] | None = ALL) -> list[StepRecord]:
    return [step(number, slices) for number in range(first, last + 1)]
