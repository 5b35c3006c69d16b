"""The step of a training is found among all programs, and what is lost of it is known."""

from __future__ import annotations

from regrow.observe.steps import Steps


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
    lost, lost_s = steps.resume(121, loaded=False, productive_s=127.0)
    assert str(lost) == "steps 121 to 126"
    assert lost_s == 6.0
    assert (steps.number, steps.lost) == (21, 6)
    assert steps.resume(127, False, 127.0) == (None, 0.0)


def test_lost_by_the_executions_since_the_snapshot() -> None:
    steps = training(told=False)
    steps.saved(26)
    lost, lost_s = steps.resume(None, loaded=True, productive_s=127.0)
    assert str(lost) == "execution 27"
    assert lost_s == 1.0
    assert steps.resume(None, loaded=True, productive_s=127.0) == (None, 0.0)


def test_nobody_knows_where_it_goes_on() -> None:
    steps = training(told=False)
    steps.saved(20)
    assert steps.resume(None, loaded=False, productive_s=127.0) == (None, 0.0)
    assert steps.number == 27
