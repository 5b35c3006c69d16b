"""What clusters that are gone have left in the `suspended` of their home."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from regrow.errors import StorageError
from regrow.suspend.retention import Retention
from regrow.suspend.snapshots import Snapshots
from regrow.suspend.storage import LocalStorage

FOLDER: Final = "suspended"
_NAME: Final = re.compile(r".+-[0-9a-f]{8}")

Owned = Callable[[], Collection[str]]
"""Names of the folders of clusters that are entered. It is asked after the folders were listed: a cluster
is entered before it has a folder, and until its last process is gone."""


@final
@dataclass(frozen=True, slots=True)
class Abandoned:
    """Folders of clusters that are gone.

    Attributes:
        made: Those with a snapshot that can be read, and when the latest was made.
        unread: Those of which nobody can tell what they hold: they stay.
        empty: Those in which nothing was ever committed.
    """

    made: Mapping[Path, float]
    unread: tuple[Path, ...]
    empty: tuple[Path, ...]

    def expired(self, retention: Retention, now: float) -> list[Path]:
        """Those whose snapshots may go."""
        made = {path.name: when for path, when in self.made.items()}
        names = retention.expired(made, now)
        return [path for path in self.made if path.name in names]


@final
@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep did.

    Attributes:
        removed: Folders that had snapshots.
        left: Folders that stay, for what they hold.
    """

    removed: tuple[Path, ...]
    left: tuple[Path, ...]


def job_folder(name: str, run_id: str) -> str:
    """The folder of a cluster's own in the place where its state goes."""
    return f"{name}-{run_id[:8]}"


def job_place(base: str, name: str, run_id: str) -> str:
    """Where the state of a cluster goes, below a URL or a path."""
    return f"{base.rstrip('/')}/{job_folder(name, run_id)}"


def abandoned(place: Path, owned: Owned) -> Abandoned:
    """What clusters that are gone have left."""
    try:
        found = [path for path in place.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        found = []
    here = owned() if found else ()
    made, unread, empty = {}, [], []
    for path in sorted(path for path in found if path.name not in here):
        store = Snapshots(LocalStorage(path))
        try:
            if store.numbers():
                made[path] = store.read().when
            else:
                empty.append(path)
        except StorageError:
            unread.append(path)
    return Abandoned(made, tuple(unread), tuple(empty))


def sweep_abandoned(place: Path, owned: Owned, retention: Retention, now: float) -> Swept:
    """Removes what can be of no use any more, and snapshots by the rule of retention."""
    found = abandoned(place, owned)
    for path in found.empty:
        LocalStorage(path).clear()
    removed = []
    for path in found.expired(retention, now):
        # What cannot be removed now is left as it is.
        with contextlib.suppress(StorageError):
            Snapshots(LocalStorage(path)).clear()
            removed.append(path)
    left = sorted({*found.made, *found.unread}.difference(removed))
    for path in left:
        with contextlib.suppress(StorageError):
            Snapshots(LocalStorage(path)).sweep()
    return Swept(tuple(removed), tuple(left))
