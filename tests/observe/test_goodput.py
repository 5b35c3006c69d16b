"""Each moment of a run is in exactly one bucket."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.observe.goodput import BUCKETS, OTHER, PRODUCTIVE, SLICE_DOWN, WASTED, Ledger

STEPS = st.lists(
    st.tuples(
        st.floats(0, 10),  # how long after the step before
        st.sampled_from(("switch", "since", "move")),
        st.sampled_from(BUCKETS),
        st.floats(0, 20),  # how far back, or how much
    ),
    max_size=60,
)


@given(STEPS)
def test_the_buckets_add_up_to_the_wall_time(steps) -> None:
    now = 100.0
    ledger = Ledger(OTHER, now)
    for after_s, what, bucket, amount in steps:
        now += after_s
        match what:
            case "switch":
                ledger.switch(bucket, now)
            case "since":
                ledger.switch_since(bucket, now - amount, now)
            case "move":
                ledger.move(bucket, WASTED, amount)
        totals = ledger.totals(now)
        assert sum(totals.values()) == pytest.approx(ledger.elapsed(now), abs=1e-6)
        assert min(totals.values()) >= -1e-6


def test_time_that_proves_to_be_something_else() -> None:
    ledger = Ledger(OTHER, 0.0)
    ledger.switch(PRODUCTIVE, 1.0)
    ledger.switch(OTHER, 3.0)
    ledger.switch(PRODUCTIVE, 4.0)
    ledger.switch_since(SLICE_DOWN, 2.0, 6.0)
    assert ledger.spent(PRODUCTIVE, 7.0) == 1.0
    assert ledger.spent(OTHER, 7.0) == 1.0
    assert ledger.spent(SLICE_DOWN, 7.0) == 5.0
    ledger.switch_since(OTHER, 2.0, 7.0)
    ledger.switch_since(OTHER, 2.0, 7.0)
    assert ledger.spent(SLICE_DOWN, 7.0) == pytest.approx(0.0)
    assert ledger.spent(OTHER, 7.0) == pytest.approx(6.0)


def test_no_more_is_moved_than_there_is() -> None:
    ledger = Ledger(PRODUCTIVE, 0.0)
    ledger.switch(OTHER, 2.0)
    ledger.move(PRODUCTIVE, WASTED, 5.0)
    assert ledger.spent(PRODUCTIVE, 3.0) == 0.0
    assert ledger.spent(WASTED, 3.0) == 2.0
