"""The jobs and slices of a cluster, and every way in which they change.

Each change is told with its reason, and puts what is to be done about it into `out`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import final

from regrow.jobs.model import (
    AskBack,
    Change,
    Fence,
    Grant,
    Instruction,
    Phase,
    Policy,
    Start,
    Stop,
    Suspend,
    Withdraw,
)
from regrow.jobs.records import Eviction, Job, Slice


@final
class Ledger:
    """Jobs, slices, and what is to be said about them.

    Attributes:
        policy: How long to wait.
        jobs: Those that have not ended, by name.
        slices: By index.
        order: How many jobs were submitted so far.
        now: The present, in seconds since 1970.
        out: Instructions that have not been taken yet.
        changes: The latest changes.
        fresh: Those that have not been taken yet.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.jobs: dict[str, Job] = {}
        self.slices: dict[int, Slice] = {}
        self.order = 0
        self.now = 0.0
        self.out: list[Instruction] = []
        self.changes: deque[Change] = deque(maxlen=policy.changes)
        self.fresh: list[Change] = []

    def take(self) -> tuple[Instruction, ...]:
        """The instructions since the last time."""
        out, self.out = tuple(self.out), []
        return out

    # --- leases and evictions ---

    def lease(self, job: Job, rank: int, one: Slice, reason: str) -> None:
        """Gives an idle slice to a job; starts the job if it can run now."""
        one.incarnation += 1
        one.state, one.job, one.rank, one.reason = "leased", job.name, rank, reason
        job.lost.discard(rank)
        self.tell(f"leased as number {rank}: {reason}", job.name, one)
        self.out.append(Grant(job.name, rank, one.index, one.incarnation, reason))
        if len(self.active(job)) < job.least or job.phase == "running":
            if len(self.active(job)) >= job.wanted:
                job.reason = "it has all its slices"
            return
        job.refused = False
        self.move(job, "running", "it has the slices to run")
        self.out.append(Start(job.name, job.attempt, job.saved, job.reason))

    def note_wait(self, job: Job, reason: str) -> None:
        """Takes down what a job waits for."""
        if job.reason != reason and job.phase in ("queued", "running", "suspended"):
            job.reason = reason
            self.tell(reason, job.name)

    def evict(self, job: Job, how: Eviction, indices: Iterable[int], reason: str) -> None:
        """Begins to take slices from a job."""
        if how == "suspend":
            self.suspend(job, reason)
        elif how == "shrink":
            self.ask(job, [self.slices[index] for index in indices], reason)
        else:
            self._stop(job, reason)

    def ask(self, job: Job, slices: Iterable[Slice], reason: str) -> None:
        """Asks a job to go on without these slices."""
        for one in slices:
            one.state, one.due, one.reason = "asked", self.now + self.policy.grace_s, reason
            self.tell(f"is asked back: {reason}", job.name, one)
            self.out.append(self._ask_back(job, one))

    def suspend(self, job: Job, reason: str) -> None:
        """Has a job save its state and leave all its slices."""
        self.move(job, "suspending", reason)
        self._ask_all(job, reason)
        self.out.append(Suspend(job.name, job.attempt, self._due(job), reason))

    def _stop(self, job: Job, reason: str) -> None:
        self.move(job, "stopping", reason)
        self._ask_all(job, reason)
        self.out.append(
            Stop(job.name, job.attempt, self._due(job), job.spec.restart != "never", reason)
        )

    def _ask_all(self, job: Job, reason: str) -> None:
        job.due = self.now + self.policy.grace_s
        for one in self.slices_of(job):
            # The job as a whole is given the time, so the slice itself has none.
            one.state, one.due, one.reason = "asked", None, reason

    def overdue(self, job: Job) -> None:
        """A job did not do in time what it was asked to: its slices are taken by force."""
        late = f"it did not end within {self.policy.grace_s:g} s"
        if job.phase == "suspending":
            late = f"it was not suspended within {self.policy.grace_s:g} s"
            self.out.append(
                Stop(job.name, job.attempt, self.now, job.spec.restart != "never", late)
            )
        self.out += [
            Withdraw(job.name, one.index, one.incarnation, late) for one in self.slices_of(job)
        ]
        self._preempted(job, late)

    def _preempted(self, job: Job, cause: str) -> None:
        """A job has lost its slices to another one: it begins anew, or is over."""
        if job.spec.restart == "never":
            self.drop(job, f"ended: preempted, and its policy is not to be restarted: {cause}")
            return
        self._requeue(job, f"to be restarted: {job.reason}; {cause}")

    def ended(self, job: Job, *, ok: bool, cause: str) -> None:
        """Takes the end of a job: it is over, or begins anew by its policy."""
        if job.phase == "stopping" and not ok:
            self._preempted(job, cause or "it has stopped")
        elif ok or job.spec.restart == "never" or job.restarts >= job.spec.max_restarts:
            self.drop(job, f"ended {'well' if ok else 'with a failure'}: {cause or 'done'}")
        else:
            job.restarts += 1
            budget = f"restart {job.restarts} of {job.spec.max_restarts}"
            self._requeue(job, f"failed ({cause}): {budget}")

    def _requeue(self, job: Job, reason: str) -> None:
        self.vacate(job, reason)
        self.move(job, "queued", reason)
        job.attempt += 1
        job.saved = False
        job.report_by = None
        job.wanted = job.spec.slices
        job.lost.clear()

    def drop(self, job: Job, text: str) -> None:
        """Forgets a job."""
        self.vacate(job, text)
        self.tell(text, job.name)
        del self.jobs[job.name]

    def vacate(self, job: Job, reason: str) -> None:
        """Ends all leases of a job."""
        for one in self.slices_of(job):
            self.release(one, reason)

    def release(self, one: Slice, reason: str) -> None:
        """Ends a lease whose slice is well."""
        self.tell(f"lease over: {reason}", one.job, one)
        one.job = one.rank = None
        self.begin_fencing(one, reason)
        self.fence(one)

    def begin_fencing(self, one: Slice, reason: str) -> None:
        """Takes down that a slice is to be emptied; says nothing."""
        one.state, one.due, one.reason = "fencing", self.now + self.policy.fence_s, reason

    def lose(self, one: Slice, cause: str) -> None:
        """Ends a lease whose slice is lost, if it is leased."""
        one.report_by = None
        if one.state == "failed":
            return
        self.tell(f"failed: {cause}", one.job, one)
        job = self.jobs.get(one.job or "")
        if job is not None:
            if one.state == "leased" and one.rank is not None:
                job.lost.add(one.rank)
            self.out.append(Withdraw(job.name, one.index, one.incarnation, cause))
        one.state, one.job, one.rank, one.due, one.reason = "failed", None, None, None, cause
        self.fence(one)

    def slice_overdue(self, one: Slice) -> None:
        """A slice was not given back or not emptied in time."""
        if one.state == "asked" and one.job is not None:
            late = f"not given back within {self.policy.grace_s:g} s"
            self.out.append(Withdraw(one.job, one.index, one.incarnation, late))
            self.release(one, late)
        else:
            self.lose(one, f"its processes were not seen to end in {self.policy.fence_s:g} s")

    # --- what is outstanding ---

    def restart_waits(self) -> None:
        """Lets all waits begin anew, after time in which nobody could be heard."""
        for job in self.jobs.values():
            if job.due is not None:
                job.due = self.now + self.policy.grace_s
            job.report_by = self.now + self.policy.report_s
        for one in self.slices.values():
            one.report_by = self.now + self.policy.report_s
            if one.due is not None:
                wait_s = self.policy.grace_s if one.state == "asked" else self.policy.fence_s
                one.due = self.now + wait_s

    def outstanding(self) -> list[Instruction]:
        """Everything that was told and is not known to be done."""
        out: list[Instruction] = []
        for job in self.jobs.values():
            out += self.outstanding_of(job)
        out += [
            Fence(one.index, one.incarnation, one.reason)
            for one in self.slices.values()
            if one.state in ("fencing", "failed")
        ]
        return out

    def outstanding_of(self, job: Job) -> list[Instruction]:
        """What a job was told and may not have heard."""
        out: list[Instruction] = [
            Grant(job.name, one.rank or 0, one.index, one.incarnation, one.reason)
            for one in self.active(job)
        ]
        if job.phase == "running":
            out.append(Start(job.name, job.attempt, job.saved, job.reason))
            asked = [one for one in self.slices_of(job) if one.state == "asked"]
            out += [self._ask_back(job, one) for one in asked]
        elif job.phase == "suspending":
            out.append(Suspend(job.name, job.attempt, self._due(job), job.reason))
        elif job.phase == "stopping":
            again = job.spec.restart != "never"
            out.append(Stop(job.name, job.attempt, self._due(job), again, job.reason))
        return out

    # --- tools ---

    def slices_of(self, job: Job) -> list[Slice]:
        """All slices that are a job's, also those that it is to give back."""
        return [one for one in self.slices.values() if one.job == job.name]

    def active(self, job: Job) -> list[Slice]:
        """The slices that a job may count on."""
        return [one for one in self.slices_of(job) if one.state == "leased"]

    def _ask_back(self, job: Job, one: Slice) -> AskBack:
        due = self.now if one.due is None else one.due
        return AskBack(job.name, one.rank or 0, one.index, one.incarnation, due, one.reason)

    def _due(self, job: Job) -> float:
        return self.now if job.due is None else job.due

    def fence(self, one: Slice, incarnation: int | None = None) -> None:
        """Has all processes up to this incarnation ended; None: the present one."""
        upto = one.incarnation if incarnation is None else incarnation
        self.out.append(Fence(one.index, upto, one.reason))

    def move(self, job: Job, phase: Phase, reason: str) -> None:
        """Moves a job to another phase."""
        job.phase, job.reason, job.due = phase, reason, None
        self.tell(f"{phase}: {reason}", job.name)

    def tell(self, text: str, job: str | None = None, one: Slice | None = None) -> None:
        """Takes down a change and its reason."""
        index, incarnation = (None, None) if one is None else (one.index, one.incarnation)
        change = Change(self.now, text, job, index, incarnation)
        self.changes.append(change)
        self.fresh.append(change)
