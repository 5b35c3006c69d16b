"""One elastic event: when it begins and ends, and what its time was spent on.

A loss begins with the first evidence of the fault (the exit of a process, the break of a connection,
a survivor's complaint, or, for a slice that fell silent, the last sign of life), a scale-up with the
first work that the client asks of a returned slice together with others. Both end when the first
execution of the program that was running before has been completed.

Each part is measured by itself, as the union of intervals: `PARTS` says of what. Parts may overlap
(something is compiled while something else is loaded), and there is time in none of them, in which
the client's own code works. So for each report, up to rounding:

    sum(parts) - overlap_s + rest_s == wall_s
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from typing import Any, Final, Literal, TypeAlias, final

from regrow.observe.intervals import Interval, clipped, total_s, union

PARTS: Final = {
    "detect": "from the first evidence of the fault until the slice is declared lost",
    "drain": "until what the client waited for at that moment has ended",
    "decide": "until the client begins to rebuild: health checks, waiting for slices, its policy",
    "load": "the state is put back: copied from host memory, sent by the client, or computed anew; "
    "the client is in its data loader",
    "reshard": "arrays move between devices",
    "compile": "programs are traced and lowered by the client, and compiled",
    "first step": "the first execution of the program that was running before",
}
"""The parts of an elastic event, in their order, and what is measured."""

Kind: TypeAlias = Literal[
    "wait",
    "compile",
    "trace",
    "transfer",
    "load",
    "data",
    "snapshot",
    "reshard",
    "run",
    "step",
    "decide",
]
EventKind: TypeAlias = Literal["loss", "scale-up"]

_SEEN: Final = 0.002
_BUILDING: Final = frozenset({"compile", "transfer", "load", "reshard", "run", "step"})
_PART_OF: Final = {
    "transfer": "load",
    "load": "load",
    "data": "load",
    "run": "load",
    "reshard": "reshard",
    "compile": "compile",
    "trace": "compile",
}


@dataclass(slots=True, eq=False)
class Activity:
    """Something that takes time and that the head sees.

    Attributes:
        kind: What.
        began: When it began.
        what: Of what, in words.
        slices: The slices that it needs.
        small: Whether it is too small to be a part of a training: a health check, say.
        number: Of an execution of the training's step: which one it is, from 1.
        step: Of such a one: the step that it carries; None: the client does not say.
        ended: When it ended; None: it goes on.
        failed: Whether it ended with an error.
        beside: Whether the client is known to go on with its work meanwhile.
    """

    kind: Kind
    began: float
    what: str = ""
    slices: Sequence[int] = ()
    small: bool = False
    number: int | None = None
    step: int | None = None
    ended: float | None = None
    failed: bool = False
    beside: bool = False

    def is_waited_for(self) -> bool:
        """Whether the training waits for it, as far as is known."""
        return not self.small and not self.beside

    def builds(self) -> bool:
        """Whether the client rebuilds with it what was lost."""
        return self.kind in _BUILDING and not self.small and not self.failed


@final
@dataclass(frozen=True, slots=True)
class LostSteps:
    """Steps that were taken, or begun, in vain.

    Attributes:
        first: The first one.
        last: The last one.
        counted: Whether the numbers count executions from 1, as the client told no steps.
        slices: The slices that they were lost to: those of the event, and of the ones before that
            ended in another loss.
        causes: For each of them why it was lost.
    """

    first: int
    last: int
    counted: bool
    slices: tuple[int, ...] = ()
    causes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.first == self.last:
            return f"step {self.first}"
        return f"steps {self.first} to {self.last}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """An elastic event in numbers.

    Attributes:
        number: Of the run's elastic events, from 1.
        kind: "loss" or "scale-up".
        slices: The slices that were lost, or have returned.
        causes: For each of them why it was lost.
        began_s: When it began, by the clock of the run.
        wall_s: How long it took, or has taken.
        parts: For each of `PARTS` how long it took.
        overlap_s: By how much the parts are longer together than the time in which any was.
        rest_s: How long it was in no part.
        ended: How it ended: "recovered", "another loss", "client gone", "" (it goes on).
        lost: The steps that were lost, if any.
        lost_s: Productive time that went into lost steps, in seconds.
        programs: How many programs were "compiled", and how many were there: "from memory", "from
            disk".
        spans: For each part its intervals, relative to the begin of the event; those that would not
            be seen apart in a picture are one.
    """

    number: int
    kind: EventKind
    slices: tuple[int, ...]
    causes: tuple[str, ...] = ()
    began_s: float
    wall_s: float
    parts: dict[str, float]
    overlap_s: float
    rest_s: float
    ended: str
    lost: LostSteps | None = None
    lost_s: float = 0.0
    programs: dict[str, int] = field(default_factory=dict)
    spans: dict[str, list[Interval]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values, to be read only: its lists and dictionaries are this one's."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return values | {"lost": None if self.lost is None else asdict(self.lost)}


def _bridged(found: dict[str, list[Interval]]) -> dict[str, list[Interval]]:
    """The same, each part also in the moments between two of its intervals in which no part is.

    There the client's own Python makes ready the next: the next leaf of a state, say.
    """
    covered = union(span for spans in found.values() for span in spans)
    gaps = {end: begin for (_, end), (begin, _) in pairwise(covered)}
    bridged = {}
    for part, spans in found.items():
        begins = {begin for begin, _ in spans}
        ends = [end for _, end in spans if gaps.get(end) in begins]
        bridged[part] = union([*spans, *((end, gaps[end]) for end in ends)])
    return bridged


def _drawn(spans: Iterable[Interval], wall_s: float) -> list[Interval]:
    """Intervals, joined where the gap between them is too small to be seen."""
    joined: list[Interval] = []
    for begin, end in spans:
        near = bool(joined) and begin - joined[-1][1] < _SEEN * wall_s
        joined.append((joined.pop()[0] if near else begin, end))
    return joined


@final
class ElasticEvent:
    """An elastic event while it goes on; takes what happens, in any order of beginnings.

    Attributes:
        kind: "loss" or "scale-up".
        slices: The slices that were lost, or have returned.
        causes: For each of them why it was lost.
        began: When it began.
        declared: When the last of the losses was declared.
        steps: The steps that the client has told since, with their times.
        programs: How many programs were there, by where they come from.
    """

    def __init__(
        self,
        kind: EventKind,
        index: int,
        cause: str,
        began: float,
        now: float,
        under_way: Iterable[Activity] = (),
    ) -> None:
        self.kind = kind
        self.slices = [index]
        self.causes = [cause] if cause else []
        self.began = min(began, now)
        self.declared = now
        self.steps: list[tuple[float, int]] = []
        self.programs: Counter[str] = Counter()
        self._inherited = list(under_way)
        self._activities: list[Activity] = list(self._inherited)

    def join(self, index: int, cause: str, now: float, under_way: Iterable[Activity]) -> None:
        """Another slice is lost before anything was rebuilt."""
        if index not in self.slices:
            self.slices.append(index)
            self.causes.append(cause)
        self.declared = now
        known = set(map(id, self._activities))
        new = [activity for activity in under_way if id(activity) not in known]
        self._inherited += new
        self._activities += new

    def add(self, activity: Activity) -> None:
        """Something has begun."""
        self._activities.append(activity)

    def told(self, step: int, now: float) -> None:
        """The client says that it begins a step."""
        self.steps.append((now, step))

    @property
    def noticed(self) -> bool:
        """Whether the client has met it: with what it waited for, or with what it asked since."""
        return any(
            (one.failed if one.began < self.declared else one.kind != "snapshot")
            for one in self._activities
        )

    @property
    def touched(self) -> float:
        """Until when a client that met no loss has worked on it."""
        if self.kind == "loss":
            return self.began
        return max([self.began, *(one.ended for one in self._activities if one.ended is not None)])

    @property
    def rebuilt_since(self) -> float | None:
        """When the client began to rebuild; None: it has not, as far as is known."""
        begins = [
            activity.began
            for activity in self._activities
            if activity.builds() and self._is_new(activity) and activity.began >= self._drained()
        ]
        return min(begins, default=None)

    def is_ended_by(self, step: Activity) -> bool:
        """Whether this execution of the step of the training, which has ended, ends the event."""
        if step.failed or step.began < self.declared:
            return False
        return self.kind == "loss" or not set(self.slices).isdisjoint(step.slices)

    @property
    def resumed(self) -> int | None:
        """The first step that the client told after it had begun to rebuild."""
        since = self.rebuilt_since
        told = [step for at, step in self.steps if since is not None and at >= since]
        return told[0] if told else None

    @property
    def told_two_steps(self) -> bool:
        """Whether the client has told a second step since it began to rebuild."""
        since = self.rebuilt_since
        return since is not None and len({step for at, step in self.steps if at >= since}) > 1

    @property
    def loaded(self) -> bool:
        """Whether a state was copied from host memory."""
        return any(one.kind == "load" and not one.failed for one in self._activities)

    def spans(self, end: float) -> dict[str, list[Interval]]:
        """For each part its intervals, up to a moment."""
        since = self.rebuilt_since
        begin = end if since is None else min(since, end)
        drained = min(self._drained(), begin)
        found: dict[str, list[Interval]] = {part: [] for part in PARTS}
        if self.kind == "loss":
            found["detect"] = [(self.began, self.declared)]
            found["drain"] = self._draining(end)
            found["decide"] = [(drained, begin)]
        for activity in self._activities:
            until = end if activity.ended is None else activity.ended
            if activity.kind == "decide":
                found["decide"].append((activity.began, until))
            elif activity.kind == "step" and not activity.failed:
                found["first step"].append((activity.began, until))
            elif activity.kind == "compile" and activity.is_waited_for():
                # Also one of before the loss: whatever it was for, the client goes on when it ends.
                found["compile"].append((max(activity.began, self.declared), until))
            elif activity.began >= begin or (activity.kind == "trace" and until > begin):
                part = _PART_OF.get(activity.kind)
                if part is not None:
                    found[part].append((max(activity.began, begin), until))
        return _bridged(
            {part: union(clipped(spans, self.began, end)) for part, spans in found.items()}
        )

    def report(self, number: int, epoch: float, end: float, ended: str) -> Report:
        """The event in numbers, up to its end.

        Args:
            number: The number of the event.
            epoch: When the run began.
            end: The end.
            ended: See `Report`.
        """
        end = max(end, self.began)
        spans = self.spans(end)
        parts = {part: total_s(found) for part, found in spans.items()}
        covered = total_s(union(span for found in spans.values() for span in found))
        return Report(
            number=number,
            kind=self.kind,
            slices=tuple(self.slices),
            causes=tuple(self.causes),
            began_s=self.began - epoch,
            wall_s=end - self.began,
            parts=parts,
            overlap_s=sum(parts.values()) - covered,
            rest_s=end - self.began - covered,
            ended=ended,
            programs=dict(self.programs),
            spans={
                part: _drawn([(b - self.began, e - self.began) for b, e in found], end - self.began)
                for part, found in spans.items()
            },
        )

    # --- inside ---

    def _is_new(self, activity: Activity) -> bool:
        return activity.began >= self.declared or self.kind == "scale-up"

    def _draining(self, end: float) -> list[Interval]:
        """What the client waited for when the loss was declared, and what it did in vain since."""
        waited = [
            (self.declared, end if one.ended is None else one.ended)
            for one in self._inherited
            if one.kind in ("wait", "run", "step")
            and (one.ended is None or one.ended > self.declared)
        ]
        return [*waited, (self.declared, min(self._drained(), end))]

    def _drained(self) -> float:
        """When the client had been told of all that failed with the loss."""
        # A client that does not wait goes on with what is lost until it looks at a result.
        vain = (one for one in self._activities if one.kind in ("run", "step") and not one.small)
        ends = (one.ended for one in (*self._inherited, *vain) if one.failed)
        return max([self.declared, *(end for end in ends if end is not None)])
