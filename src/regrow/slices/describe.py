"""Slices in words, for errors, and in JSON values, for `regrow status`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TypedDict

from regrow.slices.machine import SliceMachine
from regrow.slices.model import (
    HELD,
    LIVE,
    ContRequested,
    HostState,
    KillRequested,
    Loss,
    Policy,
    Request,
    RestoreRequested,
    ResumeRequested,
    SliceState,
    StopRequested,
)
from regrow.slices.story import StoryEntry, seconds


class HostStatus(TypedDict):
    """A host for `regrow status --json`."""

    index: int
    state: HostState
    pid: int | None
    heard_ago_s: float | None


class SliceStatus(TypedDict):
    """A slice for `regrow status --json`."""

    index: int
    state: SliceState
    incarnation: int
    hosts: list[HostStatus]
    losses: int
    start_failures: int
    restore_in_s: float | None
    story: list[StoryEntry]


class Status(TypedDict):
    """The membership for `regrow status --json`."""

    slices: list[SliceStatus]
    live: list[int]
    gone: int
    num_elastic_instances: int | None
    ended: str | None


def loss_text(machine: SliceMachine, incarnation: int, utc_s: float) -> str:
    """The loss of an incarnation in one line that goes after "slice N ".

    It is kept, and read at any time: nothing in it may become untrue.

    Args:
        machine: The slice.
        incarnation: One that is lost.
        utc_s: The time of day at which it was lost, in seconds since 1970.
    """
    loss = machine.losses[incarnation]
    what = "was lost" if loss.was_up else "did not start"
    when = datetime.fromtimestamp(utc_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3]
    head = f"{what}: {loss.cause} (incarnation {incarnation}, at {when}Z; "
    # Only the cause is foreign text, and it was cleaned and cut when it came in.
    return (
        f"{head}{_facts(loss)}{_return(machine, loss)}). "
        "Arrays that lived on it are gone; new arrays work when it has returned."
    )


def _facts(loss: Loss) -> str:
    """What `regrow.explain` reads out of the text, beside the cause."""
    facts = []
    if loss.heard_at is not None:
        facts.append(f"last heard {seconds(loss.at - loss.heard_at)} before")
    if loss.during is not None and loss.during.step is not None:
        facts.append(f"in step {loss.during.step}")
    if loss.during is not None and loss.during.phase is not None:
        facts.append(f"phase {loss.during.phase}")
    return f"{', '.join(facts)}; " if facts else ""


def _return(machine: SliceMachine, loss: Loss) -> str:
    if not machine.may_start:
        return "the job has ended"
    if loss.restore_after_s is None and machine.leased:
        return "it returns when there is a slice to take its place"
    if loss.restore_after_s is None:
        return "it returns when asked"
    return f"it is started again {seconds(loss.restore_after_s)} later"


def refusal_text(machine: SliceMachine, request: Request, ended: str | None) -> str | None:
    """Why a request would do nothing; None: it works."""
    name = f"slice {machine.index}"
    is_now = f"{name} is {machine.state} (incarnation {machine.incarnation})"
    if machine.state == "stopping":
        return f"{name} is shut down with its cluster"
    match request:
        case ResumeRequested() if ended is not None:
            return f"{name} is not resumed, the job has ended: {ended}"
        case ResumeRequested() if machine.state != "suspended":
            return f"{is_now}; there is nothing to resume"
        case RestoreRequested() if machine.state == "suspended":
            return f"{is_now} and not lost; resume brings it back"
        case RestoreRequested() if ended is not None:
            return f"{name} is not restored, the job has ended: {ended}"
        case RestoreRequested() if machine.state in HELD:
            return f"{is_now}; there is nothing to restore"
        case ContRequested() if machine.state == "up" and not machine.stopped:
            return f"{is_now} and was not stopped; there is nothing to continue"
        case StopRequested() if machine.state in HELD and machine.stopped:
            return f"{is_now} and stopped already; cont lets it go on"
        case ContRequested() if machine.state == "lost":
            return f"{is_now} and fenced; cont does not revive it, restore starts a new incarnation"
        case KillRequested() | StopRequested() | ContRequested() if machine.state not in HELD:
            return f"{is_now}; it has no processes"
    return None


def status_of(
    machines: Sequence[SliceMachine], policy: Policy, ended: str | None, now: float
) -> Status:
    """All slices as JSON values."""
    return {
        "slices": [_slice_status(machine, now) for machine in machines],
        "live": [machine.index for machine in machines if machine.state in LIVE],
        "gone": sum(machine.gone for machine in machines),
        "num_elastic_instances": policy.num_elastic_instances,
        "ended": ended,
    }


def _slice_status(machine: SliceMachine, now: float) -> SliceStatus:
    at = machine.restore_at
    return {
        "index": machine.index,
        "state": machine.state,
        "incarnation": machine.incarnation,
        "hosts": [
            {
                "index": host.index,
                "state": host.state,
                "pid": host.pid,
                "heard_ago_s": _ago(host.heard_at, now),
            }
            for host in machine.info().hosts
        ],
        "losses": sum(loss.was_up for loss in machine.losses.values()),
        "start_failures": machine.start_failures,
        "restore_in_s": None if at is None else round(max(at - now, 0.0), 3),
        "story": machine.story.entries(now),
    }


def _ago(at: float | None, now: float) -> float | None:
    return None if at is None else round(max(now - at, 0.0), 3)
