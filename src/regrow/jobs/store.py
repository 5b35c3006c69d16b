"""What the manager remembers, on disk: one SQLite file that survives SIGKILL at any moment.

Each turn of the manager is one transaction, synced before anything is said about it: whoever was told
something is remembered to have been told.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, final

from regrow.errors import ClusterError, ClusterStartError
from regrow.jobs.model import Change
from regrow.jobs.records import shallow
from regrow.locks import lock

STATE_NAME: Final = "jobs.sqlite"
_KEPT_CHANGES: Final = 10_000
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS state (id INTEGER PRIMARY KEY CHECK (id = 1), json TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS changes (number INTEGER PRIMARY KEY AUTOINCREMENT, json TEXT NOT NULL);
"""


@final
class Store:
    """The state of one manager; nobody else can open it meanwhile.

    Attributes:
        path: The SQLite file.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Opens it, or makes it.

        Raises:
            ClusterStartError: If another manager has it open.
            ClusterError: If it cannot be read or written.
        """
        folder = Path(directory)
        self.path = folder / STATE_NAME
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # SQLite's own locks come and go; this one ends with the process.
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ClusterError(f"the resource manager's directory {folder}: {error}") from None
        try:
            if not lock(self._lock):
                raise ClusterStartError(f"another resource manager runs in {folder}")
            self._database = self._open()
        except BaseException:
            os.close(self._lock)
            raise

    def _open(self) -> sqlite3.Connection:
        # Made with these rights before SQLite makes it with others.
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        database = sqlite3.connect(self.path, isolation_level=None)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")
            database.executescript(_SCHEMA)
        except sqlite3.Error as error:
            database.close()
            raise self._broken(error) from None
        return database

    def close(self) -> None:
        """Closes it."""
        self._database.close()
        os.close(self._lock)

    def load(self, changes: int) -> tuple[dict[str, Any] | None, list[Change]]:
        """The last state, None if there is none yet, and so many of the latest changes.

        Raises:
            ClusterError: If what is there cannot be read.
        """
        try:
            row = self._database.execute("SELECT json FROM state").fetchone()
            rows = self._database.execute(
                "SELECT json FROM changes ORDER BY number DESC LIMIT ?", (changes,)
            ).fetchall()
            told = [Change(**json.loads(text)) for (text,) in reversed(rows)]
            return (None if row is None else json.loads(row[0])), told
        except (sqlite3.Error, ValueError, TypeError) as error:
            raise self._broken(error) from None

    def save(self, state: dict[str, Any], changes: Iterable[Change]) -> None:
        """Writes a state and new changes, both or neither; returns when they are on disk.

        Raises:
            ClusterError: If they cannot be written, say because the disk is full.
        """
        lines = [(json.dumps(shallow(change)),) for change in changes]
        try:
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                self._database.execute(
                    "INSERT OR REPLACE INTO state (id, json) VALUES (1, ?)", (json.dumps(state),)
                )
                self._database.executemany("INSERT INTO changes (json) VALUES (?)", lines)
                self._database.execute(
                    "DELETE FROM changes WHERE number <= (SELECT MAX(number) FROM changes) - ?",
                    (_KEPT_CHANGES,),
                )
        except sqlite3.Error as error:
            raise self._broken(error) from None

    def _broken(self, error: Exception) -> ClusterError:
        return ClusterError(f"the resource manager's state {self.path}: {error}")
