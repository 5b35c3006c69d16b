"""Elastic events and goodput in words."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from regrow.observe import Activity, ElasticEvent, LostSteps, Run, event_lines, goodput_lines
from regrow.observe.text import short_cause


def test_an_event_is_a_block() -> None:
    cause = "host 0 (pid 7) was ended by SIGKILL"
    event = ElasticEvent(
        "loss", 1, cause, 1.0, 1.0, [Activity("wait", 0.5, ended=1.25, failed=True)]
    )
    event.add(Activity("load", 2.0, ended=3.0))
    event.add(Activity("compile", 2.5, ended=3.0))
    event.programs.update({"from memory": 2, "compiled": 1})
    told = event.report(1, 0.0, 5.0, "recovered").to_json()
    lost = LostSteps(121, 126, False, (1,), (cause,))
    told |= {"lost": asdict(lost), "lost_s": 0.5}
    assert event_lines(told) == [
        "elastic event 1: slice 1 lost (SIGKILL), training goes on after 4.00 s",
        "  detect         0.000 s",
        "  drain          0.250 s",
        "  decide         0.750 s",
        "  load           1.000 s",
        "  reshard        0.000 s",
        "  compile        0.500 s (programs: 1 compiled, 2 from memory)",
        "  first step     0.000 s",
        "  in no part     2.000 s (50.0%)",
        "  overlap       -0.500 s (parts at the same time)",
        "  steps 121 to 126 lost to slice 1, SIGKILL: 0.50 s of work",
    ]


@pytest.mark.parametrize(
    ("ended", "text"),
    [
        ("another loss", "1.00 s until another loss"),
        ("client gone", "not recovered in 1.00 s, until the client's end"),
        ("", "for 1.00 s so far"),
    ],
)
def test_how_it_ended(ended, text) -> None:
    told = ElasticEvent("scale-up", 2, "", 0.0, 0.0).report(4, 0.0, 1.0, ended).to_json()
    assert event_lines(told)[0] == f"elastic event 4: slice 2 taken in again, {text}"


@pytest.mark.parametrize(
    ("cause", "short"),
    [
        ("host 0 (pid 3) was ended by SIGSEGV", "SIGSEGV"),
        ("host 0 (pid 3) has sent no heartbeat for 5 s", "silent"),
        ("host 0 (pid 3) has had no connection for 3 s", "cut off"),
        ("killed on request", "killed on request"),
        ("host 0 (pid 3) ended with exit status 1", "exit status 1"),
        ("links of slice 0 were cut", "links of slice 0 were cut"),
    ],
)
def test_causes_in_few_words(cause, short) -> None:
    assert short_cause(cause) == short


def test_steps_in_words() -> None:
    assert str(LostSteps(3, 3, False)) == "step 3"
    assert str(LostSteps(3, 5, True)) == "steps 3 to 5"


@pytest.mark.parametrize(
    ("lost", "text"),
    [
        (
            LostSteps(3, 5, True, (1,), ("host 0 (pid 3) was ended by SIGKILL",)),
            "steps 3 to 5 (counted from 1, by executions) lost to slice 1, SIGKILL",
        ),
        (
            LostSteps(3, 5, False, (1, 2), ("host 0 was ended by SIGKILL", "killed on request")),
            "steps 3 to 5 lost to slices 1, 2, SIGKILL, killed on request",
        ),
        (LostSteps(4, 4, False, (2,)), "step 4 lost to the return of slice 2"),
    ],
)
def test_to_what_steps_are_lost(lost, text) -> None:
    told = ElasticEvent("scale-up", 2, "", 0.0, 0.0).report(4, 0.0, 1.0, "recovered").to_json()
    told |= {"lost": asdict(lost), "lost_s": 0.25}
    assert event_lines(told)[-1] == f"  {text}: 0.25 s of work"


def test_goodput_in_words() -> None:
    lines = goodput_lines(Run(0.0).status(4.0))
    assert lines[0] == "goodput 0.0% of 4.0 s; 0 executions of no training step"
    assert lines[1:] == [f"  {'TPU_INITIALIZATION':<41}      4.00 s"]
