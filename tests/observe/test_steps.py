"""The step of a training is found among all programs, and what is lost of it is known."""

from __future__ import annotations

from regrow.observe.steps import Resumed, Steps
from regrow.observe.timeline import LostSteps


def taken(steps: Steps, name: str, weight: int, times: int, small: bool = False) -> list[bool]:
    program = steps.program(name, weight, small)
    return [steps.launched(program, 0.0, None) for _ in range(times)]


def test_the_dominant_program_is_the_step() -> None:
    steps = Steps()
    assert taken(steps, "jit_check", 500, 50, small=True) == [False] * 50
    assert taken(steps, "jit_init", 9_000, 1) == [False]
    # One execution might be anything.
    assert taken(steps, "jit_step", 10_000, 3) == [False, True, True]
    assert (steps.number, steps.taken) == (3, 3)
    assert taken(steps, "jit_convert", 600, 40) == [False] * 40
    assert steps.main is not None
    assert steps.main.name == "jit_step"


def test_many_light_executions_are_a_step_until_a_heavier_one_is_seen() -> None:
    steps = Steps()
    taken(steps, "jit_init", 50_000, 1)
    assert taken(steps, "jit_light", 1_000, 20)[-1]
    assert taken(steps, "jit_step", 20_000, 3) == [False, False, False]
    assert taken(steps, "jit_step", 60_000, 1) == [True]


def test_a_light_program_in_two_steps_that_were_told_is_the_step() -> None:
    steps = Steps()
    taken(steps, "jit_init", 50_000, 1)
    program = steps.program("jit_step", 2_000, False)
    told = (None, 0, 0, 1, 2)
    assert [steps.launched(program, 0.0, step) for step in told] == [False] * 3 + [True] * 2
    assert steps.taken == 5


def test_programs_of_one_name_are_one() -> None:
    steps = Steps()
    taken(steps, "jit_step", 10_000, 2)
    assert taken(steps, "jit_step", 9_000, 1) == [True]
    assert steps.number == 3


def training(told: bool) -> Steps:
    steps = Steps()
    program = steps.program("jit_step", 10_000, False)
    for step in range(100, 127):
        steps.launched(program, float(step), step if told else None)
    return steps


def test_lost_by_the_steps_that_were_told() -> None:
    steps = training(told=True)
    lost, lost_s = steps.resume(Resumed(step=121), 127.0)
    assert str(lost) == "steps 121 to 126"
    assert lost_s == 6.0
    assert (steps.number, steps.lost) == (21, 6)
    assert steps.resume(Resumed(step=127), 127.0) == (None, 0.0)


def test_lost_by_the_executions_since_the_snapshot() -> None:
    steps = training(told=False)
    steps.saved(26)
    lost, lost_s = steps.resume(Resumed(loaded=True), 127.0)
    assert lost == LostSteps(27, 27, counted=True)
    assert lost_s == 1.0
    assert steps.resume(Resumed(loaded=True), 127.0) == (None, 0.0)


def recorded(steps: Steps, *of_steps: int) -> None:
    """Executions behind which the step is recorded, so the next carries what is to be expected."""
    program = steps.program("jit_step", 10_000, False)
    for step in of_steps:
        steps.launched(program, float(step), step, expected=True)


def test_lost_by_the_steps_that_were_recorded() -> None:
    steps = training(told=False)
    recorded(steps, *range(127, 140))
    assert steps.latest == (40, None)
    assert not steps.tells
    steps.saved(30)  # After step 129.
    # The first one after the snapshot carries what would have followed without the loss.
    recorded(steps, 140, 131, 132)
    lost, lost_s = steps.resume(Resumed(number=41, loaded=True), 140.0)
    assert lost == LostSteps(130, 139, counted=False)
    assert lost_s == 10.0
    assert (steps.number, steps.lost) == (33, 10)
    # Once more, and nothing of the former detour is left in the names.
    recorded(steps, 132)
    lost, _ = steps.resume(Resumed(number=34, loaded=True), 143.0)
    assert lost == LostSteps(130, 132, counted=False)


def test_steps_are_counted_where_one_of_them_carries_none() -> None:
    steps = training(told=False)
    steps.saved(26)
    recorded(steps, 127, 128)
    lost, _ = steps.resume(Resumed(loaded=True), 129.0)
    assert lost == LostSteps(27, 29, counted=True)


def test_executions_that_go_on_are_not_lost() -> None:
    steps = training(told=True)
    program = steps.program("jit_step", 10_000, False)
    for step in (127, 121, 122):  # The first in vain, the last ahead of the one that is complete.
        steps.launched(program, 127.0, step)
    lost, lost_s = steps.resume(Resumed(number=29, step=121), 127.0)
    assert str(lost) == "steps 121 to 127"
    assert lost_s == 6.0
    assert (steps.number, steps.taken, steps.lost) == (23, 30, 7)
    assert steps.latest == (23, 122)
    assert str(steps.resume(Resumed(step=122), 128.0)[0]) == "step 122"


def test_a_client_that_comes_later_has_steps_of_its_own() -> None:
    steps = training(told=True)
    steps.saved(20)
    steps.client_gone()
    assert steps.resume(Resumed(step=3), 127.0) == (None, 0.0)
    assert steps.resume(Resumed(loaded=True), 127.0) == (None, 0.0)


def test_nobody_knows_where_it_goes_on() -> None:
    steps = training(told=False)
    steps.saved(20)
    assert steps.resume(Resumed(), 127.0) == (None, 0.0)
    assert steps.number == 27
