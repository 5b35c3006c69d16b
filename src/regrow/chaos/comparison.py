"""Compares the steps of two runs that count: bit by bit, or within a tolerance. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final

from regrow.chaos.committed import Committed
from regrow.chaos.printed import PRINTED, resolution
from regrow.chaos.tolerance import Tolerance
from regrow.elastic.journal import Loss, RecordId, StepRecord

# Decimal fractions are not exact in binary ones.
_A_HAIR_MORE: Final = 1.0 + 1e-9

Part: TypeAlias = Literal["steps", "slices", "records", "loss", "state"]


@final
@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of two runs.

    Attributes:
        step: The step.
        part: What differs there.
        path: The first leaf of the state that differs; None: none does, or there is no state.
        text: What differs, in words.
    """

    step: int
    part: Part
    path: str | None
    text: str


def first_difference(run: Committed, reference: Committed) -> Difference | None:
    """The first step that two runs do not have in every bit alike; None: there is none."""
    for one, other in _pairs(run, reference):
        if one is None or other is None:
            step, where = (other, "reference") if one is None else (one, "run")
            assert step is not None
            return Difference(step.step, "steps", None, f"only the {where} has this step")
        difference = _of_step(one, other)
        if difference is not None:
            return difference
    return None


def _pairs(
    run: Committed, reference: Committed
) -> Iterator[tuple[StepRecord | None, StepRecord | None]]:
    ours = {one.step: one for one in run.steps}
    others = {one.step: one for one in reference.steps}
    for step in sorted(ours.keys() | others.keys()):
        yield ours.get(step), others.get(step)


def _of_step(one: StepRecord, other: StepRecord) -> Difference | None:
    if one.slices != other.slices:
        text = f"computed on slices {_listed(one.slices)}, the reference on {_listed(other.slices)}"
        return Difference(one.step, "slices", None, text)
    if one.ids != other.ids:
        return Difference(one.step, "records", None, _records(one.ids, other.ids))
    path = _first_leaf(one, other)
    if one.loss.bits != other.loss.bits or one.loss.dtype != other.loss.dtype:
        text = f"the loss is {one.loss}, that of the reference {other.loss}"
        return Difference(
            one.step, "loss", path, text if path is None else f"{text}; {_leaf(one, other, path)}"
        )
    if path is not None:
        return Difference(one.step, "state", path, _leaf(one, other, path))
    return None


def _records(ours: Sequence[RecordId] | None, others: Sequence[RecordId] | None) -> str:
    if ours is None or others is None:
        return "only one of the runs told its records"
    for one, other in zip(ours, others, strict=False):
        if one != other:
            return f"record {one!r} was used, in the reference {other!r}"
    return f"{len(ours)} records were used, in the reference {len(others)}"


def _first_leaf(one: StepRecord, other: StepRecord) -> str | None:
    ours, others = one.state or {}, other.state or {}
    paths = [*ours, *(path for path in others if path not in ours)]
    return next((path for path in paths if ours.get(path) != others.get(path)), None)


def _leaf(one: StepRecord, other: StepRecord, path: str) -> str:
    ours, others = (told.get(path, "not there") for told in (one.state or {}, other.state or {}))
    return f"the state differs first at {path}: {ours}, in the reference {others}"


def _listed(slices: tuple[int, ...] | None) -> str:
    return "unknown" if slices is None else ", ".join(map(str, slices))


@final
@dataclass(frozen=True, slots=True)
class Closeness:
    """How close the losses of a run are to those of one on other slices.

    Attributes:
        comparable: Whether each step used the same records; if not, losses are not compared.
        largest: The largest relative difference of a loss.
        at: The step with it; None: all bits are equal, or what is printed of them.
        allowed: The tolerance at that step.
        exceeded: The first step whose loss differs by more than the tolerance; None: none does.
        text: That step in words; empty without one.
    """

    comparable: bool
    largest: float
    at: int | None
    allowed: float
    exceeded: int | None
    text: str = ""


def closeness(run: Committed, undisturbed: Committed, tolerance: Tolerance) -> Closeness:
    """Compares losses step by step; before the first step on other slices all bits must be equal.

    Where the slices of a step are not known, they may have been other ones.
    """
    largest, at, allowed, steps, highest = 0.0, None, 0.0, 0, 0.0
    for one, other in _pairs(run, undisturbed):
        if one is None or other is None:
            step = (one or other).step  # type: ignore[union-attr]
            return Closeness(True, math.inf, step, 0.0, step, "only one of the runs has this step")
        if one.ids is not None and sorted(map(str, one.ids)) != sorted(map(str, other.ids or ())):
            return Closeness(False, 0.0, None, 0.0, None)
        steps += bool(steps) or one.slices is None or one.slices != other.slices
        size = max(abs(one.loss.value), abs(other.loss.value))
        finite = math.isfinite(size)
        highest = max(highest, size) if finite else highest
        difference = _difference(one, other, size)
        bound = tolerance.after(steps, highest / size if size and finite else 1.0)
        if difference > largest or (at is None and _is_other(one.loss, other.loss)):
            largest, at, allowed = difference, one.step, bound
        if not difference <= bound:
            text = (
                f"the loss is {one.loss.value!r}, undisturbed {other.loss.value!r}: a relative "
                f"difference of {difference:.1e}, {bound:.1e} is allowed"
            )
            return Closeness(True, difference, one.step, bound, one.step, text)
    return Closeness(True, largest, at, allowed, None)


def _is_other(one: Loss, other: Loss) -> bool:
    """Whether the bits differ; those of printed numbers may by a rounding."""
    return one.bits != other.bits and PRINTED not in (one.dtype, other.dtype)


def _difference(one: StepRecord, other: StepRecord, size: float) -> float:
    """How far the losses are apart, relative to the larger one."""
    if one.loss.bits == other.loss.bits or (
        math.isnan(one.loss.value) and math.isnan(other.loss.value)
    ):
        return 0.0
    if not (math.isfinite(one.loss.value) and math.isfinite(other.loss.value)):
        return math.inf
    rounding = _A_HAIR_MORE * (resolution(one.loss) + resolution(other.loss)) / 2
    apart = abs(one.loss.value - other.loss.value)
    return max(0.0, apart - rounding) / size if size else 0.0
