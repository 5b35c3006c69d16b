"""When faults are due."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from regrow.chaos.schedule import FaultEvent, parse_schedule
from regrow.chaos.triggers import Triggers


def names(events: list[FaultEvent]) -> list[str]:
    return [str(event) for event in events]


def triggers(spec: str) -> Triggers:
    return Triggers(parse_schedule(spec))


def test_times_count_from_the_first_client() -> None:
    one = triggers("kill:1@5s,stop:0@3s")
    assert one.next_at is None
    one.connected(100.0)
    one.connected(200.0)
    assert one.next_at == 103.0
    assert names(one.due(102.9)) == []
    assert names(one.due(104.0)) == ["stop:0@3.0s"]
    assert one.next_at == 105.0
    assert names(one.due(1000.0)) == ["kill:1@5.0s"]
    assert one.next_at is None
    assert not one.left


def test_a_step_counts_once_it_is_reached_or_passed() -> None:
    one = triggers("kill:1@step=3,kill:0@step=5+1s")
    one.step(2, 1.0)
    assert one.next_at is None
    one.step(7, 2.0)
    assert names(one.due(2.0)) == ["kill:1@step=3"]
    # A program that goes back does not begin the step for the first time.
    one.step(5, 2.5)
    assert one.next_at == 3.0
    assert names(one.due(3.0)) == ["kill:0@step=5+1.0s"]


def test_a_phase_counts_the_first_time_and_for_its_slice() -> None:
    one = triggers("kill:1@phase=collective+20ms,kill:2@phase=collective,stop:0@phase=load")
    assert names(list(one.awaited)) == names(list(one.left))
    one.phase("transfer", None, 0.0)
    one.phase("collective", 1, 1.0)
    one.phase("collective", 1, 2.0)
    assert one.next_at == 1.02
    one.phase("collective", 2, 1.5)
    assert names(one.due(1.6)) == ["kill:1@phase=collective+0.02s", "kill:2@phase=collective"]
    one.phase("load", None, 3.0)
    assert names(one.due(3.0)) == ["stop:0@phase=load"]


def test_recoveries_are_counted() -> None:
    one = triggers("kill:2@recovery=2,kill:1@recovery=1+50ms")
    assert not one.awaited
    one.lost(1.0)
    assert names(one.due(2.0)) == ["kill:1@recovery=1+0.05s"]
    one.lost(2.0)
    assert names(one.due(2.0)) == ["kill:2@recovery=2"]


def test_what_is_left_is_told() -> None:
    one = triggers("kill:1@5s,stop:0@phase=load,cont:0@1s")
    one.connected(0.0)
    one.due(2.0)
    assert names(list(one.left)) == ["kill:1@5.0s", "stop:0@phase=load"]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=20), st.integers(1, 7))
def test_every_fault_is_due_once_and_in_order(times: list[int], stride: int) -> None:
    events = [FaultEvent("kill", number, float(at)) for number, at in enumerate(times)]
    one = Triggers(events)
    one.connected(0.0)
    due = [event for now in range(0, 21 + stride, stride) for event in one.due(float(now))]
    assert due == sorted(events, key=lambda event: event.at_s)
