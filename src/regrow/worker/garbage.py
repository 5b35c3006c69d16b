"""Who collects cycles in a worker, and gives memory back: one thread that nobody waits for.

PJRT clients are in cycles with their devices, so it is the collector that ends them, on whatever thread
it happens to run. To end one whose collective is stuck blocks that thread, maybe for as long as a
collective may take; were it the reader or the executor, the host would stand still.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable
from typing import Any, Final

_LOOK_S: Final = 1.0
_MANY: Final = 20_000


def collect_aside(work_done: Callable[[], int]) -> None:
    """From now on only a thread of its own collects, where many objects have been made.

    Memory that was freed goes back to the system once the process is idle: malloc keeps it, which
    makes the next step of a training fast, but the largest moment of a run would be its size for ever.

    Args:
        work_done: How much the process has done so far; idle is who has done nothing for a while.
    """
    gc.disable()
    thread = threading.Thread(target=_look_for_ever, args=(work_done,), name="garbage", daemon=True)
    thread.start()


def _look_for_ever(work_done: Callable[[], int]) -> None:
    trim = _malloc_trim()
    trimmed = seen = work_done()
    while True:
        time.sleep(_LOOK_S)
        if gc.get_count()[0] > _MANY:
            gc.collect()
        before, seen = seen, work_done()
        if seen == before and seen != trimmed:
            trimmed = seen
            trim(0)


def _malloc_trim() -> Callable[[int], Any]:
    try:
        function: Callable[[int], Any] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # Another C library than glibc.
        return lambda keep_bytes: None
    return function
