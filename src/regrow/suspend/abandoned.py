"""What clusters that were killed have left in the `suspended` of their home."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from regrow.errors import StorageError
from regrow.suspend.snapshots import Snapshots
from regrow.suspend.storage import LocalStorage

FOLDER: Final = "suspended"
_NAME: Final = re.compile(r".+-[0-9a-f]{8}")


def job_folder(name: str, run_id: str) -> str:
    """The folder of a cluster's own in the place where its state goes."""
    return f"{name}-{run_id[:8]}"


def sweep_abandoned(place: Path, owned: Callable[[], Collection[str]]) -> list[Path]:
    """Removes what can be of no use any more; returns the folders that stay, for what they hold.

    A committed snapshot stays, whoever made it: it may be the only copy of a state. What was never
    committed goes, with its folder if there is nothing else in it.

    Args:
        place: The folder of the folders.
        owned: Names of the folders of clusters that are entered. It is asked after the folders were
            listed: a cluster is entered before it has a folder, and until its last process is gone.
    """
    try:
        found = [path for path in place.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    here = owned() if found else ()
    stay = []
    for path in sorted(path for path in found if path.name not in here):
        store = Snapshots(LocalStorage(path))
        # What cannot be read or removed now is left as it is.
        with contextlib.suppress(StorageError):
            if not store.numbers():
                store.storage.clear()
                continue
            store.sweep()
        stay.append(path)
    return stay
