"""The place of the latest snapshot."""

from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from regrow.elastic.snapshot_slot import SnapshotSlot, Ticket


class Slot(RuleBasedStateMachine):
    """Every order of calls, against the simplest account of them."""

    def __init__(self) -> None:
        super().__init__()
        self.slot: SnapshotSlot[str] = SnapshotSlot()
        self.ticket: Ticket | None = None
        self.latest: tuple[int, str] | None = None
        self.overtaken = False

    @rule(step=st.integers(0, 9))
    def begin(self, step: int) -> None:
        ticket = self.slot.begin(step)
        assert (ticket is None) == (self.ticket is not None)
        if ticket is not None:
            self.ticket, self.overtaken = ticket, False

    @precondition(lambda self: self.ticket is not None)
    @rule(text=st.text(max_size=3))
    def commit(self, text: str) -> None:
        assert self.ticket is not None
        taken = self.slot.commit(self.ticket, text)
        assert taken == (not self.overtaken)
        if taken:
            self.latest = (self.ticket.step, text)
        self.ticket = None

    @precondition(lambda self: self.ticket is not None)
    @rule()
    def give_up(self) -> None:
        assert self.ticket is not None
        self.slot.give_up(self.ticket)
        self.ticket = None

    @rule(step=st.integers(0, 9))
    def replace(self, step: int) -> None:
        self.slot.replace(step, "loaded")
        self.latest, self.overtaken = (step, "loaded"), True

    @invariant()
    def agrees(self) -> None:
        assert self.slot.latest == self.latest
        assert self.slot.making == (None if self.ticket is None else self.ticket.step)
        assert self.slot.wait(0) == (self.ticket is None)


TestSlot = Slot.TestCase
TestSlot.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_a_ticket_is_good_for_once() -> None:
    slot: SnapshotSlot[str] = SnapshotSlot()
    ticket = slot.begin(1)
    assert ticket is not None
    slot.give_up(ticket)
    with pytest.raises(AssertionError, match="step 1 has ended already"):
        slot.commit(ticket, "late")


def test_a_wait_ends_with_the_snapshot() -> None:
    slot: SnapshotSlot[str] = SnapshotSlot()
    ticket = slot.begin(1)
    assert ticket is not None
    assert not slot.wait(0.01)
    timer = threading.Timer(0.05, slot.commit, (ticket, "x"))
    timer.start()
    assert slot.wait(30)
    timer.join()
