"""Which snapshots of clusters that are gone stay."""

from __future__ import annotations

import pytest

from regrow.errors import UsageError
from regrow.suspend.retention import Retention, retention_from

DAY_S = 86400.0
NOW = 100 * DAY_S


def made(**ages: float) -> dict[str, float]:
    """Folders by their age in days."""
    return {name.replace("_", "-"): NOW - days * DAY_S for name, days in ages.items()}


def test_the_young_stay_however_many_they_are() -> None:
    young = {f"run-1-{number:08x}": NOW - number * 1000 for number in range(50)}
    assert Retention().expired(young, NOW) == ()


def test_the_latest_of_each_name_stay_however_old_they_are() -> None:
    found = made(a_1=31, a_2=32, a_3=33, a_4=34, b_1=99)
    assert Retention().expired(found, NOW) == ("a-4",)
    assert Retention(latest=1).expired(found, NOW) == ("a-2", "a-3", "a-4")
    assert Retention(latest=0).expired(found, NOW) == ("a-1", "a-2", "a-3", "a-4", "b-1")


def test_the_young_count_among_the_latest() -> None:
    found = made(a_1=1, a_2=2, a_3=3, a_4=31)
    assert Retention().expired(found, NOW) == ("a-4",)


def test_never_is_never() -> None:
    assert Retention(days=None, latest=0).expired(made(a_1=99), NOW) == ()


def test_a_clock_that_was_wrong_removes_nothing() -> None:
    assert Retention(latest=0).expired(made(a_1=-400), NOW) == ()


@pytest.mark.parametrize(
    ("text", "days"), [("", 30.0), (" ", 30.0), ("never", None), ("0", 0.0), ("1.5", 1.5)]
)
def test_the_variable_tells_the_days(text: str, days: float | None) -> None:
    assert retention_from({"REGROW_SNAPSHOT_DAYS": text}) == Retention(days)


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_what_is_no_number_of_days_is_told(text: str) -> None:
    with pytest.raises(UsageError, match=f"^REGROW_SNAPSHOT_DAYS: '{text}' is no number of days"):
        retention_from({"REGROW_SNAPSHOT_DAYS": text})
