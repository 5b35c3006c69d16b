"""Planned changes of slices: a run without faults that has the slices of a run that had some.

`regrow prove` compares a faulted run with one that no fault disturbed and that computes each step on
the same slices. That one is told by an environment variable after which steps the slices change, and
this makes the program see it so, though all slices live:

* only the planned slices answer the health checks, those of `regrow.elastic` as those of
  pathwaysutils, so managers make no other ones active;
* at a *restart*, what the program would have met at a loss happens: an error that begins with
  DATA_LOSS is raised. It is raised where the first step after the change is recorded, before it is
  written, so that the latest snapshot is the one that the faulted run had loaded: a snapshot of a
  later step has not been asked for yet. The program then does what it does after a loss;
* at an *offer*, slices return: where the last step before the change is recorded, the program is held
  until its manager has seen them.

Both follow from `regrow.elastic.record`, which thus has to stand right behind the step.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import threading
import time
from collections.abc import Set
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, Final, Literal, TypeAlias, final

from regrow.elastic.libraries import pathwaysutils
from regrow.errors import UnsupportedError, UsageError

PLAN_VARIABLE: Final = "REGROW_PLANNED_SLICES"
"""The plan that the managers of a process follow, as `Plan.to_json` writes it."""

_SEEN_DEADLINE_S: Final = 60.0
_PATIENCE: Final = 2.0
_logger = logging.getLogger(__name__)

How: TypeAlias = Literal["restart", "offer"]


@final
@dataclass(frozen=True, slots=True)
class Change:
    """The slices change after a step.

    Attributes:
        after: The last step on the former slices.
        slices: The slices from then on.
        how: "restart": the program goes back to its snapshot of that step. "offer": it goes on, and
            takes in what it is offered.
        behind_s: For how long it had gone on behind that step before it went back: so long its
            snapshot had to get ready.
    """

    after: int
    slices: frozenset[int]
    how: How
    behind_s: float = 0.0


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """Which slices compute which steps.

    Attributes:
        first: The slices at the start.
        changes: What changes, in order of steps.
        patient: Whether a restart waits until the snapshot has had more time than it had.
    """

    first: frozenset[int]
    changes: tuple[Change, ...] = ()
    patient: bool = False

    def to_json(self) -> str:
        """The text that `from_json` reads."""
        changes = [asdict(change) | {"slices": sorted(change.slices)} for change in self.changes]
        told = {"first": sorted(self.first), "changes": changes, "patient": self.patient}
        return json.dumps(told)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """From the text of `to_json`.

        Raises:
            UsageError: It is no plan.
        """
        try:
            told = json.loads(text)
            changes = tuple(
                Change(int(one["after"]), frozenset(one["slices"]), one["how"], one["behind_s"])
                for one in told["changes"]
            )
            return cls(frozenset(told["first"]), changes, told["patient"])
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{PLAN_VARIABLE} is no plan: {error!r}") from None


@final
class PlanMachine:
    """Where a program is in its plan. No I/O.

    Attributes:
        slices: Those that are there now, as far as the program is to know.
    """

    def __init__(self, plan: Plan) -> None:
        self.slices = plan.first
        self._left = list(plan.changes)

    def record(self, step: int, slices: Set[int] | None) -> Change | None:
        """A step is about to be recorded that was computed on these slices (None: unknown).

        Returns:
            The change that takes place here, if one does.
        """
        if not self._left:
            return None
        change = self._left[0]
        here = change.after + 1 if change.how == "restart" else change.after
        if step < here:
            return None
        self._left.pop(0)
        self.slices = change.slices
        # A program may change its slices by itself: then there is nothing to be done.
        done = step > here or (change.how == "restart" and slices == change.slices)
        return None if done else change


@final
class Follower:
    """Makes the program follow a plan."""

    def __init__(self, plan: Plan) -> None:
        self._machine = PlanMachine(plan)
        self._patience = _PATIENCE if plan.patient else 0.0
        self._asked = threading.Condition()
        self._times_asked = 0

    def asks(self) -> None:
        """A health check begins."""
        with self._asked:
            self._times_asked += 1
            self._asked.notify_all()

    def answer(self, active: Set[int]) -> frozenset[int]:
        """What a health check that has found these slices to work is to say."""
        return self._machine.slices & active

    def before_record(self, step: int, slices: Set[int] | None) -> Change | None:
        """A step is about to be recorded.

        Returns:
            The offer that is due when it has been recorded; call `offer` then.

        Raises:
            JaxRuntimeError: A restart is due.
        """
        former = self._machine.slices
        change = self._machine.record(step, slices)
        if change is None or change.how == "offer":
            return change
        time.sleep(self._patience * change.behind_s)
        jax_errors: Any = import_module("jax.errors")
        raise jax_errors.JaxRuntimeError(f"DATA_LOSS: {_told(former, change)}")

    def offer(self, change: Change) -> None:
        """Waits until whoever watches the slices has seen those that return."""
        with self._asked:
            # When a check begins, the result of the one before has been taken.
            wanted = self._times_asked + 2
            if self._asked.wait_for(lambda: self._times_asked >= wanted, _SEEN_DEADLINE_S):
                return
        _logger.warning(
            "slices %s return after step %d, but nobody has looked for %g s",
            sorted(change.slices),
            change.after,
            _SEEN_DEADLINE_S,
        )


def _told(former: Set[int], change: Change) -> str:
    gone, new = sorted(former - change.slices), sorted(change.slices - former)
    texts = [f"{_named(gone)} left" if gone else "", f"{_named(new)} returned" if new else ""]
    told = " and ".join(text for text in texts if text)
    return f"{told or 'the slices stayed'} after step {change.after}, as planned; there is no fault"


def _named(slices: list[int]) -> str:
    return ("slice " if len(slices) == 1 else "slices ") + ", ".join(map(str, slices))


_follower: Follower | None = None


def follower() -> Follower | None:
    """Who makes this process follow the plan of its environment; None: there is no plan."""
    return _follower


def follow_environment() -> None:
    """Begins to follow the plan that the environment holds, if it holds one.

    Raises:
        UsageError: It is no plan.
    """
    global _follower
    text = os.environ.get(PLAN_VARIABLE)
    if text is None or _follower is not None:
        return
    _follower = Follower(Plan.from_json(text))
    try:
        _lead_stock(pathwaysutils("elastic.elastic"), _follower)
    except UnsupportedError:
        _logger.info("there is no pathwaysutils that would have to follow the plan")


def _lead_stock(module: Any, leader: Follower) -> None:
    """Has the health check of pathwaysutils, which all its waits go through, follow the plan."""
    stock = module.get_active_slice_indices

    @functools.wraps(stock)
    def get_active_slice_indices(*args: Any, **kwargs: Any) -> Set[int]:
        leader.asks()
        return leader.answer(stock(*args, **kwargs))

    module.get_active_slice_indices = get_active_slice_indices
