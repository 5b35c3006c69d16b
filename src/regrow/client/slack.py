"""Threads that do not wake up more often than they need."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from typing import Final

_PR_SET_TIMERSLACK: Final = 29
_PR_GET_TIMERSLACK: Final = 30
_SLACK_NS: Final = 5_000_000


@contextlib.contextmanager
def coarse_timers() -> Iterator[None]:
    """Threads that are started here may sleep up to 5 ms longer than they ask for.

    jaxlib's IFRT proxy client has a thread that sleeps for 50 µs (`kPeriodicFlushInterval`) and then
    looks whether arrays were deleted, for as long as the client lives: 7,500 times a second, a tenth
    of a core. Every other request takes the deletions along, so nobody waits for that thread. What
    Linux adds to a sleep, a thread inherits from the one that starts it.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    before = prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0)
    if before < 0:
        yield
        return
    prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NS), 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(before), 0, 0, 0)
