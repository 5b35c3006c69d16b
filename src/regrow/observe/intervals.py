"""Unions of intervals of time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

Interval: TypeAlias = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as disjoint intervals, in order; empty ones are left out."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def clipped(intervals: Iterable[Interval], begin: float, end: float) -> list[Interval]:
    """What lies between two moments of each interval."""
    return [(max(b, begin), min(e, end)) for b, e in intervals if e > begin and b < end]


def total_s(intervals: Iterable[Interval]) -> float:
    """The length of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)
