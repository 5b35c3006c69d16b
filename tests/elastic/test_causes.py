"""`explain` reads what the head writes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

import regrow
from regrow.elastic.causes import SliceLoss, explain
from regrow.errors import SliceLostError
from regrow.head.buffers import Buffers
from regrow.head.topology import Topology
from regrow.slices import (
    Event,
    Heartbeat,
    HostConnected,
    HostDisconnected,
    HostExited,
    HostReady,
    HostReported,
    HostStarted,
    HostStartFailed,
    KillRequested,
    Membership,
    Policy,
    Progressed,
    RestoreRequested,
    StartRequested,
)


class Slices:
    """Two slices of one host, the second of which is going to be lost."""

    def __init__(self, *, up: bool = True, progress: Progressed | None = None) -> None:
        self.membership = Membership([1, 1], Policy())
        self.now = 50.0
        self.do(StartRequested())
        for index in (0, 1) if up else (0,):
            self.do(HostStarted(index, 1, 0, 70 + index))
            self.do(HostConnected(index, 1, 0))
            self.do(HostReady(index, 1, 0))
        if progress is not None:
            self.do(progress)

    def do(self, event: Event) -> None:
        self.membership.handle(event, self.now)

    def text(self, incarnation: int = 1) -> str:
        story = self.membership.describe_loss(1, incarnation, self.now)
        return str(SliceLostError(1, incarnation, story))


@pytest.mark.parametrize(
    ("event", "kind", "cause"),
    [
        (
            HostExited(1, 1, 0, "SIGKILL (signal 9)"),
            "killed",
            "host 0 (pid 71) was ended by SIGKILL",
        ),
        (HostExited(1, 1, 0, "SIGTERM (signal 15)"), "killed", None),
        (HostExited(1, 1, 0, "SIGSEGV (signal 11)"), "crashed", None),
        (
            HostExited(1, 1, 0, "exit status 3"),
            "crashed",
            "host 0 (pid 71) ended with exit status 3",
        ),
        (
            HostReported(1, 1, 0, "fatal", "device (0) is on fire (incarnation 1, at 3)"),
            "crashed",
            None,
        ),
        (KillRequested(1), "killed", "killed on request"),
    ],
)
@pytest.mark.parametrize("progress", [None, Progressed(12, "load"), Progressed(12, None)])
def test_losses(event: Event, kind: str, cause: str | None, progress: Progressed | None) -> None:
    slices = Slices(progress=progress)
    slices.now += 0.5
    slices.do(event)
    loss = explain(slices.text())
    assert loss is not None
    assert (loss.slice_index, loss.incarnation, loss.kind) == (1, 1, kind)
    assert cause in (None, loss.cause)
    assert (loss.at, loss.last_seen_s) == (50.5, 0.5)
    told = (None, None) if progress is None else (progress.step, progress.phase)
    assert (loss.step, loss.phase) == told


@pytest.mark.parametrize("silent", [True, False])
def test_silence_and_broken_connections(silent: bool) -> None:
    slices = Slices()
    if not silent:
        slices.do(HostDisconnected(1, 1, 0))
    slices.now += 4.0
    slices.do(Heartbeat(0, 1, 0))
    slices.now += 2.0
    slices.membership.tick(slices.now)
    loss = explain(slices.text())
    assert loss is not None
    assert loss.kind == ("hung" if silent else "cut off")
    assert (loss.last_seen_s, loss.at) == (6.0, 56.0)


def test_a_slice_that_is_not_up() -> None:
    slices = Slices(up=False)
    never = explain(Buffers(Topology(2, 1, 1)).error_of(1))
    slices.do(HostStartFailed(1, 1, 0, "no memory (12 of 3)"))
    failed = explain(slices.text())
    assert never is not None
    assert failed is not None
    assert (never.kind, failed.kind) == ("not up", "not up")
    assert failed.cause == "did not start: host 0 was not started: no memory (12 of 3)"
    assert failed.incarnation == 1


def test_a_loss_told_when_the_slice_is_back() -> None:
    slices = Slices()
    slices.do(HostExited(1, 1, 0, "SIGKILL (signal 9)"))
    slices.do(RestoreRequested(1))
    loss = explain(slices.text())
    assert loss is not None
    assert (loss.incarnation, loss.kind) == (1, "killed")


def test_collective_links() -> None:
    loss = explain(
        "DATA_LOSS: slice 0 gave up its collective links to slices 1 and 2 in epoch 4; all of them "
        "live. The outputs and donated inputs of the programs in flight are lost, other arrays are "
        "not. Cause: Collective timed out\nmore"
    )
    assert loss == SliceLoss(
        0, None, "links", "gave up its collective links to slices 1 and 2: Collective timed out"
    )
    assert (
        str(loss) == "slice 0 gave up its collective links to slices 1 and 2: Collective timed out"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "DATA_LOSS",
        "DATA_LOSS: an array of somebody else's is gone",
        "INTERNAL: slice 1 was lost: x (incarnation 1, at 2026-11-30T01:00:00.123Z; y)",
        "DATA_LOSS: slice x was lost: y (incarnation 1, at 2026-11-30T01:00:00.123Z; z)",
    ],
)
def test_other_errors_have_no_such_cause(text: str) -> None:
    assert explain(text) is None
    assert explain(RuntimeError(text)) is None


def test_what_an_error_was_raised_from_is_looked_at() -> None:
    slices = Slices()
    slices.do(KillRequested(1))
    outer = ValueError("attempt 3 failed")
    outer.__cause__ = RuntimeError(f"A host callback met this:\n{slices.text()}")
    outer.__cause__.__context__ = outer
    loss = explain(outer)
    assert loss is not None
    assert loss.slice_index == 1


@given(st.text(), st.text("0123456789-:T."))
def test_any_text_is_taken(text: str, digits: str) -> None:
    explain(text)
    explain(f"DATA_LOSS: slice 1 was lost: {text} (incarnation 1, at {digits}Z; {text})")


def test_a_cause_is_frozen_and_told_in_one_line() -> None:
    loss = SliceLoss(1, 2, "killed", "host 0 was ended by SIGKILL", 3.0, 0.25, "load", 120)
    assert str(loss) == (
        "slice 1, incarnation 2, was lost in step 120 (load): host 0 was ended by SIGKILL, "
        "last heard 0.25 s before"
    )
    with pytest.raises(FrozenInstanceError):
        loss.step = 3  # type: ignore[misc]


def test_it_needs_no_jax() -> None:
    code = "import regrow, sys; regrow.explain('x'); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert regrow.explain is explain
