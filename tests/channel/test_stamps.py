"""Steps that executions carry are told from ids of streams that nobody has set."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.channel.stamps import is_expected, stamp_of, step_of


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_a_step_travels_in_the_id_of_a_stream(step: int, expected: bool) -> None:
    stamp = stamp_of(step, expected=expected)
    assert 0 < stamp < 2**63
    assert (step_of(stamp), is_expected(stamp)) == (step, expected)


@pytest.mark.parametrize("stamp", [0, 1, -1, -1964051309863927391, 2**62, 1 << 32])
def test_what_jax_sets_by_itself_is_no_step(stamp: int) -> None:
    assert step_of(stamp) is None
    assert not is_expected(stamp)


@pytest.mark.parametrize("step", [-1, 2**32])
def test_what_is_no_step_is_not_carried(step: int) -> None:
    assert step_of(stamp_of(step)) is None
