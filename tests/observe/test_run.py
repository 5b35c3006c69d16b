"""A run as its head sees it: recorded events, and where the time goes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_training import Training, trained

from regrow.observe import LostSteps
from regrow.observe.goodput import (
    DATA,
    INITIALIZATION,
    OTHER,
    PREPARATION,
    PRODUCTIVE,
    REINITIALIZATION,
    RESTART,
    SAVE,
    SCALE_UP,
    SLICE_DOWN,
    STARTUP,
    WASTED,
)


def test_a_run_without_faults() -> None:
    training = trained(10)
    assert training.spent(INITIALIZATION) == pytest.approx(2)
    assert training.spent(PREPARATION) == pytest.approx(1 + 1 + 0.1)
    # The first step counts as part of the start, for it loads the program.
    assert training.spent(STARTUP) == pytest.approx(3 + 1)
    assert training.spent(PRODUCTIVE) == pytest.approx(9)
    assert training.spent(OTHER) == pytest.approx(0.9)
    assert training.run.steps.taken == 10
    training.check()


def test_a_loss_in_a_step_and_what_follows() -> None:
    training = trained(6)
    training.save()
    for step in (6, 7):
        training.step(step)
    before = training.now
    wait, _ = training.begin(8)
    training.lose(wait=wait)
    training.pass_s(1)
    training.load()
    training.compile(0.5)
    training.step(6, slices=(0,))
    [report] = training.reports
    assert (report.kind, report.slices, report.ended) == ("loss", (1,), "recovered")
    assert report.began_s == pytest.approx(before)
    assert report.wall_s == pytest.approx(0.1 + 1 + 2 + 0.5 + 1)
    assert report.parts["drain"] == pytest.approx(0.1)
    assert report.parts["decide"] == pytest.approx(1)
    assert report.parts["load"] == pytest.approx(2)
    assert report.parts["first step"] == pytest.approx(1)
    assert str(report.lost) == "steps 6 to 8"
    assert report.lost_s == pytest.approx(2)
    assert training.spent(WASTED) == pytest.approx(2)
    assert training.spent(SLICE_DOWN) == pytest.approx(1.1)
    assert training.spent(REINITIALIZATION) == pytest.approx(3.5)
    assert training.spent(SAVE) == pytest.approx(0.2)
    assert training.run.steps.lost == 3
    training.check()


def test_what_is_compiled_beside_the_training_is_no_start_of_a_program() -> None:
    training = trained(6)
    run, before = training.run, training.spent(STARTUP)
    compiling = run.begin("compile", training.now, "a program for later")
    training.step(6)
    training.step(7)
    run.end(compiling, training.now)
    training.step(8)
    assert training.spent(STARTUP) == pytest.approx(before, abs=0.2)
    training.compile(0.5)
    assert training.spent(STARTUP) == pytest.approx(before + 0.5, abs=0.2)
    training.check()


def test_an_event_counts_its_programs_by_where_they_come_from() -> None:
    training = trained(6)
    training.run.program_found("compiled")
    training.lose()
    training.load()
    for source in ("compiled", "from disk", "from memory", "from memory"):
        training.run.program_found(source)
    training.step(6, slices=(0,))
    [report] = training.reports
    assert report.programs == {"compiled": 1, "from disk": 1, "from memory": 2}


def test_without_a_word_of_the_client_executions_are_counted() -> None:
    training = trained(6, tells=False)
    training.save()
    for step in (6, 7):
        training.step(step)
    training.lose()
    training.load()
    training.step(6)
    [report] = training.reports
    assert report.lost == LostSteps(7, 8, True, (1,), ("host 0 was ended by SIGKILL",))
    assert training.run.steps.number == 7
    training.check()


def test_a_state_from_elsewhere_tells_nothing_of_lost_steps() -> None:
    training = trained(6, tells=False)
    training.lose()
    training.compile()
    training.step(0)
    [report] = training.reports
    assert report.lost is None
    assert training.spent(WASTED) == 0


def test_silence_is_seen_late_and_counted_from_its_begin() -> None:
    training = trained(4)
    wait, _ = training.begin(4)
    silent_since = training.now
    training.pass_s(5)
    training.lose(since=silent_since, wait=wait)
    training.load()
    training.step(4)
    [report] = training.reports
    assert report.parts["detect"] == pytest.approx(5)
    assert training.spent(SLICE_DOWN) == pytest.approx(5.1)
    training.check()


def test_a_second_loss_during_the_recovery_is_an_event_of_its_own() -> None:
    training = trained(4)
    training.lose(1)
    training.pass_s(1)
    training.load()
    training.lose(2)
    training.pass_s(1)
    training.load()
    training.step(4)
    first, second = training.reports
    assert (first.slices, first.ended) == ((1,), "another loss")
    assert (second.slices, second.ended) == ((2,), "recovered")
    assert second.lost is None
    assert first.began_s + first.wall_s == pytest.approx(second.began_s)
    training.check()


def test_a_step_that_is_begun_again_twice_is_where_it_goes_on() -> None:
    training = trained(4)
    run = training.run
    training.lose(1)
    training.load()
    training.begin(2)
    training.lose(2)
    run.told(2, "load", training.now)
    training.load()
    run.told(2, "step", training.now)  # The phase is over; no step has begun.
    assert run.event is not None
    assert run.event.steps == []
    training.step(2)
    assert [str(report.lost) for report in training.reports] == ["None", "steps 2 to 3"]
    lost = training.reports[-1].lost
    assert lost is not None
    assert lost.slices == (1, 2)  # The first has cost them, not the second alone.
    assert len(lost.causes) == 2
    training.check()


def test_losses_before_anything_is_rebuilt_are_one_event() -> None:
    training = trained(4)
    training.lose(1)
    training.lose(2)
    training.load()
    training.step(4)
    [report] = training.reports
    assert report.slices == (1, 2)


def test_a_slice_that_returns_is_taken_in() -> None:
    training = trained(4)
    training.lose()
    training.load()
    training.step(4, slices=(0,))
    training.run.slice_back(1)
    for step in (5, 6):
        training.step(step, slices=(0,))
    assert len(training.reports) == 1
    training.run.uses((0, 1), training.now, training.now)
    activity = training.run.begin("reshard", training.now)
    training.run.end(activity, training.pass_s(0.5))
    training.step(7)
    report = training.reports[-1]
    assert (report.kind, report.slices, report.ended) == ("scale-up", (1,), "recovered")
    assert report.parts["reshard"] == pytest.approx(0.5)
    assert report.wall_s == pytest.approx(1.5)
    assert training.spent(SCALE_UP) == pytest.approx(1.5)
    assert not training.run.returned
    training.check()


@pytest.mark.parametrize("tells", [True, False])
def test_what_was_lost_once_is_not_lost_again(tells) -> None:
    training = trained(4, tells=tells)
    training.save()
    for step in range(4, 14):
        training.step(step)
    for first in (4, 5):
        training.lose()
        training.load()
        training.step(4)
        training.step(5)
        assert training.reports[-1].lost_s == pytest.approx(10 if first == 4 else 1)
    assert training.run.steps.lost == 12
    training.check()


@pytest.mark.parametrize("tells", [True, False])
def test_a_return_that_goes_back_to_a_snapshot_costs_steps(tells) -> None:
    training = trained(4, tells=tells)
    training.save()
    training.lose()
    training.load()
    training.step(4, slices=(0,))
    training.step(5, slices=(0,))
    training.run.slice_back(1)
    training.run.uses((0, 1), training.now, training.now)
    training.load()
    training.step(4)
    report = training.reports[-1]
    assert (report.kind, report.ended) == ("scale-up", "recovered")
    assert report.lost == LostSteps(4 if tells else 5, 5 if tells else 6, not tells, (1,))
    assert report.lost_s == pytest.approx(1)  # Step 4 belongs to the loss before.
    assert training.run.steps.lost == 2
    training.check()


def test_executions_that_fail_are_lost_steps() -> None:
    training = trained(4)
    training.lose()
    # The client is ahead: what it dispatches fails.
    _, followed = training.begin(4)
    training.run.end(followed, training.now, failed=True)
    training.load()
    training.step(4)
    [report] = training.reports
    assert (report.ended, str(report.lost)) == ("recovered", "step 4")
    assert (training.run.steps.taken, training.run.steps.lost) == (6, 1)


def test_a_client_that_works_in_vain_has_not_recovered() -> None:
    training = trained(6)
    training.lose()
    began = training.now
    for step in range(6, 12):  # It never looks at a result, and goes on with what is lost.
        transfer = training.run.begin("transfer", training.now, slices=(0, 1))
        training.run.end(transfer, training.pass_s(0.1))
        training.run.told(step, "step", training.now)
        training.run.launched(training.program, training.now, step)
        followed = training.run.begin("step", training.now, slices=(0, 1))
        training.run.end(followed, training.now, failed=True)
        training.pass_s(0.1)
    assert not training.reports
    training.run.slice_back(1)
    training.load()
    training.step(6)
    [report] = training.reports
    assert (report.ended, report.wall_s) == ("recovered", pytest.approx(1.2 + 2 + 1))
    assert report.parts["drain"] == pytest.approx(1.1)
    assert report.began_s == pytest.approx(began)
    assert not training.run.returned  # It was taken in with that step.
    assert str(report.lost) == "steps 6 to 11"
    assert (training.run.steps.taken, training.run.steps.lost) == (13, 6)
    training.check()


def test_a_client_that_was_done_has_lost_nothing() -> None:
    training = trained(4)
    training.lose()
    training.run.clients(0, training.pass_s(3))
    assert training.reports == []
    assert training.spent(SLICE_DOWN) == 0
    training.check()


def test_a_client_that_gives_up() -> None:
    training = trained(4)
    wait, _ = training.begin(4)
    training.lose(wait=wait)
    training.run.clients(0, training.pass_s(3))
    assert training.reports[-1].ended == "client gone"
    training.pass_s(10)
    # Nobody knows yet whether another comes.
    assert training.run.status(training.now)["elapsed_s"] == pytest.approx(training.now - 10)
    training.run.clients(1, training.now)
    training.compile(2)
    training.step(0)
    training.step(1)
    assert training.spent(RESTART) == pytest.approx(10 + 2)
    training.check()


def test_a_client_that_is_done_has_not_begun_to_grow() -> None:
    training = trained(4)
    training.lose()
    training.load()
    training.step(4, slices=(0,))
    training.run.slice_back(1)
    training.run.uses((0, 1), training.now, training.now)
    activity = training.run.begin("reshard", training.now)
    training.run.end(activity, training.pass_s(0.5))
    training.run.clients(0, training.pass_s(3))
    assert [report.kind for report in training.reports] == ["loss"]
    assert training.spent(SCALE_UP) == pytest.approx(0.5)
    training.check()


def test_a_loader_that_begins_anew_is_a_part_of_the_load() -> None:
    training = trained(4)
    training.lose()
    training.load()
    loaded = training.run.event.spans(training.now)["load"]
    training.run.told(4, "data", training.now)
    training.run.told(4, "step", training.pass_s(2))
    training.step(4, slices=(0,))
    report = training.reports[-1]
    assert report.parts["load"] == pytest.approx(2 + sum(end - begin for begin, end in loaded))
    training.check()


def test_a_loss_that_interrupts_no_training_is_none_of_one() -> None:
    training = Training()
    training.lose()
    training.run.clients(0, training.pass_s(1))
    assert training.reports == []
    training.check()


def test_a_data_loader_that_is_seen() -> None:
    training = trained(4)
    training.pass_s(3.9)
    training.run.client_in(True, training.now)
    training.pass_s(1)
    training.step(4)
    assert training.spent(DATA) == pytest.approx(0.1 + 3.9 + 1)
    training.check()


ACTIONS = st.lists(
    st.sampled_from(
        ("step", "save", "lose 1", "lose 2", "back 1", "load", "compile", "gone", "come")
    ),
    max_size=30,
)


@given(ACTIONS, st.booleans())
def test_whatever_happens_the_time_adds_up(actions, tells) -> None:
    training = Training(tells=tells)
    step, connected = 0, True
    for action in actions:
        if not connected and action != "come":
            continue
        connected = action != "gone"
        match action.split():
            case ["step"]:
                training.step(step, slices=(0, 1, 2))
                step += 1
            case ["lose", index]:
                training.lose(int(index), since=training.now - 0.3)
                step = max(0, step - 2)
            case ["back", index]:
                training.run.slice_back(int(index))
            case ["gone"]:
                training.run.clients(0, training.pass_s(0.5))
            case ["come"]:
                training.run.clients(1, training.pass_s(0.5))
            case [name]:
                getattr(training, name)()
        training.check()
    ends = [report.began_s + report.wall_s for report in training.reports]
    begins = [report.began_s for report in training.reports]
    # A loss that shows late may have begun before the one before had ended.
    assert all(b >= e - 0.3 - 1e-9 for b, e in zip(begins[1:], ends[:-1], strict=False))
