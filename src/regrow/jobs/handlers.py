"""What each event means for the ledger."""

from __future__ import annotations

from typing import assert_never

from regrow.errors import UsageError
from regrow.jobs.ledger import Ledger
from regrow.jobs.model import (
    Event,
    JobEnded,
    JobReport,
    JobResized,
    JobSpec,
    JobSubmitted,
    JobSuspended,
    ResumeRequested,
    SliceEvent,
    SliceFailed,
    SliceIdle,
    SliceReport,
    SliceReturned,
    Stop,
    SuspendRefused,
    SuspendRequested,
    Withdraw,
    name_taken,
)
from regrow.jobs.records import Job, Slice


def handle(ledger: Ledger, event: Event) -> None:
    """Takes an event. What comes late, twice, or of an old incarnation changes nothing.

    Raises:
        UsageError: If it is a request that cannot be met; nothing has changed then.
    """
    match event:
        case JobSubmitted(spec):
            _submitted(ledger, spec)
        case JobResized(name, slices):
            _resized(ledger, _known(ledger, name), slices)
        case SuspendRequested(name):
            _suspend_requested(ledger, _known(ledger, name))
        case ResumeRequested(name):
            _resume_requested(ledger, _known(ledger, name))
        case JobSuspended(name, attempt):
            _suspended(ledger, _current(ledger, name, attempt))
        case SuspendRefused(name, attempt, cause):
            _refused(ledger, _current(ledger, name, attempt), cause)
        case JobEnded():
            _ended(ledger, event)
        case JobReport():
            _job_report(ledger, event)
        case SliceReturned():
            _returned(ledger, event)
        case SliceFailed() | SliceIdle() | SliceReport():
            _slice_event(ledger, event)
        case _:
            assert_never(event)


# --- what jobs and operators tell ---------------------------------------------------------------


def _submitted(ledger: Ledger, spec: JobSpec) -> None:
    known = ledger.jobs.get(spec.name)
    if known is not None:
        if known.spec != spec:
            raise name_taken(spec.name)
        return
    ledger.order += 1
    ledger.jobs[spec.name] = Job(spec=spec, order=ledger.order, wanted=spec.slices)
    name = spec.priority_class or "no class"
    text = f"submitted: {spec.slices} slices, priority {spec.priority} ({name})"
    ledger.tell(text, spec.name)


def _resized(ledger: Ledger, job: Job, slices: int) -> None:
    if not 1 <= slices <= job.spec.slices:
        raise UsageError(
            f"job {job.name!r} wants {slices} slices now; it was submitted with {job.spec.slices}"
        )
    job.wanted = slices
    ledger.tell(f"wants {slices} slices now", job.name)
    if job.phase == "running":
        by_rank = sorted(ledger.active(job), key=lambda one: one.rank or 0)
        ledger.ask(job, by_rank[slices:], "the job wants fewer slices")


def _suspend_requested(ledger: Ledger, job: Job) -> None:
    if not job.spec.suspendable:
        raise UsageError(f"job {job.name!r} cannot be suspended: it was not submitted as such")
    job.held = True
    ledger.tell("is to be suspended: asked for", job.name)
    if job.phase == "running":
        ledger.suspend(job, "it was asked for")


def _resume_requested(ledger: Ledger, job: Job) -> None:
    if job.held:
        job.held = False
        ledger.tell("may go on: asked for", job.name)


def _suspended(ledger: Ledger, job: Job | None) -> None:
    # Also one that was not, or not any more, to be suspended: it is so all the same.
    if job is None or job.phase not in ("running", "suspending", "stopping"):
        return
    ledger.vacate(job, "its state is saved")
    ledger.move(job, "suspended", "its state is saved")
    job.attempt += 1
    job.saved = True
    job.lost.clear()


def _refused(ledger: Ledger, job: Job | None, cause: str) -> None:
    if job is None or job.phase != "suspending":
        return
    job.refused = True
    job.held = False
    ledger.move(job, "running", f"it cannot be suspended: {cause}")
    for one in ledger.slices_of(job):
        one.state, one.due = "leased", None


