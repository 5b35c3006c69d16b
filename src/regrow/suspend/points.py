"""Named points of a suspension and a resumption, where a fault can be had on purpose.

A trap is set by name, in the process that will come to the point. "aside" is passed by all of them,
between a file that was written aside and its name.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import Final, Literal, cast, get_args

from regrow.errors import StorageError, UsageError

Action = Literal["kill", "stop", "fail", "wait"]

WAIT_S: Final = 10.0
"""How long storage that is slow on purpose takes."""

WORKER: Final = (
    "worker-drain",
    "worker-save-begins",
    "worker-chunk-hashed",
    "aside",
    "worker-chunk-written",
    "worker-chunks-synced",
    "worker-saved",
    "worker-leaves",
    "worker-load-begins",
    "worker-chunk-read",
    "worker-loaded",
    "worker-placed",
)
HEAD: Final = (
    "head-gate-closed",
    "head-drained",
    "head-saves-in",
    "head-manifest-made",
    "aside",
    "head-committed",
    "head-left",
    "head-swept",
    "head-resume-asked",
    "head-slice-up",
    "head-loads-in",
    "head-resumed",
)
POINTS: Final = frozenset(WORKER + HEAD)
_trap: tuple[str, Action, int] | None = None


def set_trap(name: str, action: str = "kill", nth: int = 1) -> None:
    """Has the `nth` arrival at a point end or stop this process, fail as a full disk does, or wait.

    Raises:
        UsageError: There is no such point or action.
    """
    global _trap
    if name not in POINTS or action not in get_args(Action):
        raise UsageError(f"there is no point {name!r} to {action} at")
    _trap = (name, cast(Action, action), nth)


def set_trap_from(text: str) -> None:
    """Sets a trap from "NAME", "NAME=ACTION" or "NAME=ACTION=NTH".

    Raises:
        UsageError: It is none.
    """
    name, _, rest = text.partition("=")
    action, _, nth = rest.partition("=")
    set_trap(name, action or "kill", int(nth) if nth.isdigit() else 1)


def reach(name: str) -> None:
    """This process has come to a point."""
    global _trap
    if _trap is None or _trap[0] != name:
        return
    _, action, nth = _trap
    if nth > 1:
        _trap = (name, action, nth - 1)
        return
    _trap = None
    if action == "wait":
        time.sleep(WAIT_S)
        return
    if action == "fail":
        raise StorageError("the storage cannot be written: No space left on device (on purpose)")
    # To this very thread, or it would go on until another one has taken the signal.
    signal.pthread_kill(
        threading.get_ident(), signal.SIGKILL if action == "kill" else signal.SIGSTOP
    )
