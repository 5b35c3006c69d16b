"""The language of `--chaos`."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.chaos import (
    FAULTS,
    PHASES,
    Anchor,
    AtStep,
    FaultEvent,
    InPhase,
    InRecovery,
    format_schedule,
    parse_schedule,
)
from regrow.chaos.schedule import in_order
from regrow.errors import UsageError


def test_the_example_of_the_documentation() -> None:
    assert parse_schedule("kill:1@5s,restore:1@9.5s,stop:0@3s,cont:0@6s", slices=2) == (
        FaultEvent("stop", 0, 3.0),
        FaultEvent("kill", 1, 5.0),
        FaultEvent("cont", 0, 6.0),
        FaultEvent("restore", 1, 9.5),
    )


@pytest.mark.parametrize(
    ("when", "at_s"),
    [("0s", 0), ("5s", 5), ("5.s", 5), (".5s", 0.5), ("600ms", 0.6), ("1.5ms", 0.0015)],
)
def test_times(when: str, at_s: float) -> None:
    (event,) = parse_schedule(f"kill:0@{when}")
    assert event.at_s == pytest.approx(at_s)


@pytest.mark.parametrize(
    ("when", "anchor", "at_s"),
    [
        ("step=120", AtStep(120), 0),
        ("step=0+1s", AtStep(0), 1),
        ("phase=load", InPhase("load"), 0),
        ("phase=collective+20ms", InPhase("collective"), 0.02),
        ("phase=scale-up", InPhase("scale-up"), 0),
        ("recovery=1", InRecovery(1), 0),
        (" recovery = 2 + .5s ", InRecovery(2), 0.5),
    ],
)
def test_anchors(when: str, anchor: Anchor, at_s: float) -> None:
    assert parse_schedule(f"kill:0@{when}") == (FaultEvent("kill", 0, at_s, anchor),)


def test_what_has_an_anchor_keeps_its_place_behind_what_has_none() -> None:
    spec = "kill:0@phase=load+1s,stop:1@step=3,cont:1@2s,kill:2@1s"
    ordered = "kill:2@1.0s,cont:1@2.0s,kill:0@phase=load+1.0s,stop:1@step=3"
    assert format_schedule(parse_schedule(spec)) == ordered


def test_spaces_are_allowed_and_equal_times_keep_their_order() -> None:
    events = parse_schedule(" stop : 2 @ 1s , kill:0@1000ms,\tcont:1@1s")
    assert [event.fault for event in events] == ["stop", "kill", "cont"]


def test_further_faults_can_be_allowed() -> None:
    assert parse_schedule("cut:0@1s", faults=[*FAULTS, "cut"]) == (FaultEvent("cut", 0, 1.0),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the chaos schedule is empty; write FAULT:SLICE@WHEN, such as kill:1@5s"),
        ("  ", "the chaos schedule is empty"),
        ("kill:1@5s,", "chaos entry 2 ('', column 11) is empty; write FAULT:SLICE@WHEN"),
        ("kill", "chaos entry 1 ('kill', column 1) is not of the form FAULT:SLICE@WHEN"),
        ("kill:1", "is not of the form FAULT:SLICE@WHEN; write"),
        ("kill@1:5s", "is not of the form FAULT:SLICE@WHEN"),
        ("kill:1@5s stop:0@3s", "is not of the form FAULT:SLICE@WHEN"),
        (
            "kill:1@5s, kil:1@6s",
            "chaos entry 2 ('kil:1@6s', column 12): no fault 'kil'; "
            f"allowed: {', '.join(FAULTS)}; did you mean 'kill'?",
        ),
        ("KILL:1@5s", "no fault 'KILL'; allowed: kill, term, "),
        (":1@5s", "no fault ''; allowed"),
        ("kill:x@5s", "'x' is no slice; allowed: 0 to 2"),
        ("kill:@5s", "'' is no slice; allowed: 0 to 2"),
        ("kill:-1@5s", "'-1' is no slice; allowed: 0 to 2"),
        ("kill:\u0661@5s", "is no slice; allowed: 0 to 2"),
        ("kill:3@5s", "chaos entry 1 ('kill:3@5s', column 1): there is no slice 3; allowed: 0 to"),
        ("kill:1@", "'' is no time; allowed: a number with s or ms, such as 5s"),
        ("kill:1@soon", "'soon' is no time"),
        ("kill:1@-5s", "'-5s' is no time"),
        ("kill:1@1e3s", "'1e3s' is no time"),
        ("kill:1@nans", "'nans' is no time"),
        ("kill:1@5", "'5' has no unit; allowed: a number with s or ms"),
        ("kill:1@5h", "'h' is no unit; allowed: a number with s or ms"),
        ("kill:1@phase=laod", "no phase 'laod'; allowed: compile, transfer, "),
        ("kill:1@phase=laod", "; did you mean 'load'?"),
        ("kill:1@phase=", "no phase ''; allowed"),
        ("kill:1@phase=load+", "'' is no time; allowed: a number with s or ms"),
        ("kill:1@phase=load+20", "'20' has no unit"),
        ("kill:1@phase=load+1s+1s", "'phase=load+1s+1s' is no time; allowed: "),
        ("kill:1@phase=load=1", "'phase=load=1' is no time; allowed: "),
        ("kill:1@phas=load", "'phas=load' is no time; allowed: a number with s or ms"),
        ("kill:1@phas=load", "; did you mean 'phase'?"),
        ("kill:1@step=x", "'x' is no step; allowed: a number from 0 on"),
        ("kill:1@step=-1", "'-1' is no step"),
        ("kill:1@step=" + "9" * 400, "is no step; allowed: a number from 0 on"),
        ("kill:1@step=3+soon", "'soon' is no time"),
        ("kill:1@recovery=0", "'0' is no recovery; allowed: a number from 1 on"),
        ("kill:1@1s+1s", "'1s+1s' is no time"),
        ("kill:1@" + "9" * 400 + "s", "is too far away; allowed: up to 2592000 s"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_schedule(text, slices=3)


def test_one_slice_is_called_one() -> None:
    with pytest.raises(UsageError, match=re.escape("allowed: 0 (there is one slice)")):
        parse_schedule("kill:1@1s", slices=1)


EVENTS = st.builds(
    FaultEvent,
    st.sampled_from(sorted(FAULTS)),
    st.integers(0, 999),
    st.integers(0, 10_000_000).map(lambda number: number / 1000),
    st.one_of(
        st.none(),
        st.builds(AtStep, st.integers(0, 10**12)),
        st.builds(InPhase, st.sampled_from(sorted(PHASES))),
        st.builds(InRecovery, st.integers(1, 10**12)),
    ),
)


@given(st.lists(EVENTS, min_size=1))
def test_a_schedule_survives_its_text(events: list[FaultEvent]) -> None:
    assert parse_schedule(format_schedule(events)) == in_order(events)


@given(st.text(alphabet="kilstopcnhaer:@,.0159ms -=+", max_size=40))
def test_any_text_is_a_schedule_or_a_usage_error(text: str) -> None:
    try:
        events = parse_schedule(text, slices=3)
    except UsageError:
        return
    assert all(event.slice_index < 3 for event in events)
