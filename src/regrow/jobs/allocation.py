"""Who gets which slice: one pass over the jobs by priority, from the records alone.

No reservation is written down. Each pass serves the jobs in order, so what a job further up is about
to get is taken out before a lower one is asked what it would like, whatever came between. Therefore
a manager that restarts reserves the same slices again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias, final

from regrow.jobs.records import Eviction, Job, Slice


@dataclass(frozen=True, slots=True)
class Lease:
    """Give this slice to that job, as its slice number `rank`."""

    job: str
    rank: int
    index: int
    reason: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Take these slices from a job, in this way."""

    job: str
    how: Eviction
    indices: tuple[int, ...]
    reason: str


Decision: TypeAlias = Lease | Evict


@final
@dataclass(slots=True)
class Plan:
    """What a pass came to.

    Attributes:
        decisions: What to do, in order.
        waits: Why each job that has not what it wants has not.
        reserved: For whom slices that are idle or will be are kept.
    """

    decisions: list[Decision] = field(default_factory=list)
    waits: dict[str, str] = field(default_factory=dict)
    reserved: dict[int, str] = field(default_factory=dict)


def allocate(jobs: Iterable[Job], slices: Iterable[Slice], spares: int) -> Plan:
    """Decides for all jobs and slices; changes neither.

    Args:
        jobs: All jobs.
        slices: All slices, of all shapes.
        spares: Idle slices of each shape that only a job that has lost a slice may take.
    """
    plan = Plan()
    by_standing = sorted(jobs, key=lambda job: job.standing)
    all_slices = list(slices)
    for shape in sorted(
        {one.shape for one in all_slices} | {job.spec.shape for job in by_standing}
    ):
        of_shape = [job for job in by_standing if job.spec.shape == shape]
        _Pool([one for one in all_slices if one.shape == shape], of_shape, spares, plan).run()
    return plan


