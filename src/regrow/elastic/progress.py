"""What the training program is doing: its step and its phase.

Both stand in the texts of losses (`regrow.explain` reads them) and tell a retry whether the program
has come further since its last failure. The head is told over its control socket, without waiting
for an answer; where there is none (a cluster on another machine), only this process knows.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, final

from regrow.control import ControlConnection
from regrow.errors import RegrowError, UsageError

_CLIENT_SOCKET: Final = "client.sock"
_CONTROL_SOCKET: Final = "control.sock"
_TARGET_VARIABLE: Final = "JAX_BACKEND_TARGET"
_UNIX: Final = "grpc://unix:"
_WORD: Final = re.compile(r"[\w-]{1,40}", re.ASCII)


@final
@dataclass(frozen=True, slots=True)
class Progress:
    """How far the program has come.

    Attributes:
        step: The step that it is in; None if it does not say.
        snapshot: The step of the snapshot that it last began; None before the first.
        phase: What it is doing; None if it does not say.
    """

    step: int | None = None
    snapshot: int | None = None
    phase: str | None = None


_lock = threading.Lock()
_now = Progress()
_line: ControlConnection | None = None
_line_target: str | None = None


def current() -> Progress:
    """How far the program has come, by what it has said."""
    return _now


def at_step(step: int) -> None:
    """Says that the program begins a training step.

    It is optional, and costs some tens of microseconds. With it, errors of lost slices name the step, and
    `elastic_retry` recognises an error that comes back at the same step.
    """
    _set(step=int(step), phase="step")


def at_snapshot(step: int) -> None:
    """Says that the snapshot of a step begins; `Snapshotter.save` does so."""
    global _now
    with _lock:
        _now = replace(_now, snapshot=int(step))


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Says what the program is doing inside the `with` block.

    Args:
        name: One word of letters, digits, "-" and "_", at most 40 ("load", say).

    Raises:
        UsageError: It is no such word.
    """
    if not _WORD.fullmatch(name):
        raise UsageError(f"{name!r} is no phase; write one word, 'load' say")
    before = _now.phase
    _set(phase=name)
    try:
        yield
    finally:
        _set(phase=before)


def _set(**changes: int | str | None) -> None:
    global _now
    with _lock:
        _now = replace(_now, **changes)  # type: ignore[arg-type]
        _tell(_now)


def _tell(progress: Progress) -> None:
    """Tells the head; whoever cannot be told is not asked again until the target changes."""
    global _line, _line_target
    target = os.environ.get(_TARGET_VARIABLE)
    try:
        if target != _line_target:
            _line_target = target
            _line = _connected(target)
        if _line is not None:
            _line.send("progress", step=progress.step, phase=progress.phase)
            # The answers say nothing new, but unread they would fill the socket.
            _line.take()
    except RegrowError:
        if _line is not None:
            _line.close()
        _line = None


def _connected(target: str | None) -> ControlConnection | None:
    if target is None or not target.startswith(_UNIX):
        return None
    client = Path(target.removeprefix(_UNIX))
    control = client.with_name(_CONTROL_SOCKET)
    if client.name != _CLIENT_SOCKET or not control.exists():
        return None
    return ControlConnection(str(control), timeout_s=1.0)
