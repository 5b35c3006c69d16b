"""A wait is told when it is long, and again when it is twice as long."""

from __future__ import annotations

from recorded_training import trained

from regrow.observe.waits import LongWaits


def looked(training, waits: LongWaits, seconds: int) -> list[float]:
    """After how long a wait was told, looking each second."""
    told = []
    for _ in range(seconds):
        found = waits.look(training.pass_s(1))
        if found is not None:
            told.append(round(found.waited_s))
    return told


def test_a_wait_for_a_result() -> None:
    training = trained(40)
    waits = LongWaits(training.run)
    wait, _ = training.begin(40)
    assert looked(training, waits, 36) == [8, 16, 32]  # a step takes 1 s
    training.run.waited(wait, training.now, failed=False, for_all=True)
    training.step(41)
    assert waits.look(training.now) is None


def test_a_client_that_asks_for_nothing() -> None:
    training = trained(40)
    waits = LongWaits(training.run)
    assert looked(training, waits, 12) == [2, 5, 11]
    found = waits.look(training.pass_s(12))
    assert found is not None
    assert found.activity is None


def test_a_snapshot_in_the_background_hides_no_quiet() -> None:
    training = trained(40)
    wait = training.run.begin("snapshot", training.now)
    training.run.waited(wait, training.pass_s(1), failed=False, for_all=False)
    assert looked(training, LongWaits(training.run), 3) == [2]


def test_an_elastic_event_is_told_otherwise() -> None:
    training = trained(40)
    waits = LongWaits(training.run)
    training.lose()
    assert looked(training, waits, 9) == []


def test_a_compilation_beside_the_training_is_no_wait() -> None:
    training = trained(40)
    waits = LongWaits(training.run)
    training.run.begin("compile", training.now, "a program to be compiled")
    for number in range(41, 71):
        training.step(number)
        assert waits.look(training.now) is None
    # The training stands still: now it may be what is waited for.
    assert looked(training, waits, 20)[0] == 8
