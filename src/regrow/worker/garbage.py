"""Who collects cycles in a worker: one thread that nobody waits for.

PJRT clients are in cycles with their devices, so it is the collector that ends them, on whatever thread
it happens to run. To end one whose collective is stuck blocks that thread, maybe for as long as a
collective may take; were it the reader or the executor, the host would stand still.
"""

from __future__ import annotations

import gc
import threading
import time
from typing import Final

_LOOK_S: Final = 1.0
_MANY: Final = 20_000


def collect_aside() -> None:
    """From now on only a thread of its own collects, where many objects have been made."""
    gc.disable()
    threading.Thread(target=_collect_for_ever, name="garbage", daemon=True).start()


def _collect_for_ever() -> None:
    while True:
        time.sleep(_LOOK_S)
        if gc.get_count()[0] > _MANY:
            gc.collect()
