"""The snapshots of one job: commit, find, sweep. Manifests only; shards are written by the hosts."""

from __future__ import annotations

import contextlib
import re
from typing import Final, final

from regrow.errors import StorageError
from regrow.suspend.manifest import Manifest
from regrow.suspend.storage import Storage
from regrow.suspend.sweep import KEPT, leftovers, old

CHUNKS: Final = "chunks"
MANIFESTS: Final = "manifests"
MEASURED: Final = "measured"
"""Where the speed of the storage is tried out."""

FOLDERS: Final = frozenset({CHUNKS, MANIFESTS, MEASURED})
_NAME = re.compile(r"([0-9]{9})\.json")


def manifest_name(number: int) -> str:
    """Where the manifest of a snapshot is."""
    return f"{MANIFESTS}/{number:09d}.json"


@final
class Snapshots:
    """The store of one job."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    @property
    def url(self) -> str:
        """Where it is."""
        return self.storage.url

    def numbers(self) -> list[int]:
        """The snapshots that are committed, oldest first.

        Raises:
            StorageError: The storage does not answer.
        """
        found = (_NAME.fullmatch(name) for name in self.storage.names(MANIFESTS))
        return sorted(int(match.group(1)) for match in found if match)

    def read(self, number: int | None = None) -> Manifest:
        """One snapshot; None: the latest.

        Raises:
            StorageError: There is none, or it is damaged or of another version.
        """
        if number is None:
            numbers = self.numbers()
            if not numbers:
                raise StorageError(f"there is no snapshot at {self.url}")
            number = numbers[-1]
        name = manifest_name(number)
        return Manifest.from_bytes(self.storage.read(name), f"{self.url}/{name}")

    def commit(self, manifest: Manifest) -> None:
        """Makes a snapshot whose chunks are all there: from now on it is the latest.

        Raises:
            StorageError: It could not be written; the latest snapshot is the one that was.
        """
        name = manifest_name(manifest.number)
        self.storage.sync(CHUNKS)
        self.storage.write(name, manifest.to_bytes())
        try:
            self.storage.sync(MANIFESTS)
        except StorageError:
            # It may not last, so it must not look as if it did.
            with contextlib.suppress(StorageError):
                self.storage.remove(name)
            raise

    def sweep(self, kept: int = KEPT) -> int:
        """Removes old snapshots, and chunks that none needs; returns how many files went.

        Nobody may write to this store meanwhile. A manifest that cannot be read keeps everything; of a
        store without any snapshot nothing stays.

        Raises:
            StorageError: The storage does not answer, or a manifest is damaged.
        """
        numbers = self.numbers()
        gone = set(old(numbers, kept))
        stay = [self.read(number) for number in numbers if number not in gone]
        found = leftovers(stay, numbers, self.storage.names(CHUNKS))
        for number in found.manifests:
            self.storage.remove(manifest_name(number))
        halves = [name for name in self.storage.names(MANIFESTS) if not _NAME.fullmatch(name)]
        for name in halves:
            self.storage.remove(f"{MANIFESTS}/{name}")
        for name in found.chunks:
            self.storage.remove(f"{CHUNKS}/{name}")
        if not numbers:
            self.storage.clear()
        return len(found.manifests) + len(halves) + len(found.chunks)

    def clear(self) -> None:
        """Removes all of it; what a crash leaves of it is no snapshot.

        Raises:
            StorageError: It cannot be removed.
        """
        for number in self.numbers():
            self.storage.remove(manifest_name(number))
        self.storage.sync(MANIFESTS)
        self.storage.clear()
