"""What a proof comes to. No I/O."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final

from regrow.chaos.committed import Committed
from regrow.chaos.comparison import closeness, first_difference
from regrow.chaos.ledger import Ledger, audit
from regrow.chaos.printed import PRINTED
from regrow.chaos.tolerance import tolerance_of

Outcome: TypeAlias = Literal["bit-equal", "equal within tolerance", "diverged", "nothing proved"]
BIT_EQUAL: Final = "bit-equal"
WITHIN: Final = "equal within tolerance"
DIVERGED: Final = "diverged"
NOTHING: Final = "nothing proved"


@final
@dataclass(frozen=True, slots=True)
class Comparison:
    """A run beside another one.

    Attributes:
        outcome: What came of it.
        text: The same in words.
        step: The step at which they diverge first, or differ most; None: at none.
        path: The first leaf of the state that differs there.
    """

    outcome: Outcome
    text: str
    step: int | None = None
    path: str | None = None


@final
@dataclass(frozen=True, slots=True)
class Verdict:
    """What is proved.

    Attributes:
        outcome: The whole.
        text: The whole in one line.
        reference: Beside the undisturbed run on the same slices; None: they are not known.
        undisturbed: Beside the run that kept all slices; None: it was not made, or is the same.
        ledger: The records of the data; None: the script gives no ids.
    """

    outcome: Outcome
    text: str
    reference: Comparison | None
    undisturbed: Comparison | None
    ledger: Ledger | None


def judge(
    run: Committed,
    reference: Committed | None,
    undisturbed: Committed | None,
    *,
    slices: int = 1,
    faulted: Collection[int] = (),
) -> Verdict:
    """Judges a run with faults by the ones without, of which there must be one.

    Args:
        run: It.
        reference: The run on the same slices; None: it is not known which they were.
        undisturbed: The run on all slices; None: it was not made, or is the reference.
        slices: How many there were at most, for steps that do not tell theirs.
        faulted: The slices that faults were done to.
    """
    same = None if reference is None else beside_reference(run, reference)
    whole = None if undisturbed is None else beside_undisturbed(run, undisturbed, slices)
    other = undisturbed or reference
    ledger = None if other is None else audit(run, other)
    outcome, text = _whole(same, whole, ledger)
    if outcome in (BIT_EQUAL, WITHIN):
        made = [one for one in (run, reference, undisturbed) if one is not None]
        empty = _empty(run) or _beside_the_point(made, faulted)
        outcome, text = (NOTHING, f"{NOTHING}: {empty}") if empty else (outcome, text)
    return Verdict(outcome, text, same, whole, ledger)


def unproved(run: Committed) -> Verdict:
    """What is known of a run in which no fault happened before its last step."""
    last = run.steps[-1].step
    text = f"{NOTHING}: no fault happened before the last step, {last}"
    return Verdict(NOTHING, text, None, None, None)


def _empty(run: Committed) -> str | None:
    """Why what was recorded tells no step from another; None: it does."""
    losses = {(one.loss.dtype, one.loss.bits) for one in run.steps}
    states = {tuple(one.state.items()) for one in run.steps if one.state is not None}
    records = {one.ids for one in run.steps}
    if len(run.steps) < 2 or max(len(losses), len(states), len(records)) > 1:
        return None
    return "each step recorded the same, so nothing tells a step that is left out or taken again"


def _beside_the_point(runs: Sequence[Committed], faulted: Collection[int]) -> str | None:
    """Why the faults could have done nothing to the steps; None: they could."""
    slices = [one.slices for run in runs for one in run.steps]
    known = {index for one in slices if one is not None for index in one}
    if not faulted or None in slices or not known.isdisjoint(faulted):
        return None
    named = ", ".join(map(str, sorted(faulted)))
    return f"no step was computed on slice {named}, and no fault was done to another"


def _whole(
    same: Comparison | None, whole: Comparison | None, ledger: Ledger | None
) -> tuple[Outcome, str]:
    if ledger is not None and ledger.breach is not None:
        return DIVERGED, f"diverged at {ledger.text}"
    made = [one for one in (same, whole) if one is not None]
    for one in made:
        if one.outcome == DIVERGED:
            return DIVERGED, f"diverged at step {one.step}: {one.text}"
    return made[0].outcome, f"{made[0].outcome}: {made[0].text}"


def beside_reference(run: Committed, reference: Committed) -> Comparison:
    """Compares all bits."""
    difference = first_difference(run, reference)
    if difference is None:
        return Comparison(BIT_EQUAL, _all_equal(run))
    if difference.part == "slices":
        # Up to here all was equal; from here on the reference is none.
        text = f"the reference did not follow: step {difference.step}: {difference.text}"
        return Comparison(NOTHING, text, difference.step)
    return Comparison(DIVERGED, difference.text, difference.step, difference.path)


def _all_equal(run: Committed) -> str:
    leaves = sum(len(one.state or ()) for one in run.steps)
    records = sum(len(one.ids or ()) for one in run.steps)
    parts = [_losses(run)]
    parts += [f"{leaves} hashes of leaves of the state"] if leaves else []
    parts += [f"the ids of {records} records"] if records else []
    return ", ".join(parts)


def _losses(run: Committed) -> str:
    odd = sum(not math.isfinite(one.loss.value) for one in run.steps)
    return f"{len(run.steps)} losses" + (f" ({odd} of them infinite or no number)" if odd else "")


def beside_undisturbed(run: Committed, undisturbed: Committed, slices: int = 1) -> Comparison:
    """Compares losses within the tolerance."""
    close = closeness(run, undisturbed, tolerance_of(run, undisturbed, slices=slices))
    if not close.comparable:
        text = "not compared: its steps used other records, as where batches follow the number of slices"
        return Comparison(NOTHING, text)
    if close.exceeded is not None:
        return Comparison(DIVERGED, close.text, close.exceeded)
    if close.at is None:
        if any(one.loss.dtype == PRINTED for one in run.steps):
            return Comparison(WITHIN, f"{_losses(run)}, to the digits that are printed")
        return Comparison(BIT_EQUAL, _losses(run))
    text = f"the loss differs by {close.largest:.1e} at most (step {close.at}; {close.allowed:.1e} allowed)"
    return Comparison(WITHIN, text, close.at)
