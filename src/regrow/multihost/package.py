"""A folder as a compressed archive."""

from __future__ import annotations

import fnmatch
import os
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, final

from regrow.errors import UsageError

EXCLUDED: Final = (".git", "__pycache__", ".venv", "tmp")
"""What is left out wherever it stands in the folder."""

_LEVEL: Final = 3


@final
@dataclass(frozen=True, slots=True)
class Package:
    """A packed folder, in a file without a name.

    Attributes:
        file: It.
        files: How many files it holds.
        size: Its bytes.
    """

    file: IO[bytes]
    files: int
    size: int

    @contextmanager
    def reader(self) -> Iterator[int]:
        """A descriptor that reads it from its beginning, whoever else reads it."""
        descriptor = os.open(f"/proc/self/fd/{self.file.fileno()}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


@contextmanager
def packed(folder: Path, exclude: Sequence[str] = ()) -> Iterator[Package]:
    """Packs a folder; the package is gone after the block.

    Args:
        folder: It.
        exclude: Patterns of names, or of paths in it, that are left out beside `EXCLUDED`.

    Raises:
        UsageError: If it is no folder, or cannot be read.
    """
    if not folder.is_dir():
        raise UsageError(f"--script-dir={folder}: there is no such folder")
    files = 0

    def chosen(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        nonlocal files
        path = entry.name.removeprefix("./")
        names = (path, path.rpartition("/")[2])
        if any(fnmatch.fnmatch(name, one) for name in names for one in (*EXCLUDED, *exclude)):
            return None
        if entry.isfifo() or entry.isdev():
            return None
        files += entry.isfile()
        return entry

    with tempfile.TemporaryFile(prefix="regrow-package-") as file:
        try:
            with tarfile.open(fileobj=file, mode="w:gz", compresslevel=_LEVEL) as archive:
                archive.add(folder, ".", filter=chosen)
        except OSError as error:
            raise UsageError(f"--script-dir={folder} cannot be packed: {error}") from None
        file.flush()
        yield Package(file, files, file.tell())
