"""Elastic events and goodput in words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from regrow.observe.timeline import LostSteps

_SIGNAL: Final = re.compile(r"was ended by (SIG\w+)")
_STATUS: Final = re.compile(r"ended with (exit status -?\d+)")
_SHORT: Final = (
    (re.compile(r"has sent no heartbeat"), "silent"),
    (re.compile(r"has had no connection"), "cut off"),
    (re.compile(r"killed on request"), "killed on request"),
)
_LEAST_SHARE: Final = 0.0005


def event_lines(event: Mapping[str, Any]) -> list[str]:
    """An elastic event, as `Report.to_json` gives it: a headline, and a line for each part."""
    wall_s = event["wall_s"]
    share = f" ({event['rest_s'] / wall_s:.1%})" if wall_s else ""
    rows = [*event["parts"].items(), ("in no part", event["rest_s"])]
    lines = [_headline(event)]
    for name, took_s in rows:
        more = {"in no part": share, "compile": _programs(event)}.get(name, "")
        lines.append(f"  {name:<11} {took_s:8.3f} s{more}")
    if event["overlap_s"] > _LEAST_SHARE:
        lines.append(f"  {'overlap':<11} {-event['overlap_s']:8.3f} s (parts at the same time)")
    if event["lost"] is not None:
        lines.append(f"  {_lost(event)}")
    return lines


def _programs(event: Mapping[str, Any]) -> str:
    """How many programs were compiled, and how many were there."""
    counts = event.get("programs") or {}
    told = ", ".join(f"{count} {source}" for source, count in sorted(counts.items()))
    return f" (programs: {told})" if told else ""


def short_cause(cause: str) -> str:
    """Why a slice was lost, in few words."""
    end = _SIGNAL.search(cause) or _STATUS.search(cause)
    if end:
        return end[1]
    return next((short for pattern, short in _SHORT if pattern.search(cause)), cause)


def goodput_lines(status: Mapping[str, Any]) -> list[str]:
    """Where the time of a run went, as `Run.status` gives it."""
    buckets = sorted(status["buckets"].items(), key=lambda pair: -pair[1])
    lost = f", {status['steps_lost']} of them lost" if status["steps_lost"] else ""
    lines = [
        f"goodput {status['goodput']:.1%} of {status['elapsed_s']:.1f} s; "
        f"{status['steps']} executions of {status['program'] or 'no training step'}{lost}"
    ]
    return lines + [f"  {name:<41} {spent:9.2f} s" for name, spent in buckets if spent >= 0.005]


def _headline(event: Mapping[str, Any]) -> str:
    slices, causes = event["slices"], [short_cause(cause) for cause in event["causes"]]
    why = f" ({', '.join(dict.fromkeys(causes))})" if causes else ""
    what = "lost" if event["kind"] == "loss" else "taken in again"
    after = f"{event['wall_s']:.2f} s"
    how = {
        "recovered": f"training goes on after {after}",
        "another loss": f"{after} until another loss",
        "client gone": f"not recovered in {after}, until the client's end",
        "": f"for {after} so far",
    }[event["ended"]]
    return f"elastic event {event['number']}: {_slices(slices)} {what}{why}, {how}"


def _lost(event: Mapping[str, Any]) -> str:
    lost = LostSteps(**event["lost"])
    causes = ", ".join(dict.fromkeys(map(short_cause, lost.causes)))
    to = f"{_slices(lost.slices)}, {causes}" if causes else f"the return of {_slices(lost.slices)}"
    how = " (counted from 1, by executions)" if lost.counted else ""
    return f"{lost}{how} lost to {to}: {event['lost_s']:.2f} s of work"


def _slices(slices: Sequence[int]) -> str:
    names = ", ".join(map(str, slices))
    return f"slice {names}" if len(slices) == 1 else f"slices {names}"
