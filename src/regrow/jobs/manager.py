"""The resource manager as a state machine: several jobs on one set of slices.

It does no I/O and reads no clock. The caller writes `to_json` down before it carries out what
`handle` returned; if it dies in between, `recover` and the reports of jobs and hosts bring the same
instructions again, and each of them may come twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self, final

from regrow.jobs import records
from regrow.jobs.allocation import Evict, Lease, Plan, allocate
from regrow.jobs.handlers import handle
from regrow.jobs.ledger import Ledger
from regrow.jobs.model import Change, Event, Instruction, Policy
from regrow.jobs.records import Job, Slice


@final
class Manager:
    """All jobs and slices of a cluster."""

    def __init__(self, policy: Policy | None = None) -> None:
        self._ledger = Ledger(policy or Policy())
        self._plan = Plan()

    @property
    def changes(self) -> Sequence[Change]:
        """The latest changes, each with its reason."""
        return self._ledger.changes

    def take_changes(self) -> list[Change]:
        """The changes since the last time, to be written down."""
        fresh, self._ledger.fresh = self._ledger.fresh, []
        return fresh

    def handle(self, event: Event, now: float) -> tuple[Instruction, ...]:
        """Takes an event; returns what to do.

        Raises:
            UsageError: If it is a request that cannot be met; nothing has changed then.
        """
        self._ledger.now = now
        handle(self._ledger, event)
        return self._settle()

    def tick(self, now: float) -> tuple[Instruction, ...]:
        """Does what is due; see `deadline`."""
        self._ledger.now = now
        for job in list(self._ledger.jobs.values()):
            if job.report_by is not None and now >= job.report_by:
                self._ledger.drop(job, "ended: it did not report to the restarted manager")
            elif job.due is not None and now >= job.due:
                self._ledger.overdue(job)
        for one in self._ledger.slices.values():
            if one.report_by is not None and now >= one.report_by:
                self._ledger.lose(one, "its hosts did not report to the restarted manager")
            elif one.due is not None and now >= one.due:
                self._ledger.slice_overdue(one)
        return self._settle()

    def deadline(self) -> float | None:
        """When `tick` must be called at the latest."""
        jobs, slices = self._ledger.jobs.values(), self._ledger.slices.values()
        times = [time for job in jobs for time in (job.due, job.report_by)]
        times += [time for one in slices for time in (one.due, one.report_by)]
        return min((time for time in times if time is not None), default=None)

    def to_json(self) -> dict[str, Any]:
        """All there is to remember, as JSON values."""
        return records.to_json(self._ledger.jobs, self._ledger.slices) | {
            "order": self._ledger.order,
        }

    @classmethod
    def recover(
        cls,
        state: dict[str, Any],
        now: float,
        policy: Policy | None = None,
        changes: Iterable[Change] = (),
    ) -> tuple[Self, tuple[Instruction, ...]]:
        """A manager that goes on from what another one wrote down, and what it has to do first.

        Waits begin anew. A job that does not report in time has ended.

        Args:
            state: What `to_json` returned.
            now: The present.
            policy: How to decide.
            changes: The latest changes of the other one.

        Raises:
            ValueError, TypeError, KeyError: If `state` is none.
        """
        manager = cls(policy)
        ledger = manager._ledger
        ledger.now = now
        ledger.jobs, ledger.slices = records.from_json(state)
        ledger.order = int(state["order"])
        ledger.changes.extend(changes)
        ledger.restart_waits()
        ledger.tell("the manager was started again")
        ledger.out += ledger.outstanding()
        return manager, manager._settle()

    def status(self) -> dict[str, Any]:
        """Jobs by standing, slices with their leases and reservations, changes; as JSON values."""
        jobs = sorted(self._ledger.jobs.values(), key=lambda job: job.standing)
        return {
            "jobs": [self._job_status(job) for job in jobs],
            "slices": [self._slice_status(one) for one in self._ledger.slices.values()],
            "spares": self._ledger.policy.spares,
            "changes": [records.shallow(change) for change in self.changes],
        }

    def _settle(self) -> tuple[Instruction, ...]:
        """Carries out what the allocation decides; returns all instructions since the last time."""
        ledger = self._ledger
        self._plan = allocate(ledger.jobs.values(), ledger.slices.values(), ledger.policy.spares)
        for decision in self._plan.decisions:
            match decision:
                case Lease(name, rank, index, reason):
                    ledger.lease(ledger.jobs[name], rank, ledger.slices[index], reason)
                case Evict(name, how, indices, reason):
                    ledger.evict(ledger.jobs[name], how, indices, reason)
        for name, reason in self._plan.waits.items():
            ledger.note_wait(ledger.jobs[name], reason)
        return ledger.take()

    def _job_status(self, job: Job) -> dict[str, Any]:
        leases = sorted(self._ledger.slices_of(job), key=lambda one: one.rank or 0)
        return {
            "name": job.name,
            "priority": job.spec.priority,
            "priority_class": job.spec.priority_class,
            "shape": str(job.spec.shape),
            "phase": job.phase,
            "held": job.held,
            "wanted": job.wanted,
            "least": job.least,
            "leases": [[one.rank, one.index, one.incarnation] for one in leases],
            "lost": sorted(job.lost),
            "restarts": job.restarts,
            "reason": job.reason,
        }

    def _slice_status(self, one: Slice) -> dict[str, Any]:
        return {
            "index": one.index,
            "shape": str(one.shape),
            "shape_of": records.shallow(one.shape),
            "state": one.state,
            "incarnation": one.incarnation,
            "job": one.job,
            "reserved_for": self._plan.reserved.get(one.index),
            "reason": one.reason,
        }
