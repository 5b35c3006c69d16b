"""Locks on files, which end with the process that holds them."""

from __future__ import annotations

import fcntl
import time
from typing import IO, Any, Final

_POLL_S: Final = 0.01


def lock(file: int | IO[Any], *, timeout_s: float = 0.0) -> bool:
    """Locks an open file for this process alone; False if another one holds it all the time."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        else:
            return True
