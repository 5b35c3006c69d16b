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
# Numbers of glibc's mallopt, and the largest heap and mapping threshold that it knows.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_HEAP_BYTES: Final = 64 << 20
_MAPPED_BYTES: Final = 32 << 20
_NEVER: Final = 2**31 - 1
_collecting = threading.Lock()


def share_one_arena() -> None:
    """All threads that are started from now on allocate from the arena that can be given back.

    glibc gives every thread an arena of its own, up to eight for each core, but `malloc_trim` never
    gives back what lies at the end of any but the first. The threads of each epoch's client would leave
    the most that they ever held at one time behind there, for good.
    """
    _function_of_malloc("mallopt")(_ARENA_MAX, 1)


def collect() -> None:
    """Ends the cycles that are garbage now; waits while another thread is stuck in ending one.

    `gc.collect` by itself returns at once while any thread is in it, so that what has become garbage
    since that one began would stay.
    """
    with _collecting:
        gc.collect()


def collect_aside(work_done: Callable[[], int]) -> None:
    """From now on only a thread of its own collects, where many objects have been made.

    Memory that was freed goes back to the system once the process is idle, and not before: the pages
    of an array that is made anew in each step, or with each snapshot, cost more than what fills them.

    Args:
        work_done: How much the process has done so far; idle is who has done nothing for a while.
    """
    gc.disable()
    _keep_what_is_freed()
    thread = threading.Thread(target=_look_for_ever, args=(work_done,), name="garbage", daemon=True)
    thread.start()


def _look_for_ever(work_done: Callable[[], int]) -> None:
    trim = _function_of_malloc("malloc_trim")
    seen, idle = work_done(), 0
    while True:
        time.sleep(_LOOK_S)
        if gc.get_count()[0] > _MANY:
            collect()
        before, seen = seen, work_done()
        idle = idle + 1 if seen == before else 0
        # What is stuck ends long after the last command: so again, and ever more seldom.
        if idle.bit_count() == 1:
            trim(0)


def _keep_what_is_freed() -> None:
    option = _function_of_malloc("mallopt")
    option(_TRIM_THRESHOLD, _NEVER)
    option(_TOP_PAD, _HEAP_BYTES)
    option(_MMAP_THRESHOLD, _MAPPED_BYTES)


def _function_of_malloc(name: str) -> Callable[..., Any]:
    try:
        function: Callable[..., Any] = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):  # Another C library than glibc.
        return lambda *_: None
    return function
