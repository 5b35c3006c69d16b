"""The memory of the local Cloud TPU: its records in SQLite, written down before any answer.

Two tables of documents and three statements need no object mapper; the module of the standard library
is as well kept as any. In WAL mode a transaction is whole or absent, whenever the process is killed: the
kernel has it then. Nothing waits for the disk, which may take seconds on a busy machine; what a power
cut may cost is the memory of slices that it has ended anyway.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, final

from regrow.cloud.machine import Change
from regrow.cloud.resources import KINDS, AnyRecord
from regrow.errors import ClusterError

_SCHEMA_VERSION: Final = 1
_SCHEMA: Final = """
    CREATE TABLE IF NOT EXISTS records (
        kind TEXT NOT NULL, name TEXT NOT NULL, doc TEXT NOT NULL, PRIMARY KEY (kind, name)
    ) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS facts (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""


@final
class Store:
    """A file of records, and of facts about the server; one process at a time may have it open."""

    def __init__(self, path: Path) -> None:
        """Opens it, or makes a new one.

        Raises:
            ClusterError: If it cannot be opened, or another release of Regrow has made it.
        """
        self._path = path
        try:
            # Startup scripts are in it, and these may hold secrets.
            path.touch(mode=0o600)
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = OFF")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version not in (0, _SCHEMA_VERSION):
                raise ClusterError(
                    f"{path} was made by another release of Regrow (its format is {version}, not "
                    f"{_SCHEMA_VERSION}); give another --state-dir, or remove it"
                )
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        except (sqlite3.Error, OSError) as error:
            raise ClusterError(f"cannot open {path}: {error}") from None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def load(self) -> list[AnyRecord]:
        """All records.

        Raises:
            ClusterError: If one cannot be read.
        """
        records: list[AnyRecord] = []
        for kind, name, doc in self._db.execute("SELECT kind, name, doc FROM records"):
            try:
                records.append(KINDS[kind].from_doc(json.loads(doc)))
            except (ValueError, TypeError, KeyError) as error:
                raise ClusterError(f"{self._path}: {kind} {name}: {error!r}") from None
        return records

    def write(self, changes: Iterable[Change], **facts: Any) -> None:
        """Writes changes and facts down, all of them or none."""
        with self._db:
            self._db.execute("BEGIN")
            for change in changes:
                if change.record is None:
                    self._db.execute(
                        "DELETE FROM records WHERE kind = ? AND name = ?",
                        (change.kind, change.name),
                    )
                else:
                    doc = json.dumps(change.record.to_doc(), separators=(",", ":"))
                    self._db.execute(
                        "INSERT OR REPLACE INTO records VALUES (?, ?, ?)",
                        (change.kind, change.name, doc),
                    )
            for key, value in facts.items():
                self._db.execute(
                    "INSERT OR REPLACE INTO facts VALUES (?, ?)", (key, json.dumps(value))
                )

    def fact(self, key: str, default: Any = None) -> Any:
        """A fact that was written down."""
        row = self._db.execute("SELECT value FROM facts WHERE key = ?", (key,)).fetchone()
        return default if row is None else json.loads(row[0])
