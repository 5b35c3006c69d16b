"""Runs beside each other: every bit, and losses within the tolerance."""

from __future__ import annotations

import math

import pytest
from proofs import ALL, FEWER, loss, run, step, steps

from regrow.chaos.comparison import closeness, first_difference
from regrow.chaos.tolerance import AMPLIFICATION, Tolerance, tolerance_of

PLAIN = run(*steps(0, 5))


def changed(number, **changes):
    return run(*steps(0, number - 1), step(number, **changes), *steps(number + 1, 5))


def test_equal_runs():
    assert first_difference(run(*steps(0, 4), *steps(2, 5)), PLAIN) is None


def test_a_single_bit_of_a_loss():
    difference = first_difference(changed(3, loss=loss(math.nextafter(7.0, 8.0) + 4e-7)), PLAIN)
    assert (difference.step, difference.part, difference.path) == (3, "loss", None)
    assert "bits 0000e040" in difference.text


def test_equal_bits_of_nan_are_equal():
    nan = changed(3, loss=loss(math.nan))
    assert first_difference(nan, nan) is None
    assert first_difference(nan, PLAIN).part == "loss"


def test_the_first_leaf_of_the_state_by_path():
    state = {"params/w": "float32[8] 3", "opt/m": "float32[8] 7"}
    difference = first_difference(changed(3, state=state), PLAIN)
    assert (difference.step, difference.part, difference.path) == (3, "state", "opt/m")
    assert difference.text == (
        "the state differs first at opt/m: float32[8] 7, in the reference float32[8] 103"
    )
    more = first_difference(changed(3, state={**PLAIN.steps[3].state, "z": "int32[] 1"}), PLAIN)
    assert more.path == "z"
    assert "not there" in more.text


@pytest.mark.parametrize(
    ("other", "part"),
    [
        (changed(3, ids=(1, 2, 3, 4)), "records"),
        (changed(3, slices=FEWER), "slices"),
        (run(*steps(0, 4)), "steps"),
        (run(*steps(0, 6)), "steps"),
        (run(*steps(0, 2), *steps(4, 5)), "steps"),
    ],
)
def test_other_differences(other, part):
    assert first_difference(other, PLAIN).part == part
    assert first_difference(PLAIN, other).part == part


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ((12, 7, 14, 15), "record 7 was used, in the reference 13"),
        ((12, 13, 14), "3 records were used, in the reference 4"),
        (None, "only one of the runs told its records"),
    ],
)
def test_other_records_are_named(ids, text):
    assert first_difference(changed(3, ids=ids), PLAIN).text == text


TOLERANCE = Tolerance(3, "float32")


def off(number, relative, slices=FEWER):
    value = PLAIN.steps[number].loss.value
    return step(number, slices, loss=loss(value * (1 + relative)))


def test_a_difference_within_the_tolerance_is_told():
    within = TOLERANCE.of_a_step / 2
    close = closeness(run(*steps(0, 2), off(3, within), *steps(4, 5)), PLAIN, TOLERANCE)
    assert (close.exceeded, close.at) == (None, 3)
    assert close.largest == pytest.approx(within, rel=0.1)


def test_the_tolerance_grows_with_the_steps_on_other_slices():
    beyond = TOLERANCE.of_a_step * 1.5
    first = closeness(run(*steps(0, 2), off(3, beyond), *steps(4, 5)), PLAIN, TOLERANCE)
    assert first.exceeded == 3
    second = run(*steps(0, 2), step(3, FEWER), off(4, beyond, ALL), step(5))
    assert closeness(second, PLAIN, TOLERANCE).exceeded is None


def test_a_loss_that_has_fallen_to_nothing_may_differ_by_what_its_parts_do():
    losses = [1.0, 1e-4, 1e-8]
    wanted = run(*[step(n, loss=loss(value)) for n, value in enumerate(losses)])
    error = TOLERANCE.of_a_step / 2

    def residual_off(factor):
        value = (math.sqrt(losses[2]) + factor * error) ** 2
        changed = step(1, FEWER, loss=loss(losses[1]))
        return run(step(0, loss=loss(1.0)), changed, step(2, loss=loss(value)))

    assert closeness(residual_off(1), wanted, TOLERANCE).exceeded is None
    assert closeness(residual_off(10), wanted, TOLERANCE).exceeded == 2


def test_before_the_slices_change_every_bit_counts():
    close = closeness(run(step(0), off(1, 1e-6, ALL), *steps(2, 5, FEWER)), PLAIN, TOLERANCE)
    assert (close.exceeded, close.allowed) == (1, 0.0)


def test_of_unknown_slices_any_may_have_changed():
    unknown = [step(n, None, loss=off(n, 1e-6).loss) for n in range(6)]
    assert closeness(run(*unknown), PLAIN, TOLERANCE).exceeded is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -7.0])
def test_what_is_no_number_is_not_close(value):
    other = run(*steps(0, 2), step(3, FEWER, loss=loss(value)), *steps(4, 5))
    assert closeness(other, PLAIN, TOLERANCE).exceeded == 3


def test_a_missing_step_is_not_close():
    assert closeness(run(*steps(0, 4)), PLAIN, TOLERANCE).exceeded == 5


def test_losses_of_other_batches_are_not_compared():
    fewer = run(*steps(0, 2), *[step(n, FEWER, ids=(n,)) for n in (3, 4, 5)])
    assert not closeness(fewer, PLAIN, TOLERANCE).comparable


def test_the_tolerance_follows_from_the_replicas_and_the_coarsest_type():
    assert tolerance_of(PLAIN) == TOLERANCE
    assert TOLERANCE.of_a_step == AMPLIFICATION * 2 * 2 * 2.0**-24
    half = {"w": "bfloat16[8] 0", "count": "int32[] 0"}
    assert tolerance_of(run(step(0, state=half)), PLAIN) == Tolerance(3, "bfloat16")
    assert tolerance_of(run(step(0, None, state=None, loss=loss(1.0, "float")))).dtype == "float32"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_in_both_runs_is_the_same(value):
    both = [run(step(0), step(1, its, loss=loss(value)), step(2, its)) for its in (FEWER, ALL)]
    close = closeness(*both, TOLERANCE)
    assert (close.exceeded, close.largest, close.at) == (None, 0.0, None)


def test_an_infinite_loss_widens_no_tolerance():
    overflown = run(step(0), step(1, loss=loss(math.inf)), *steps(2, 5))
    other = run(*overflown.steps[:3], off(3, TOLERANCE.of_a_step * 4), *steps(4, 5))
    assert closeness(other, overflown, TOLERANCE).exceeded == 3


def test_zeros_of_both_signs_are_within_the_tolerance_but_not_equal_in_every_bit():
    zeros = [
        run(step(0), step(1, its, loss=loss(value))) for its, value in ((FEWER, -0.0), (ALL, 0))
    ]
    close = closeness(*zeros, TOLERANCE)
    assert (close.exceeded, close.at) == (None, 1)
