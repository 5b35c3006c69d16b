"""Whether a job can be suspended; and the gate that its clients wait at."""

from __future__ import annotations

import pytest

from regrow.errors import StorageError, UsageError
from regrow.head.gate import Gate
from regrow.suspend import points
from regrow.suspend.judge import Facts, objection

GOOD = {"stateful": (), "unsaved": (), "nbytes": 10**9, "speed": 100e6, "grace_s": 30.0}


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({}, None),
        ({"grace_s": None, "speed": 1.0}, None),
        ({"speed": None}, None),
        (
            {"stateful": ["f", "g"]},
            "the job uses colocated Python (f, g), whose state cannot be saved",
        ),
        ({"unsaved": ["a token"]}, "the job holds a token, which cannot be saved"),
        (
            {"speed": 30e6},
            "1000 MB at 30 MB/s take 33.8 s, which do not fit well into 30 s of grace",
        ),
    ],
)
def test_the_reasons_not_to(facts: dict[str, object], why: str | None) -> None:
    assert objection(Facts(**GOOD | facts)) == why


def test_a_gate_lets_everyone_go_on_once() -> None:
    gate, told = Gate(), []
    gate.close()
    gate.park("a", lambda: told.append("a"))
    gate.park("a", lambda: told.append("a again"))
    gate.park("b", lambda: told.append("b"))
    gate.forget("b")
    assert (gate.closed, gate.waiting) == (True, 1)
    gate.open()
    gate.open()
    assert (gate.closed, gate.waiting, told) == (False, 0, ["a again"])


def test_who_closes_the_gate_from_within_is_heard() -> None:
    gate, told = Gate(), []

    def go_on() -> None:
        told.append(gate.closed)
        gate.close()
        gate.park("a", go_on)

    gate.close()
    gate.park("a", go_on)
    gate.open()
    assert (told, gate.closed, gate.waiting) == ([False], True, 1)


def test_a_trap_is_sprung_once_at_its_turn() -> None:
    points.set_trap_from("aside=fail=2")
    points.reach("aside")
    points.reach("worker-drain")
    with pytest.raises(StorageError, match="on purpose"):
        points.reach("aside")
    points.reach("aside")
    for wrong in ("nowhere", "aside=burn"):
        with pytest.raises(UsageError, match="there is no point"):
            points.set_trap_from(wrong)
