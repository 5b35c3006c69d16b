"""Whether each record of the data was used as often as it had to be. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from regrow.chaos.committed import Committed
from regrow.elastic.journal import RecordId

Fault: TypeAlias = Literal["double", "gap", "other"]


@final
@dataclass(frozen=True, slots=True)
class Breach:
    """The first place at which a run did not use the records that it had to use.

    Attributes:
        step: The step.
        kind: "double": a record came again; "gap": records were left out; "other": another record.
        text: What happened, in words.
    """

    step: int
    kind: Fault
    text: str


@final
@dataclass(frozen=True, slots=True)
class Ledger:
    """The records that a run used in the steps that count.

    Attributes:
        records: How many.
        breach: What is wrong with them; None: nothing.
        repeats: How many of them had been used before. Without a breach the undisturbed run repeated
            them, too (a further epoch).
    """

    records: int
    breach: Breach | None
    repeats: int

    @property
    def text(self) -> str:
        """What came of it, in words."""
        if self.breach is not None:
            return f"step {self.breach.step}: {self.breach.text}"
        again = f"; {self.repeats} of them again, as undisturbed" if self.repeats else ""
        return f"{self.records} records, no gap and no double{again}"


def audit(run: Committed, undisturbed: Committed) -> Ledger | None:
    """Compares the records of a run, in their order, with those of the undisturbed one.

    A step on as many slices as in the undisturbed run must use as many records. Where the batch
    follows the number of slices, a run on fewer of them uses fewer records in as many steps, so the
    shorter sequence must be the beginning of the longer one.

    Returns:
        What came of it; None: one of the runs gave no ids.
    """
    if not _has_ids(run) or not _has_ids(undisturbed):
        return None
    used, wanted = _used(run), _used(undisturbed)
    records = next(
        (
            place
            for place, (one, other) in enumerate(zip(used, wanted, strict=False))
            if one[1] != other[1]
        ),
        None,
    )
    repeats = len(used) - len({record for _, record in used})
    if records is not None:
        return Ledger(records, _breach(used, wanted, records), repeats)
    return Ledger(len(used), _short(run, undisturbed), repeats)


def _has_ids(run: Committed) -> bool:
    return bool(run.steps) and all(one.ids is not None for one in run.steps)


def _used(run: Committed) -> list[tuple[int, RecordId]]:
    return [(one.step, used) for one in run.steps for used in one.ids or ()]


def _breach(
    used: list[tuple[int, RecordId]], wanted: list[tuple[int, RecordId]], place: int
) -> Breach:
    (step, got), (_, right) = used[place], wanted[place]
    if got in {record for _, record in wanted[place:]}:
        return Breach(step, "gap", f"record {right!r} was left out, {got!r} came in its place")
    if got in {record for _, record in used[:place]}:
        return Breach(step, "double", f"record {got!r} was used again, in place of {right!r}")
    return Breach(step, "other", f"record {got!r} was used in place of {right!r}")


def _short(run: Committed, undisturbed: Committed) -> Breach | None:
    """A step that used fewer or more records than on as many slices in the undisturbed run."""
    others = {one.step: one for one in undisturbed.steps}
    for one in run.steps:
        other = others.get(one.step)
        if other is None or len(one.slices or ()) != len(other.slices or ()):
            continue
        got, wanted = len(one.ids or ()), len(other.ids or ())
        if got != wanted:
            kind: Fault = "gap" if got < wanted else "double"
            return Breach(one.step, kind, f"{got} records were used, {wanted} are right")
    return None
