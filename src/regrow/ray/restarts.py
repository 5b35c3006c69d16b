"""Whether and when a job is tried again: budgets apart for lost hosts and for failures; no I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, TypeAlias, final

from regrow.errors import UsageError
from regrow.ray.attempts import Kind


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How often a job is tried again.

    Attributes:
        preemptions: How often after the loss of hosts.
        failures: How often after a failure of its own.
        backoff_s: The pause before the first try after a failure; doubles with each failure.
        longest_backoff_s: The longest such pause.
        deadline_s: When the job is given up, counted from its beginning.
    """

    preemptions: int = 0
    failures: int = 0
    backoff_s: float = 1.0
    longest_backoff_s: float = 60.0
    deadline_s: float = math.inf

    def __post_init__(self) -> None:
        if self.preemptions < 0 or self.failures < 0:
            raise UsageError("the budgets for preemptions and failures must be 0 or more")
        if self.backoff_s < 0 or self.longest_backoff_s < 0 or self.deadline_s <= 0:
            raise UsageError("pauses must be 0 s or more, and the deadline more than 0 s")


@final
@dataclass(frozen=True, slots=True)
class Again:
    """Try again after a pause."""

    pause_s: float


@final
@dataclass(frozen=True, slots=True)
class Over:
    """The job has ended.

    Attributes:
        succeeded: Whether well.
        why: Why it is not tried again; empty if it ended well.
    """

    succeeded: bool
    why: str = ""


Decision: TypeAlias = Again | Over

_LEFTOVERS: Final = 3
_LEFTOVER_S: Final = 5.0


@final
class Budgets:
    """What is left of the budgets of one job."""

    def __init__(self, policy: RestartPolicy, now: float) -> None:
        """Begins to count at a time by the monotonic clock."""
        self._policy = policy
        self.deadline_s = policy.deadline_s
        self._end = now + policy.deadline_s
        self.preemptions = 0
        self.failures = 0
        self.leftovers = 0

    def left_s(self, now: float) -> float:
        """Seconds until the deadline."""
        return self._end - now

    def after(self, kind: Kind, now: float) -> Decision:
        """What follows an attempt that has ended so."""
        policy = self._policy
        if kind == "succeeded":
            return Over(True)
        if kind == "setup":
            return Over(False, "its runtime environment cannot be made")
        if kind == "stopped":
            return Over(False, "it was stopped")
        pause_s = 0.0
        if kind == "leftover":
            if self.leftovers >= _LEFTOVERS:
                return Over(False, "its runtime environment cannot be made")
            # What makes it may still be at work.
            pause_s = _LEFTOVER_S * 2**self.leftovers
            self.leftovers += 1
        elif kind == "preempted":
            if self.preemptions >= policy.preemptions:
                return Over(False, _spent("preemptions", self.preemptions))
            self.preemptions += 1
        else:
            if self.failures >= policy.failures:
                return Over(False, _spent("failures", self.failures))
            pause_s = min(policy.backoff_s * 2**self.failures, policy.longest_backoff_s)
            self.failures += 1
        if now + pause_s >= self._end:
            return Over(False, f"its deadline of {policy.deadline_s:g} s is over")
        return Again(pause_s)


def _spent(what: str, number: int) -> str:
    return f"its budget of {number} {what} is spent" if number else f"no {what} are allowed for"
