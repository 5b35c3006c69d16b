"""What may be on a slice, and when it is idle."""

from __future__ import annotations

import pytest

from regrow.errors import UsageError
from regrow.jobs.places import Place


def test_a_slice_is_idle_when_nothing_up_to_the_fence_is_left() -> None:
    place = Place(0)
    old, young = place.begin(1), place.begin(2)
    assert place.running == (1, 2)
    assert place.take_idle() is None
    assert place.fence(1) == [old]
    assert place.take_idle() is None
    place.ended(old)
    # It is told once for each fence, and what was leased since does not matter.
    assert place.take_idle() == 1
    assert place.take_idle() is None
    assert place.running == (2,)
    assert not place.is_fenced(young)


def test_nothing_fenced_is_started_and_what_is_being_started_counts() -> None:
    place = Place(3)
    starting = place.begin(5)
    assert place.fence(5) == [starting]
    assert place.is_fenced(starting)
    with pytest.raises(UsageError, match="incarnation 5 of slice 3 is over"):
        place.begin(5)
    assert place.take_idle() is None
    place.ended(starting)
    assert place.take_idle() == 5
    place.begin(6)


def test_an_older_fence_takes_nothing_back() -> None:
    place = Place(0)
    assert place.fence(4) == []
    assert place.fence(2) == []
    assert place.take_idle() == 4
    with pytest.raises(UsageError):
        place.begin(3)
