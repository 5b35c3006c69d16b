"""Faults that only the process itself can make, on the head's request (`regrow.chaos`)."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import threading
from pathlib import Path
from typing import Final, final

from regrow.suspend.points import set_trap_from

TRAP: Final = "trap:"
log = logging.getLogger(__name__)

_LEFT_BYTES: Final = 64 << 20
_PIECE_BYTES: Final = 4 << 20
_STATUS: Final = 1
_FULL: Final = "/dev/full"


@final
class Faults:
    """The faults of this process."""

    def __init__(self) -> None:
        self._outputs: dict[int, int] = {}

    def make(self, fault: str) -> None:
        """Makes a fault."""
        log.warning("a fault was ordered: %s", fault)
        if fault.startswith(TRAP):
            set_trap_from(fault.removeprefix(TRAP))
            return
        match fault:
            case "exit":
                os._exit(_STATUS)
            case "oom":
                threading.Thread(target=_use_up_memory, name="oom", daemon=True).start()
            case "diskfull":
                self._fill_disk()
            case "mend":
                self._mend()

    def _fill_disk(self) -> None:
        """Has all that is written to standard output and error, the log, fail with ENOSPC."""
        full = os.open(_FULL, os.O_WRONLY | os.O_CLOEXEC)
        for output in (1, 2):
            self._outputs.setdefault(output, os.dup(output))
            os.dup2(full, output)
        os.close(full)

    def _mend(self) -> None:
        while self._outputs:
            output, kept = self._outputs.popitem()
            os.dup2(kept, output)
            os.close(kept)


def _use_up_memory() -> None:
    """Allocates in C++ up to a limit. Nothing catches what `new` throws then, so the process ends.

    Another thread may be the first to get no memory: then the process ends by what that does.
    """
    allocate = ctypes.CDLL("libstdc++.so.6")._Znwm
    allocate.restype, allocate.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + _LEFT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    try:
        while True:
            ctypes.memset(allocate(_PIECE_BYTES), 1, _PIECE_BYTES)
    except MemoryError:  # Of the interpreter, which was faster.
        os.abort()
