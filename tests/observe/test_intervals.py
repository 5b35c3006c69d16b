"""Unions of intervals are the same moments, counted once."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from regrow.observe.intervals import clipped, total_s, union

INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def moments(intervals) -> set[int]:
    return {moment for begin, end in intervals for moment in range(begin, end)}


@given(INTERVALS)
def test_union(intervals) -> None:
    joined = union(intervals)
    assert moments(joined) == moments(intervals)
    assert total_s(joined) == len(moments(intervals))
    assert all(one[1] < other[0] for one, other in itertools.pairwise(joined))


@given(INTERVALS, st.integers(0, 40), st.integers(0, 40))
def test_clipped(intervals, begin, end) -> None:
    assert moments(clipped(intervals, begin, end)) == moments(intervals) & set(range(begin, end))
