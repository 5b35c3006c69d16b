"""Locks on files, which end with the process that holds them."""

from __future__ import annotations

import fcntl
from typing import IO, Any


def try_lock(file: int | IO[Any]) -> bool:
    """Locks an open file for this process alone; False if another one holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
