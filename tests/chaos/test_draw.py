"""Schedules by lot."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.chaos import draw_schedule, format_schedule, parse_schedule
from regrow.chaos.draw import DRAWN, LOSING, SETTLE_S
from regrow.errors import UsageError


def test_a_seed_replays_its_schedule() -> None:
    one, other = (draw_schedule(seed, 3, duration_s=600) for seed in (42, 43))
    assert one == draw_schedule(42, 3, duration_s=600)
    assert one != other
    assert parse_schedule(format_schedule(one), 3) == one
    assert {event.fault for event in one} == {*DRAWN, "mend"}


def test_what_a_seed_draws_is_a_promise() -> None:
    spec = format_schedule(draw_schedule(42, 3, faults=["kill", "stop"], rate_per_min=6))
    assert spec == "stop:1@7.061s,stop:1@23.712s,stop:0@30.964s,kill:2@39.27s"


@given(st.integers(), st.integers(2, 5), st.floats(1, 60))
def test_there_is_always_a_slice_that_has_been_up_for_a_while(
    seed: int, slices: int, rate_per_min: float
) -> None:
    lost_at = dict.fromkeys(range(slices), -SETTLE_S)
    for event in draw_schedule(seed, slices, rate_per_min=rate_per_min, duration_s=120):
        assert event.slice_index < slices
        if event.fault in LOSING:
            assert event.at_s - lost_at[event.slice_index] >= SETTLE_S - 0.01
            lost_at[event.slice_index] = event.at_s
            assert any(event.at_s - at_s >= SETTLE_S - 0.01 for at_s in lost_at.values())


def test_a_single_slice_can_be_lost() -> None:
    assert draw_schedule(1, 1, faults=["kill"], duration_s=600)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slices": 0}, "slices is 0"),
        ({"faults": ["kil"]}, "'kil' is no fault to draw; allowed: kill, term"),
        ({"faults": ["cont"]}, "'cont' is no fault to draw"),
        ({"faults": []}, "there are no faults to draw"),
        ({"rate_per_min": 0}, "both must be more than 0"),
        ({"duration_s": -1}, "both must be more than 0"),
        ({"rate_per_min": float("nan")}, "both must be more than 0"),
        ({"rate_per_min": 1e9}, "are more than 10000"),
    ],
)
def test_what_is_out_of_range(arguments: dict, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        draw_schedule(1, **{"slices": 2} | arguments)
