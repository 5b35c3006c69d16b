"""Elastic events: what the parts are, and that they and the rest are all of the time."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.observe.timeline import PARTS, Activity, ElasticEvent, LostSteps

KINDS = (
    "wait", "compile", "trace", "transfer", "load", "snapshot", "reshard", "run", "step", "decide",
)  # fmt: skip
ACTIVITIES = st.lists(
    st.builds(
        lambda kind, began, took_s, small, failed: Activity(
            kind,
            began,
            small=small,
            failed=failed,
            ended=None if took_s is None else began + took_s,
        ),
        st.sampled_from(KINDS),
        st.floats(0, 60),
        st.none() | st.floats(0, 30),
        st.booleans(),
        st.booleans(),
    ),
    max_size=20,
)


@given(
    st.sampled_from(("loss", "scale-up")),
    ACTIVITIES,
    ACTIVITIES,
    st.floats(0, 30),
    st.floats(0, 10),
    st.floats(0, 40),
)
def test_parts_and_rest_add_up_to_the_wall_time(kind, before, after, began, late, took_s) -> None:
    now = began + late
    under_way = [one for one in before if one.began <= now]
    event = ElasticEvent(kind, 1, "cause", began, now, under_way)
    for activity in sorted(after, key=lambda one: one.began):
        if activity.began >= now:
            event.add(activity)
    report = event.report(1, 0.0, now + took_s, "recovered")
    assert set(report.parts) == set(PARTS)
    assert sum(report.parts.values()) - report.overlap_s + report.rest_s == pytest.approx(
        report.wall_s, abs=1e-6
    )
    assert report.wall_s == pytest.approx(late + took_s)
    assert min(*report.parts.values(), report.overlap_s, report.rest_s) >= -1e-9
    assert max(report.parts.values()) <= report.wall_s + 1e-9
    for spans in report.spans.values():
        assert all(0 <= b <= e <= report.wall_s + 1e-9 for b, e in spans)


def test_each_part_is_measured_by_itself() -> None:
    waiting = Activity("wait", 9.0, ended=11.0, failed=True)
    event = ElasticEvent("loss", 1, "silent", 5.0, 10.0, [waiting])
    for kind, began, ended, small in (
        ("compile", 11.5, 11.8, True),  # of a health check
        ("compile", 13.0, 14.0, False),
        ("trace", 12.5, 13.5, False),
        ("load", 14.0, 15.0, False),
        ("run", 14.5, 15.5, False),
        ("reshard", 15.0, 16.0, False),
        ("step", 17.0, 18.0, False),
    ):
        event.add(Activity(kind, began, ended=ended, small=small))
    report = event.report(3, 1.0, 18.0, "recovered")
    assert report.parts == pytest.approx(
        {
            "detect": 5.0,
            "drain": 1.0,
            "decide": 2.0,
            "load": 1.5,
            "reshard": 1.0,
            "compile": 1.0,
            "first step": 1.0,
        }
    )
    assert report.overlap_s == pytest.approx(0.5)
    assert report.rest_s == pytest.approx(1.0)
    assert (report.number, report.began_s, report.wall_s) == (3, 4.0, 13.0)
    assert report.spans["load"] == [(9.0, 10.5)]


def test_what_the_client_does_between_two_leaves_is_loading() -> None:
    event = ElasticEvent("loss", 1, "SIGKILL", 5.0, 5.0)
    for kind, began, ended in (
        ("load", 6.0, 7.0),
        ("load", 8.0, 9.0),  # the gap before is the load's
        ("compile", 10.0, 11.0),  # this one is in no part
        ("load", 11.0, 12.0),  # and here there is none
        ("reshard", 13.0, 14.0),
        ("load", 15.0, 16.0),
        ("step", 16.0, 17.0),
    ):
        event.add(Activity(kind, began, ended=ended))
    report = event.report(1, 5.0, 17.0, "recovered")
    assert report.spans["load"] == [(1.0, 4.0), (6.0, 7.0), (10.0, 11.0)]
    assert report.rest_s == pytest.approx(3.0)


def test_a_compilation_that_a_loss_finds_under_way() -> None:
    compiling, ahead = Activity("compile", 9.0), Activity("compile", 9.0, beside=True)
    event = ElasticEvent("loss", 1, "SIGKILL", 10.0, 10.0, [compiling, ahead])
    compiling.ended, ahead.ended = 14.0, 19.0
    event.add(Activity("step", 14.0, ended=14.5, failed=True))
    event.add(Activity("load", 15.0, ended=16.0))
    report = event.report(1, 0.0, 20.0, "recovered")
    assert report.spans["drain"] == [(0.0, 4.5)]
    assert report.spans["compile"] == [(0.0, 4.0)]


def test_nothing_is_rebuilt_before_the_client_knows() -> None:
    waiting = Activity("wait", 9.0)
    event = ElasticEvent("loss", 1, "SIGKILL", 10.0, 10.0, [waiting])
    # The client is ahead of what it waits for, and does not know yet.
    event.add(Activity("transfer", 10.1, ended=10.2))
    waiting.ended, waiting.failed = 10.5, True
    event.add(Activity("step", 10.6, ended=10.6, failed=True))
    assert event.rebuilt_since is None
    event.add(Activity("transfer", 12.0, small=True))
    assert event.rebuilt_since is None
    event.add(Activity("transfer", 13.0))
    assert event.rebuilt_since == 13.0


def test_what_ends_it() -> None:
    loss = ElasticEvent("loss", 1, "SIGKILL", 10.0, 10.0)
    assert not loss.is_ended_by(Activity("step", 9.0, ended=11.0))
    assert not loss.is_ended_by(Activity("step", 11.0, ended=11.0, failed=True))
    assert loss.is_ended_by(Activity("step", 11.0, ended=12.0, slices=(0,)))
    scale_up = ElasticEvent("scale-up", 1, "", 10.0, 10.0)
    assert not scale_up.is_ended_by(Activity("step", 11.0, ended=12.0, slices=(0, 2)))
    assert scale_up.is_ended_by(Activity("step", 11.0, ended=12.0, slices=(0, 1, 2)))


def test_a_training_tells_where_it_goes_on() -> None:
    event = ElasticEvent("loss", 1, "SIGKILL", 10.0, 10.0)
    event.told(127, 10.1)  # It does not know of the loss yet.
    assert event.resumed is None
    event.add(Activity("load", 11.0, ended=12.0))
    event.told(121, 13.0)
    assert event.resumed == 121
    assert not event.told_two_steps
    event.told(122, 14.0)
    assert event.told_two_steps
    assert event.resumed == 121


def test_slices_that_are_lost_together_are_one_event() -> None:
    event = ElasticEvent("loss", 1, "SIGKILL", 10.0, 10.0)
    event.join(2, "SIGTERM", 10.2, [])
    event.join(2, "SIGTERM", 10.3, [])
    report = event.report(1, 0.0, 11.0, "")
    assert report.slices == (1, 2)
    assert report.causes == ("SIGKILL", "SIGTERM")
    assert report.parts["detect"] == pytest.approx(0.3)


def test_a_report_as_json_is_all_of_it() -> None:
    event = ElasticEvent("loss", 1, "was ended by SIGKILL", 0.0, 1.0)
    event.add(Activity("load", 1.5, ended=2.0))
    report = event.report(1, 0.0, 3.0, "recovered")
    for one in (report, replace(report, lost=LostSteps(4, 5, False, (1,), ("a cause",)))):
        assert json.dumps(one.to_json()) == json.dumps(asdict(one))
