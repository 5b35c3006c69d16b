"""The step of a training is found among all programs, and what is lost of it is known."""

from __future__ import annotations

from regrow.observe.steps import Resumed, Steps


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
    assert str(lost) == "execution 27"
    assert lost_s == 1.0
    assert steps.resume(Resumed(loaded=True), 127.0) == (None, 0.0)


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
