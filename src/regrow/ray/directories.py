"""Directories that are refused before anything is made for them."""

from __future__ import annotations

import tempfile
from pathlib import Path

from regrow.errors import UsageError


def require_writable(directory: Path, purpose: str) -> None:
    """Makes a directory, if there is none, and returns if files can be made in it.

    Args:
        directory: Which.
        purpose: What it is for, to be told.

    Raises:
        UsageError: If they cannot.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Rights tell less: root has them all, also where nothing can be written.
        tempfile.NamedTemporaryFile(prefix=".regrow-", dir=directory).close()
    except OSError as error:
        told = f"the directory {directory} for {purpose} cannot be written: {error.strerror}"
        raise UsageError(told) from None