@final
class _Pool:
    """The slices of one shape and the jobs that want such."""

    def __init__(self, slices: list[Slice], jobs: list[Job], spares: int, plan: Plan) -> None:
        self._jobs = jobs
        self._plan = plan
        self._spares = spares
        self._size = len(slices)
        # Those that a job is to give back are still its own.
        self._ranks: dict[str, set[int | None]] = {job.name: set() for job in jobs}
        for one in slices:
            if one.job in self._ranks:
                self._ranks[one.job].add(one.rank)
        self._idle = sorted(one.index for one in slices if one.state == "idle")
        self._coming = sorted(one.index for one in slices if one.state in ("asked", "fencing"))
        self._failed = sorted(one.index for one in slices if one.state == "failed")
        self._passed_over = min((job.spec.priority for job in jobs), default=0)
        self._active: dict[str, list[Slice]] = {job.name: [] for job in jobs}
        for one in slices:
            if one.state == "leased" and one.job in self._active:
                self._active[one.job].append(one)

    def run(self) -> None:
        """Serves every job that can be served."""
        for job in self._jobs:
            if not job.held and job.phase in ("queued", "running", "suspended"):
                missing = job.wanted - len(self._active[job.name])
                if missing > 0:
                    self._serve(job, missing)

    def _serve(self, job: Job, missing: int) -> None:
        # Fewer than this are of no use to it.
        required = max(1, job.least - len(self._active[job.name]))
        ready = self._idle[: self._usable(job, missing)]
        coming = self._coming[: missing - len(ready)]
        rest = missing - len(ready) - len(coming)
        evictions = self._evictions(job, rest)
        if _gain(evictions) < required - missing + rest:
            # To shrink them is not enough.
            evictions = self._evictions(job, rest, whole=True)
        if _gain(evictions) < required - missing + rest:
            self._wait(job, required, ready, coming)
            return
        for eviction in evictions:
            self._evict(eviction)
        coming = self._coming[: missing - len(ready)]
        self._claim(job, ready, coming)
        if len(ready) + len(coming) < missing:
            self._pass_over(job)
        if job.phase == "running" or len(ready) >= required:
            self._lease(job, ready)
        if coming:
            self._plan.waits[job.name] = f"waits for {_slices(coming)} to be vacated"

    def _usable(self, job: Job, missing: int) -> int:
        """How many of the idle slices the job may take."""
        common = max(0, len(self._idle) - self._spares)
        kept = len(self._idle) - common
        lost = len(job.lost) if job.phase == "running" else 0
        if job.spec.priority < self._passed_over:
            # Whoever has less than it wants above would take it from this job at once.
            lost = 0
        return min(missing, common + min(kept, lost))

    def _evictions(self, job: Job, wanted: int, *, whole: bool = False) -> list[Evict]:
        """Whom to take so many slices from, the last in order first.

        `whole`: elastic jobs, too, are taken all their slices.
        """
        found: list[Evict] = []
        if not job.spec.preempts:
            return found
        for victim in reversed(self._jobs):
            if wanted <= 0:
                break
            active = self._active[victim.name]
            if not active or victim.phase != "running" or not self._may_take(job, victim):
                continue
            how = victim.eviction(0 if whole else len(active))
            slices = sorted(active, key=lambda one: one.rank or 0, reverse=True)
            if how == "shrink":
                slices = slices[: min(wanted, len(active) - victim.least)]
            reason = f"job {job.name} (priority {job.spec.priority}) needs {_count(wanted)}"
            found.append(Evict(victim.name, how, tuple(one.index for one in slices), reason))
            wanted -= len(slices)
        # One further up that has to go in any case may make one further down needless.
        for eviction in list(found):
            if wanted + len(eviction.indices) <= 0:
                found.remove(eviction)
                wanted += len(eviction.indices)
        return found

    def _may_take(self, job: Job, victim: Job) -> bool:
        if victim.spec.priority != job.spec.priority:
            return victim.spec.priority < job.spec.priority
        # Two jobs of one priority that both cannot run would wait for each other for ever.
        stalled = len(self._active[victim.name]) < victim.least
        return stalled and victim.order > job.order

    def _evict(self, eviction: Evict) -> None:
        self._plan.decisions.append(eviction)
        taken = set(eviction.indices)
        left = [one for one in self._active[eviction.job] if one.index not in taken]
        self._active[eviction.job] = left
        self._coming = sorted([*self._coming, *taken])
        self._plan.waits[eviction.job] = f"gave up {_slices(taken)}: {eviction.reason}"

    def _wait(self, job: Job, required: int, ready: list[int], coming: list[int]) -> None:
        """Lets it wait, and keeps what there is for it if the rest is about to come back."""
        never = self._never(job, required)
        if never:
            # It would wait for ever, so it keeps nobody out, either.
            self._plan.waits[job.name] = f"needs {required} slices, and {never}"
            return
        self._pass_over(job)
        missing = required - len(ready) - len(coming)
        hoped = self._failed[:missing]
        if len(hoped) == missing:
            self._claim(job, ready, coming)
            self._failed = self._failed[missing:]
            self._plan.reserved |= dict.fromkeys(hoped, job.name)
            if job.phase == "running":
                self._lease(job, ready)
            back = f"until {_slices(hoped)} {'is' if len(hoped) == 1 else 'are'} back"
            self._plan.waits[job.name] = f"waits for {_count(required)}, {back}"
            return
        if not job.spec.preempts:
            # What others borrowed it could not take back.
            self._claim(job, ready, coming)
        self._plan.waits[job.name] = (
            f"waits for {_count(required)}: {self._shortage(ready, coming)}"
        )

    def _never(self, job: Job, required: int) -> str:
        """Why there will never be so many slices for a job; empty: there may be."""
        if required > self._size:
            return f"the cluster has {_count(self._size)} of its shape"
        if job.phase != "running" and required > self._size - self._spares:
            are = "is a spare" if self._spares == 1 else "are spares"
            return f"{self._spares} of the {_count(self._size)} of its shape {are}"
        return ""

    def _shortage(self, ready: list[int], coming: list[int]) -> str:
        """Where the slices are that a job waits for."""
        kept = len(set(self._idle) - set(ready))
        parts = [
            f"{number} {'is' if number == 1 else 'are'} {what}"
            for number, what in (
                (len(ready), "idle"),
                (len(coming), "being vacated"),
                (kept, "kept for lost ones"),
            )
            if number
        ]
        return ", ".join([*parts, "the others are in use"]) if parts else "all are in use"

    def _pass_over(self, job: Job) -> None:
        if job.spec.preempts:
            self._passed_over = max(self._passed_over, job.spec.priority)

    def _claim(self, job: Job, ready: list[int], coming: list[int]) -> None:
        self._idle = [index for index in self._idle if index not in ready]
        self._coming = [index for index in self._coming if index not in coming]
        self._plan.reserved |= dict.fromkeys([*ready, *coming], job.name)

    def _lease(self, job: Job, ready: list[int]) -> None:
        taken = self._ranks[job.name]
        free = sorted(
            (rank for rank in range(max(job.wanted, job.spec.slices)) if rank not in taken),
            key=lambda rank: (rank not in job.lost, rank),
        )
        for index, rank in zip(ready, free, strict=False):
            del self._plan.reserved[index]
            taken.add(rank)
            what = "takes the place of the one that failed" if rank in job.lost else "is idle"
            reason = f"slice {index} {what}"
            self._plan.decisions.append(Lease(job.name, rank, index, reason))


def _gain(evictions: Iterable[Evict]) -> int:
    return sum(len(eviction.indices) for eviction in evictions)


def _slices(indices: Iterable[int]) -> str:
    numbers = sorted(indices)
    return f"slice{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}"


def _count(number: int) -> str:
    return f"{number} slice{'s' * (number != 1)}"
