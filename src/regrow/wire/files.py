"""Host buffers that a client on the same machine hands over as files."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import final

from regrow.errors import Code, StatusError


@final
class TransferDirectory:
    """The directory that clients put large buffers into, one file for each.

    The client names a file `lt_` and the buffer's handle, as a 32-bit number.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).resolve()

    def path(self, handle: int, size: int) -> str:
        """The file of a buffer.

        Raises:
            StatusError: The file is not there, no regular file, or too short.
        """
        number = (handle + (1 << 31)) % (1 << 32) - (1 << 31)
        path = self._path / f"lt_{number}"
        try:
            found = path.lstat()
        except OSError as error:
            raise StatusError(
                Code.FAILED_PRECONDITION,
                f"the file of host buffer {handle}, {path}, cannot be read here: {error.strerror}",
            ) from error
        if not stat.S_ISREG(found.st_mode):
            raise StatusError(Code.INVALID_ARGUMENT, f"{path} is no regular file")
        if size < 0 or found.st_size < size:
            raise StatusError(
                Code.INVALID_ARGUMENT,
                f"{path} has {found.st_size} bytes, host buffer {handle} has {size}",
            )
        return str(path)
