"""What the training program is doing: its step and its phase.

Both stand in the texts of losses (`regrow.explain` reads them) and tell a retry whether the program
has come further since its last failure. The head is told over its control socket, without waiting
for an answer; where there is none (a cluster on another machine), only this process knows.
"""

from __future__ import annotations

import contextlib
import operator
import re
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, final

from regrow.client.stamps import stamp
from regrow.client.telling import tell
from regrow.errors import UsageError

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


class Follower(Protocol):
    """Who wants to know of steps."""

    def stepped(self) -> None:
        """A step begins; must not wait."""
        ...


_lock = threading.Lock()
_now = Progress()
_followers: weakref.WeakSet[Follower] = weakref.WeakSet()


def follow(follower: Follower) -> None:
    """Has it told of each step, as long as it lives."""
    with _lock:
        _followers.add(follower)


def current() -> Progress:
    """How far the program has come, by what it has said."""
    return _now


def whole(step: Any) -> int:
    """The number of a step, which may be an array of one.

    Raises:
        UsageError: It is no number.
        JaxRuntimeError: It is an array on a slice that was lost.
    """
    with contextlib.suppress(TypeError):
        return operator.index(step)
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        number = int(step)
        if number == float(step):
            return number
    raise UsageError(f"the step is {step!r}; it must be a whole number")


def at_step(step: int) -> None:
    """Says that the program begins a training step.

    It is optional, and costs some tens of microseconds. With it, errors of lost slices name the step, and
    `elastic_retry` recognises an error that comes back at the same step. What this thread executes from
    then on belongs to that step, so the timeline can name the steps that a loss has cost.

    Raises:
        UsageError: The step is no whole number.
    """
    step = whole(step)
    stamp(step)
    _set(step=step, phase="step")
    for follower in list(_followers):
        follower.stepped()


def after_step(step: int) -> None:
    """Says that a step was taken, so the next one begins, unless the program says otherwise."""
    stamp(step + 1, expected=True)
    _set(step=step + 1, phase="step")


def restored(step: int) -> None:
    """Says that the program goes on after this step; `Snapshotter.load` does so.

    One that tells no steps says nothing by that either: what it executes is counted.
    """
    if _now.step is not None:
        stamp(step + 1)


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
        tell("progress", step=_now.step, phase=_now.phase)
