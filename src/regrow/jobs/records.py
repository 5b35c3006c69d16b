"""The manager's memory: jobs and slices as they are, and their JSON form.

A lease is not kept twice: it is the slice that says whose it is.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Final, Literal, final

from regrow.jobs.model import JobSpec, Phase, Shape, SliceState

FORMAT: Final = 1
Eviction = Literal["suspend", "shrink", "restart", "end"]


@final
@dataclass(slots=True, kw_only=True)
class Job:
    """A job that has not ended.

    Attributes:
        spec: What it asks for.
        order: Its place among those of its priority.
        phase: What it is doing, as far as it was told.
        wanted: How many slices it wants now.
        lost: Ranks whose slice failed and was not replaced yet.
        held: Whether an operator wants it to stay suspended.
        refused: Whether it refused to be suspended since its last start.
        saved: Whether it has a state in storage to start from.
        attempt: The attempt that runs, or will be started next.
        restarts: Starts after a failure of its own.
        due: When it has to have done what it was asked to (`suspending`, `stopping`).
        report_by: When it must have reported to a restarted manager; None: it has.
        reason: Why it is in its phase, or what it waits for.
    """

    spec: JobSpec
    order: int
    phase: Phase = "queued"
    wanted: int = 0
    lost: set[int] = field(default_factory=set)
    held: bool = False
    refused: bool = False
    saved: bool = False
    attempt: int = 1
    restarts: int = 0
    due: float | None = None
    report_by: float | None = None
    reason: str = ""

    @property
    def name(self) -> str:
        """Its name."""
        return self.spec.name

    @property
    def least(self) -> int:
        """The fewest slices that it can run on."""
        return min(self.spec.min_slices or self.spec.slices, self.wanted)

    @property
    def standing(self) -> tuple[int, int]:
        """What jobs are sorted by: the one to be served first is the smallest."""
        return -self.spec.priority, self.order

    def eviction(self, active: int) -> Eviction:
        """What happens to it when a slice of it is taken, with so many slices in use.

        In this order: it is suspended, or shrinks if it is elastic, or is restarted by its policy.
        """
        if self.spec.suspendable and not self.refused:
            return "suspend"
        if self.spec.min_slices is not None and active > self.least:
            return "shrink"
        return "restart" if self.spec.restart == "on-failure" else "end"


@final
@dataclass(slots=True, kw_only=True)
class Slice:
    """A slice of the cluster.

    Attributes:
        index: Which.
        shape: What it is like.
        state: idle; leased; asked (its job is to give it back); fencing (its lease is over, and its
            processes are being ended); failed (the same, and nobody knows how long it takes).
        incarnation: Grows with each lease.
        job: Whose it is, while leased or asked.
        rank: Which slice of that job.
        due: When it must be given back or fenced.
        report_by: When its hosts must have reported to a restarted manager; None: they have.
        reason: Why it is in its state.
    """

    index: int
    shape: Shape
    state: SliceState = "fencing"
    incarnation: int = 0
    job: str | None = None
    rank: int | None = None
    due: float | None = None
    report_by: float | None = None
    reason: str = ""


def to_json(jobs: dict[str, Job], slices: dict[int, Slice]) -> dict[str, Any]:
    """Both as JSON values."""
    return {
        "format": FORMAT,
        "jobs": [
            shallow(job) | {"spec": spec_to_json(job.spec), "lost": sorted(job.lost)}
            for job in jobs.values()
        ],
        "slices": [shallow(one) | {"shape": shallow(one.shape)} for one in slices.values()],
    }


def from_json(state: dict[str, Any]) -> tuple[dict[str, Job], dict[int, Slice]]:
    """What `to_json` wrote.

    Raises:
        ValueError, TypeError, KeyError: If it is something else.
    """
    if state["format"] != FORMAT:
        raise ValueError(f"its format is {state['format']!r}, not {FORMAT}")
    jobs = [
        Job(**fields | {"spec": spec_from_json(fields["spec"]), "lost": set(fields["lost"])})
        for fields in state["jobs"]
    ]
    slices = [Slice(**fields | {"shape": Shape(**fields["shape"])}) for fields in state["slices"]]
    return {job.name: job for job in jobs}, {one.index: one for one in slices}


def shallow(value: Any) -> dict[str, Any]:
    """The fields of a dataclass; `dataclasses.asdict` copies what is in them, too, and is slow."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def spec_to_json(spec: JobSpec) -> dict[str, Any]:
    """The JSON form of a job's specification."""
    return shallow(spec) | {"shape": shallow(spec.shape)}


def spec_from_json(fields: dict[str, Any]) -> JobSpec:
    """A job's specification from the JSON form of its fields."""
    return JobSpec(**fields | {"shape": Shape(**fields["shape"])})
