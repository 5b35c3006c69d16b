"""Slices in words, for errors, and in JSON values, for `regrow status`."""

from __future__ import annotations

from collections.abc import Sequence
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


def loss_text(machine: SliceMachine, incarnation: int, now: float) -> str:
    """The loss of an incarnation in one line that goes after "slice N "."""
    loss = machine.losses.get(incarnation)
    if loss is None:
        return _not_lost_text(machine, incarnation, now)
    what = "was lost" if loss.was_up else "did not start"
    head = f"{what}: {loss.cause}, {seconds(now - loss.at)} ago (incarnation {incarnation}; "
    # Only the cause is foreign text, and it was cleaned and cut when it came in.
    return f"{head}{_facts(loss)}{_present(machine, incarnation, now)}). {_advice(machine)}"


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


def _not_lost_text(machine: SliceMachine, incarnation: int, now: float) -> str:
    if incarnation < machine.incarnation:
        present = _present(machine, incarnation, now)
        return f"was lost (incarnation {incarnation}; {present}). {_advice(machine)}"
    if machine.state == "starting":
        text = f"is not up: incarnation {machine.incarnation} has been starting for "
        text += seconds(now - machine.started_at)
        former = machine.losses.get(machine.incarnation - 1)
        return f"{text}; the one before was lost: {former.cause}" if former else text
    return f"is {machine.state} (incarnation {machine.incarnation})"


def _present(machine: SliceMachine, incarnation: int, now: float) -> str:
    """What has become of the slice since then."""
    if machine.state == "stopping":
        return "the cluster is shutting down"
    if machine.incarnation != incarnation:
        return f"now incarnation {machine.incarnation}, {machine.state}"
    if machine.restore_at is None:
        return "it returns when asked" if machine.may_start else "the job has ended"
    if machine.restore_at > now:
        return f"it returns in {seconds(machine.restore_at - now)}"
    return "it is about to return"


def _advice(machine: SliceMachine) -> str:
    if machine.state in LIVE:
        return "Arrays that lived on it are gone; new arrays on the returned slice work."
    return "Arrays that lived on it are gone; new arrays work when it has returned."


def refusal_text(machine: SliceMachine, request: Request, ended: str | None) -> str | None:
    """Why a request would do nothing; None: it works."""
    name = f"slice {machine.index}"
    is_now = f"{name} is {machine.state} (incarnation {machine.incarnation})"
    if machine.state == "stopping":
        return f"{name} is shut down with its cluster"
    match request:
        case RestoreRequested() if ended is not None:
            return f"{name} is not restored, the job has ended: {ended}"
        case RestoreRequested() if machine.state in HELD:
            return f"{is_now}; there is nothing to restore"
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
