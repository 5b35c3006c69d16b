"""When an attempt follows another, and when none does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.elastic.progress import Progress
from regrow.elastic.retry import Backoff, Failure, RetryMachine, budget_of

LOSS = (
    "DATA_LOSS: slice 1 was lost: host 0 (pid {pid}) was ended by {signal} (incarnation "
    "{incarnation}, at 2026-11-30T01:00:0{incarnation}.123Z; last heard 0.1 s before; it returns when asked). Arrays that lived on it are gone."
)
OWN = "INTERNAL: the check at 0x7f{pid} failed"


def failure(text: str, step: int | None = None, snapshot: int | None = None) -> Failure:
    return Failure.of(RuntimeError(text), Progress(step, snapshot))


def loss(signal: str = "SIGKILL", pid: int = 7, incarnation: int = 1) -> str:
    return LOSS.format(signal=signal, pid=pid, incarnation=incarnation)


def refused_at(machine: RetryMachine, failures: list[Failure]) -> int | None:
    """The number of the failure after which no attempt may follow."""
    for number, one in enumerate(failures, 1):
        if machine.failed(one).refusal is not None:
            return number
        machine.next()
    return None


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (loss(), "lost"),
        (loss("SIGTERM"), "lost"),
        (loss("SIGSEGV"), "crashed"),
        ("DATA_LOSS: somebody else's words", "lost"),
        (OWN, "unexplained"),
        ("NOT_FOUND: ", "unexplained"),
    ],
)
def test_kinds(text: str, kind: str) -> None:
    assert failure(text).kind == kind


def test_losses_are_tried_again_for_ever() -> None:
    machine = RetryMachine()
    assert refused_at(machine, [failure(loss(pid=i, incarnation=i), 7) for i in range(200)]) is None
    assert machine.attempt == 201


@pytest.mark.parametrize(("step", "at"), [(7, 2), (None, 3)])
def test_the_same_own_error_at_the_same_place_is_refused(step: int | None, at: int) -> None:
    errors = [failure(OWN.format(pid=i), step) for i in range(9)]
    assert refused_at(RetryMachine(), errors) == at


@pytest.mark.parametrize(("step", "at"), [(7, 3), (None, 6)])
def test_a_step_that_ends_its_slice_each_time_is_refused(step: int | None, at: int) -> None:
    errors = [failure(loss("SIGSEGV", i, i), step) for i in range(9)]
    assert refused_at(RetryMachine(), errors) == at


def test_progress_between_equal_errors_is_no_loop() -> None:
    by_step = [failure(OWN.format(pid=i), step=i) for i in range(50)]
    by_snapshot = [failure(OWN.format(pid=i), snapshot=i) for i in range(50)]
    between = [failure(text, 7) for text in (OWN, loss()) * 20]
    for failures in (by_step, by_snapshot, between):
        assert refused_at(RetryMachine(), failures) is None


def test_a_scale_up_is_no_failure() -> None:
    machine = RetryMachine()
    own, up = failure(OWN, 7), Failure.scale_up(Progress(7, None))
    assert refused_at(machine, [own, up] * 10) is None
    assert machine.failed(up).pause_s == 0


def test_pauses_grow_without_progress_only() -> None:
    machine = RetryMachine(backoff=Backoff(first_s=1, limit_s=5))
    pauses = []
    for step in (1, 1, 1, 1, 1, 2, 3, 3):
        pauses.append(machine.failed(failure(loss(), step)).pause_s)
        machine.next()
    assert pauses == [0, 1, 2, 4, 5, 0, 0, 1]


@given(st.integers(0, 10_000), st.floats(0, 100), st.floats(0, 100))
def test_no_pause_is_longer_than_the_limit(failures: int, first_s: float, limit_s: float) -> None:
    assert 0 <= Backoff(first_s, limit_s).pause_s(failures) <= limit_s


def test_attempt_cause_and_budget_are_told() -> None:
    machine = RetryMachine(budget=3)
    assert machine.name == "attempt 1 of at most 3"
    assert machine.failed(failure(loss(), 120)).text == (
        "attempt 1 of at most 3 ended: slice 1, incarnation 1, was lost: host 0 (pid 7) was ended by "
        "SIGKILL, last heard 0.1 s before (the program was in step 120); 2 attempts are left"
    )
    machine.next()
    text = machine.failed(failure(loss(), 120)).text
    assert "attempt 2 of at most 3" in text
    assert text.endswith("2 in a row without progress; 1 attempt is left")
    assert machine.last is not None
    assert machine.last.startswith("slice 1,")
    machine.next()
    assert machine.failed(failure(loss(), 120)).text.endswith("; 0 attempts are left")


def test_the_budget_of_a_policy() -> None:
    class Limit:
        max_attempts = 4

        def __call__(self, attempt: int, error: Exception) -> bool:
            return attempt < self.max_attempts

    assert budget_of(Limit()) == 4
    assert budget_of(lambda attempt, error: True) is None
    assert budget_of(None) is None
