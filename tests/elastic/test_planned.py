"""Plans of slices: where a change takes place, and what health checks say."""

from __future__ import annotations

import threading
from dataclasses import replace

import jax
import pytest

from regrow.elastic import planned
from regrow.elastic.planned import Change, Follower, Plan, PlanMachine
from regrow.errors import UsageError

ALL = frozenset({0, 1, 2})
SHRINK = Change(4, frozenset({0, 2}), "restart")
GROW = Change(7, ALL, "offer")
PLAN = Plan(ALL, (SHRINK, GROW))


def test_a_plan_is_text():
    assert Plan.from_json(PLAN.to_json()) == PLAN


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"first": [0], "changes": [{}]}'])
def test_a_text_that_is_no_plan_is_told(text):
    with pytest.raises(UsageError, match="REGROW_PLANNED_SLICES is no plan"):
        Plan.from_json(text)


def test_a_restart_comes_with_the_first_step_behind_it_and_an_offer_with_the_last_before():
    machine = PlanMachine(PLAN)
    changes = [(step, machine.record(step, machine.slices)) for step in (0, 3, 4, 5, 5, 6, 7, 8)]
    assert [one for one in changes if one[1]] == [(5, SHRINK), (7, GROW)]
    assert machine.slices == ALL


def test_slices_that_have_changed_by_themselves_are_left_alone():
    machine = PlanMachine(PLAN)
    assert machine.record(5, SHRINK.slices) is None
    assert machine.slices == SHRINK.slices


def test_a_change_that_was_passed_is_not_made_up_for():
    machine = PlanMachine(PLAN)
    assert machine.record(6, ALL) is None
    assert machine.slices == SHRINK.slices


def test_a_restart_is_the_error_of_a_lost_slice():
    follower = Follower(PLAN)
    assert follower.before_record(4, ALL) is None
    told = "DATA_LOSS: slice 1 left after step 4, as planned; there is no fault"
    with pytest.raises(jax.errors.JaxRuntimeError, match=told):
        follower.before_record(5, ALL)
    assert follower.answer(ALL) == {0, 2}
    assert follower.answer(frozenset({1, 2})) == {2}


@pytest.mark.parametrize(("patient", "waits"), [(True, [3.0]), (False, [0.0])])
def test_a_second_try_leaves_the_snapshot_more_time(patient, waits, monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(planned.time, "sleep", slept.append)
    plan = Plan(ALL, (replace(SHRINK, behind_s=1.5),), patient)
    follower = Follower(Plan.from_json(plan.to_json()))
    with pytest.raises(jax.errors.JaxRuntimeError):
        follower.before_record(5, ALL)
    assert slept == waits


def test_an_offer_waits_until_it_has_been_seen():
    follower = Follower(Plan(frozenset({0, 2}), (GROW,)))
    assert follower.before_record(7, frozenset({0, 2})) == GROW
    waiting = threading.Thread(target=follower.offer, args=(GROW,))
    waiting.start()
    asked = 0
    while waiting.is_alive():
        follower.asks()
        asked += 1
        waiting.join(0.05)
    assert asked >= 2, "what the first check has found may not have been taken yet"
