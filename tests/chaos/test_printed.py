"""Losses that are read from what a script prints."""

from __future__ import annotations

import pytest
from proofs import run

from regrow.chaos.printed import DEFAULT, pattern_of, resolution, steps_in
from regrow.chaos.verdict import DIVERGED, WITHIN, judge
from regrow.errors import UsageError


def printed(*lines: str, pattern: str = DEFAULT):
    return steps_in([(float(at), line) for at, line in enumerate(lines)], pattern_of(pattern))


@pytest.mark.parametrize(
    "line",
    [
        "step 12 loss 0.50",
        "Step: 12, loss: 0.50, lr 1e-3",
        '{"step": 12, "time_s": 0.2, "loss": 0.50}',
        "I0101 train.py:7] step=12 grad_norm=3.1 train_loss was; loss=0.50",
    ],
)
def test_usual_forms(line: str) -> None:
    (one,) = printed("loading step files", line, "attempt 1 ended: slice 1 was lost in step 20")
    assert (one.step, one.loss.value, one.slices, one.at) == (12, 0.5, None, 1.0)
    assert resolution(one.loss) == pytest.approx(0.01)


def test_a_pattern_of_ones_own() -> None:
    pattern = r"^(?P<step>\d+) (?P<loss>\S+)"
    found = printed("3 1.5e-2 [0, 1]", "4 what", "5 nan", pattern=pattern)
    assert [one.step for one in found] == [3, 5]
    assert resolution(found[0].loss) == pytest.approx(1e-3)
    assert resolution(found[1].loss) == 0


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("(", "--losses '(' is no regular expression"),
        (r"(?P<step>\d+)", "has no group (?P<loss>...); it needs step and loss"),
        ("x", "has no group (?P<step>...)"),
    ],
)
def test_patterns_that_are_none(pattern: str, text: str) -> None:
    with pytest.raises(UsageError, match=r"--losses") as raised:
        pattern_of(pattern)
    assert text in str(raised.value)


def test_what_is_printed_is_equal_to_its_digits() -> None:
    lines = [f"step {step} loss {9 - step}.1250" for step in range(6)]
    undisturbed = run(*printed(*lines))
    redone = run(*printed(*lines[:4], *lines[2:]))
    assert (len(redone.steps), redone.taken_twice) == (6, 2)
    verdict = judge(redone, None, undisturbed, slices=3)
    assert verdict.outcome == WITHIN
    assert verdict.text == "equal within tolerance: 6 losses, to the digits that are printed"
    last = judge(run(*printed(*lines[:5], "step 5 loss 4.1251")), None, undisturbed)
    assert last.text == verdict.text, "it may be a rounding of the last digit"
    other = judge(run(*printed(*lines[:5], "step 5 loss 4.1270")), None, undisturbed)
    assert other.outcome == DIVERGED
    assert other.text.startswith("diverged at step 5: the loss is 4.127, undisturbed 4.125")
