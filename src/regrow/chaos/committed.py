"""What counts of a journal, and the changes of slices that it tells of. No I/O.

A training that lost a slice goes back to a snapshot and takes the steps behind it again. So of each
step the last record counts, and every record of a later step that was written before it is void,
also if that step never came again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from regrow.elastic.journal import StepRecord
from regrow.elastic.planned import Change, Plan


@final
@dataclass(frozen=True, slots=True)
class Rollback:
    """The training went back.

    Attributes:
        at: The last step that had been recorded.
        to: The step that came next.
        behind_s: The time from the record of the step before that one to the last record.
    """

    at: int
    to: int
    behind_s: float = 0.0


@final
@dataclass(frozen=True, slots=True)
class Committed:
    """The steps of a run that count.

    Attributes:
        steps: The records, by step.
        rollbacks: Where the run went back.
        written: How many records there were in all.
    """

    steps: tuple[StepRecord, ...]
    rollbacks: tuple[Rollback, ...]
    written: int

    @classmethod
    def of(cls, records: Sequence[StepRecord]) -> Committed:
        """From the records of a journal, in the order in which they were written."""
        steps: list[StepRecord] = []
        rollbacks = []
        for record in records:
            if steps and record.step <= steps[-1].step:
                last = steps[-1]
                while steps and steps[-1].step >= record.step:
                    steps.pop()
                behind_s = max(0.0, last.at - steps[-1].at) if steps else 0.0
                rollbacks.append(Rollback(last.step, record.step, behind_s))
            steps.append(record)
        return cls(tuple(steps), tuple(rollbacks), len(records))

    @property
    def taken_twice(self) -> int:
        """How many records do not count."""
        return self.written - len(self.steps)


def schedule_of(run: Committed, everyone: Iterable[int]) -> Plan | None:
    """The plan of an undisturbed run with the slices of this one.

    A change is an offer where the run grew and went on with the next step, as it does when slices
    return; anything else was a restart from the snapshot of the step before.

    Args:
        run: The run.
        everyone: The slices that it could have had.

    Returns:
        The plan; None: a record does not tell its slices.
    """
    slices = [None if one.slices is None else frozenset(one.slices) for one in run.steps]
    known = [one for one in slices if one is not None]
    if len(known) < len(slices):
        return None
    went_back_to: dict[int, float] = {}
    for back in run.rollbacks:
        went_back_to.setdefault(back.to, back.behind_s)  # From then on its snapshot was there.
    changes = tuple(
        Change(
            before.step,
            new,
            "offer" if former < new and after.step not in went_back_to else "restart",
            went_back_to.get(after.step, 0.0),
        )
        for before, after, former, new in zip(
            run.steps, run.steps[1:], known, known[1:], strict=False
        )
        if former != new
    )
    return Plan(known[0] if known else frozenset(everyone), changes)
