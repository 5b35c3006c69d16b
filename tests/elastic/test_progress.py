"""What a program says of itself, to a head and without one."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from regrow.channel.stamps import is_expected, step_of
from regrow.client import telling
from regrow.elastic import progress
from regrow.elastic.progress import Progress, at_snapshot, at_step, current, phase
from regrow.errors import UsageError


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(progress, "_now", Progress())
    for name in ("_line", "_line_target"):
        monkeypatch.setattr(telling, name, None)
    yield
    if telling._line is not None:
        telling._line.close()


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A control socket on which somebody listens, and the target beside it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "control.sock"))
        listener.listen()
        listener.settimeout(5)
        monkeypatch.setenv("JAX_BACKEND_TARGET", f"grpc://unix:{tmp_path}/client.sock")
        yield listener


@pytest.mark.parametrize("target", [None, "grpc://somewhere:1", "grpc://unix:/no/client.sock"])
def test_without_a_head_only_this_process_knows(
    target: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAX_BACKEND_TARGET", raising=False)
    if target is not None:
        monkeypatch.setenv("JAX_BACKEND_TARGET", target)
    at_step(3)
    at_snapshot(2)
    with phase("load"), phase("reshard"):
        assert current() == Progress(3, 2, "reshard")
    assert current() == Progress(3, 2, "step")


def test_the_head_is_told_and_not_waited_for(head: socket.socket) -> None:
    at_step(3)
    connection, _ = head.accept()
    with connection:
        with phase("load"):
            at_snapshot(1)
        connection.settimeout(5)
        lines = [json.loads(line) for line in connection.recv(1 << 16).splitlines()]
    assert [line["params"] for line in lines] == [
        {"step": 3, "phase": "step"},
        {"step": 3, "phase": "load"},
        {"step": 3, "phase": "step"},
    ]


@pytest.mark.parametrize("ends", ["closed", "never reads"])
def test_a_head_that_is_gone_or_deaf_costs_nothing(head: socket.socket, ends: str) -> None:
    at_step(0)
    connection, _ = head.accept()
    if ends == "closed":
        connection.close()
    for step in range(1, 20_000):
        at_step(step)
    assert telling._line is None
    connection.close()
    assert current().step == 19_999


def test_executions_carry_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    stamps: list[int] = []
    monkeypatch.setattr("regrow.client.stamps._set", stamps.append)
    progress.restored(3)
    assert stamps == [], "what says no steps is counted"
    at_step(5)
    progress.after_step(5)
    progress.restored(3)
    assert [(step_of(one), is_expected(one)) for one in stamps] == [
        (5, False),
        (6, True),
        (4, False),
    ]


@pytest.mark.parametrize("step", ["last", None, float("nan"), 0.5, float("inf")])
def test_a_step_is_a_number(step):
    with pytest.raises(UsageError, match="it must be a whole number"):
        at_step(step)


def test_what_is_no_phase() -> None:
    for name in ("", "two words", "a" * 41, "(x)"):
        with pytest.raises(UsageError, match="is no phase"), phase(name):
            pass
