"""Which faults this machine can make: what it cannot is refused before anything runs."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from regrow.chaos.schedule import FaultEvent
from regrow.errors import UsageError


def _without_full_device() -> str | None:
    return None if os.access("/dev/full", os.W_OK) else "there is no /dev/full to write to"


def _without_allocator() -> str | None:
    try:
        ctypes.CDLL("libstdc++.so.6")._Znwm  # noqa: B018 - whether it is there is the question
    except (OSError, AttributeError):
        return "there is no libstdc++.so.6, whose allocator the slice is to run out of memory in"
    return None


def _without_shell() -> str | None:
    return None if shutil.which("sh") else "there is no sh, which wakes frozen processes"


_LACKS: Final[Mapping[str, Callable[[], str | None]]] = {
    "diskfull": _without_full_device,
    "oom": _without_allocator,
    "clockjump": _without_shell,
}


def check_possible(events: Iterable[FaultEvent], *, ray: bool = False) -> None:
    """Checks that all faults of a schedule can be made.

    Args:
        events: They.
        ray: Whether the slices come from a Ray cluster.

    Raises:
        UsageError: One cannot; says which, and what is missing.
    """
    for event in events:
        if event.fault == "killnode" and not ray:
            raise UsageError(f"the fault {event} needs slices from a Ray cluster (--launcher ray)")
        lacks = _LACKS.get(event.fault, lambda: None)()
        if lacks is not None:
            raise UsageError(f"this machine cannot make the fault {event}: {lacks}")
