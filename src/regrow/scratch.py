"""Temporary directories that no killed process leaves for good.

Who has one holds a lock on it, which ends with the process. The next one who makes one removes those
that nobody holds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from regrow.locks import lock

_PREFIX: Final = "regrow-scratch-"
# Longer than it takes from making one to holding it.
_OLD_S: Final = 60.0


@contextlib.contextmanager
def scratch(purpose: str) -> Iterator[Path]:
    """A directory for the block, in the system's place for temporary files.

    Args:
        purpose: Part of its name.
    """
    _remove_left(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{purpose}-") as path, _opened(path) as held:
        lock(held)
        yield Path(path)


@contextlib.contextmanager
def _opened(path: str | Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _remove_left(base: Path) -> None:
    for path in base.glob(f"{_PREFIX}*"):
        # What cannot be opened or removed is somebody else's.
        with contextlib.suppress(OSError), _opened(path) as held:
            if _is_mine_and_old(os.fstat(held)) and lock(held):
                shutil.rmtree(path, ignore_errors=True)


def _is_mine_and_old(status: os.stat_result) -> bool:
    return status.st_uid == os.getuid() and time.time() - status.st_mtime > _OLD_S
