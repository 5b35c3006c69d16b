from __future__ import annotations

import re
import sys
import time

import pytest

from regrow.cli.report import EventReporter, count, healthy_line, say, since_start_s
from regrow.cli.status import duration
from regrow.config import HeadConfig
from regrow.head.control import make_event


@pytest.fixture
def lines(capsys):
    def take() -> list[str]:
        captured = capsys.readouterr()
        assert captured.out == ""
        # The times at the beginning are not the same each time.
        return [re.sub(r"\[\d+\.\d\d s\]", "[T]", line) for line in captured.err.splitlines()]

    return take


def test_a_line_for_what_happens_to_a_slice(lines):
    reporter = EventReporter()
    lost = make_event("slice_lost", slice_index=1, incarnation=1, text="SIGKILL of host 0")
    reporter.report(lost)
    back = make_event("slice_up", slice_index=1, incarnation=2)
    back["at"] = lost["at"] + 1.25
    reporter.report(back)
    reporter.report(make_event("slice_up", slice_index=0, incarnation=3))
    reporter.report(make_event("job_ends", text="slice 1 was lost"))
    assert lines() == [
        "regrow: [T] slice 1 is lost: SIGKILL of host 0",
        "regrow: [T] slice 1 is back after 1.25 s (incarnation 2)",
        "regrow: [T] slice 0 is back (incarnation 3)",
        "regrow: [T] the job ends: slice 1 was lost",
    ]


def test_the_text_of_a_loss_is_not_told_twice(lines):
    text = (
        "slice 1 was lost: host 0 (pid 7) was ended by SIGKILL (incarnation 1, at T; it is started "
        "again 1 s later). Arrays that lived on it are gone; new arrays work when it has returned."
    )
    EventReporter().report(make_event("slice_lost", slice_index=1, incarnation=1, text=text))
    assert lines() == [
        "regrow: [T] slice 1 is lost: host 0 (pid 7) was ended by SIGKILL "
        "(incarnation 1, at T; it is started again 1 s later)"
    ]


@pytest.mark.parametrize("verbose", [False, True])
def test_clients_are_told_only_when_asked_for(lines, verbose):
    reporter = EventReporter(verbose=verbose)
    reporter.report(make_event("client_connected"))
    reporter.report(make_event("client_gone"))
    told = ["regrow: [T] a client has connected", "regrow: [T] a client is gone"]
    assert lines() == (told if verbose else [])


def test_an_event_of_a_later_version_is_let_pass(lines):
    EventReporter().report(make_event("something_new"))
    assert lines() == []


def test_without_a_standard_error_nothing_is_said(lines, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    say("standard output belongs to the script")
    assert lines() == []


def test_the_line_of_a_healthy_cluster():
    places = {"name": "one", "run_id": "x", "home": "/h", "dir": "/h/d", "socket_dir": "/h/d"}
    one = HeadConfig(**places, slices=1, devices_per_slice=4, hosts_per_slice=2)
    line = healthy_line(one)
    assert re.fullmatch(r"1 slice of 4 devices on 2 hosts up in \d+\.\d s \(cluster one\)", line)
    assert "3 slices of 1 device up" in healthy_line(
        HeadConfig(**places, slices=3, devices_per_slice=1)
    )


def test_the_age_of_this_process():
    first = since_start_s()
    time.sleep(0.05)
    assert 0.04 < since_start_s() - first < 5


def test_counts_and_durations():
    assert [count(number, "slice") for number in (0, 1, 2)] == ["0 slices", "1 slice", "2 slices"]
    assert [duration(s) for s in (0.04, 9.94, 60, 600, 36000)] == [
        "0.0 s",
        "9.9 s",
        "60 s",
        "10 min",
        "10 h",
    ]