def _ended(ledger: Ledger, event: JobEnded) -> None:
    if event.attempt is None and event.name in ledger.jobs:
        ledger.drop(ledger.jobs[event.name], f"withdrawn: {event.cause or 'asked for'}")
    elif event.attempt is not None:
        job = _current(ledger, event.name, event.attempt)
        if job is not None:
            ledger.ended(job, ok=event.ok, cause=event.cause)


def _returned(ledger: Ledger, event: SliceReturned) -> None:
    one = ledger.slices.get(event.index)
    job = ledger.jobs.get(event.name)
    if one is None or job is None or one.job != job.name:
        return
    if event.incarnation != one.incarnation:
        return
    ledger.release(one, f"job {job.name} gave it back")


def _job_report(ledger: Ledger, event: JobReport) -> None:
    job = ledger.jobs.get(event.name)
    for index, incarnation in event.leases:
        one = ledger.slices.get(index)
        if one is not None and one.job == event.name and one.incarnation == incarnation:
            continue
        reason = "it has no lease of it any more"
        ledger.out.append(Withdraw(event.name, index, incarnation, reason))
        if one is not None:
            # What runs there now by right is not to be ended with it.
            dead = one.incarnation if one.job is None else one.incarnation - 1
            ledger.fence(one, min(incarnation, dead))
    if job is None:
        ledger.out.append(
            Stop(event.name, event.attempt, ledger.now, again=False, reason="it is not known")
        )
        return
    job.report_by = None
    if event.suspended and event.attempt == job.attempt:
        _suspended(ledger, job)
    ledger.out += ledger.outstanding_of(job)


# --- what hosts tell ----------------------------------------------------------------------------


def _slice_event(ledger: Ledger, event: SliceEvent) -> None:
    match event:
        case SliceFailed():
            _slice_failed(ledger, event)
        case SliceIdle():
            _slice_idle(ledger, event)
        case SliceReport():
            _slice_report(ledger, event)
    if event.index in ledger.slices and not isinstance(event, SliceFailed):
        ledger.slices[event.index].report_by = None


def _slice_failed(ledger: Ledger, event: SliceFailed) -> None:
    one = ledger.slices.get(event.index)
    if one is None:
        return
    if event.incarnation == one.incarnation:
        ledger.lose(one, event.cause)
    elif event.incarnation < one.incarnation:
        ledger.fence(one, event.incarnation)


def _slice_idle(ledger: Ledger, event: SliceIdle) -> None:
    one = ledger.slices.get(event.index)
    if one is None or one.state not in ("fencing", "failed"):
        return
    if event.incarnation < one.incarnation:
        return
    if one.state == "failed":
        ledger.tell("is well again", one=one)
    one.state, one.due, one.reason = "idle", None, "nobody needs it"


def _slice_report(ledger: Ledger, event: SliceReport) -> None:
    one = ledger.slices.get(event.index)
    if one is None:
        one = ledger.slices[event.index] = Slice(index=event.index, shape=event.shape)
        ledger.begin_fencing(one, "it has just joined")
        ledger.tell(f"joined: {event.shape}", one=one)
    newest = max(event.running, default=0)
    if newest > one.incarnation or event.shape != one.shape:
        # Of a time that this manager does not remember, or hosts that are others now.
        if one.state in ("leased", "asked"):
            ledger.lose(one, "its hosts are not those that were leased")
        one.shape = event.shape
        one.incarnation = max(newest, one.incarnation)
    if one.state == "idle" and event.running:
        ledger.begin_fencing(one, "processes that nobody leased it to run on it")
    if one.state in ("fencing", "failed"):
        ledger.fence(one)
    elif any(running < one.incarnation for running in event.running):
        ledger.fence(one, one.incarnation - 1)


def _current(ledger: Ledger, name: str, attempt: int) -> Job | None:
    """The job, if it is its present attempt that something is told of."""
    job = ledger.jobs.get(name)
    return job if job is not None and job.attempt == attempt else None


def _known(ledger: Ledger, name: str) -> Job:
    if name not in ledger.jobs:
        raise UsageError(f"there is no job {name!r}")
    return ledger.jobs[name]
