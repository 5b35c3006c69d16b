"""Which records count, and which changes of slices they tell of."""

from __future__ import annotations

from proofs import ALL, FEWER, run, step, steps

from regrow.chaos.committed import Rollback, schedule_of
from regrow.elastic.planned import Change, Plan

EVERYONE, OTHERS = frozenset(ALL), frozenset(FEWER)


def test_a_step_that_is_taken_again_takes_the_place_of_the_former():
    again = steps(2, 5, FEWER)
    committed = run(*steps(0, 4), *again)
    assert committed.steps == (*steps(0, 1), *again)
    assert committed.rollbacks == (Rollback(4, 2),)
    assert committed.taken_twice == 3


def test_what_was_ahead_of_a_rollback_is_void_even_if_it_never_came_again():
    committed = run(*steps(0, 4), step(2))
    assert [one.step for one in committed.steps] == [0, 1, 2]


def test_a_run_may_go_back_more_than_once():
    committed = run(*steps(0, 6), *steps(4, 5, FEWER), *steps(4, 8, (0,)))
    assert [one.slices for one in committed.steps] == [ALL] * 4 + [(0,)] * 5
    assert schedule_of(committed, ALL) == Plan(EVERYONE, (Change(3, frozenset({0}), "restart"),))


def test_an_undisturbed_run_has_no_changes():
    assert schedule_of(run(*steps(0, 3)), ALL) == Plan(EVERYONE)
    assert schedule_of(run(), ALL) == Plan(EVERYONE)


def test_a_loss_is_a_restart_and_a_return_an_offer():
    committed = run(*steps(0, 4), *steps(3, 6, FEWER), *steps(7, 9))
    changes = (Change(2, OTHERS, "restart"), Change(6, EVERYONE, "offer"))
    assert schedule_of(committed, ALL) == Plan(EVERYONE, changes)


def test_how_long_the_snapshot_had_to_get_ready():
    first = [step(number, at=10.0 + number) for number in range(5)]
    again = [step(number, FEWER, at=20.0 + number) for number in range(2, 4)]
    once_more = [step(number, FEWER, at=30.0 + number) for number in range(2, 6)]
    committed = run(*first, *again, *once_more)
    assert [one.behind_s for one in committed.rollbacks] == [3.0, 12.0]
    assert schedule_of(committed, ALL).changes == (Change(1, OTHERS, "restart", 3.0),)


def test_a_return_that_goes_back_to_a_snapshot_is_a_restart():
    committed = run(*steps(0, 6, FEWER), *steps(5, 9))
    assert schedule_of(committed, ALL) == Plan(OTHERS, (Change(4, EVERYONE, "restart"),))


def test_another_slice_in_the_place_of_a_lost_one_is_a_restart():
    committed = run(*steps(0, 4, (0, 1)), *steps(5, 6, (0, 2)))
    assert schedule_of(committed, ALL).changes == (Change(4, OTHERS, "restart"),)


def test_a_loss_before_the_first_snapshot_leaves_no_trace_of_the_former_slices():
    assert schedule_of(run(*steps(0, 4), *steps(0, 6, FEWER)), ALL) == Plan(OTHERS)


def test_unknown_slices_make_no_plan():
    assert schedule_of(run(step(0), step(1, None)), ALL) is None
