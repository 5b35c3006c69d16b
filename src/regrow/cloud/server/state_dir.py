"""The directory of a local Cloud TPU, and which server has it.

lock           held by the server that runs
server.json    its process and address
token          what clients that the kernel does not know must present
cloud.db       see `store`
hosts/ logs/   see `hosts.spec`
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from regrow.cloud.hosts.spec import SERVER_FILE, write_file
from regrow.errors import ClusterStartError, NoClusterError
from regrow.home import Home
from regrow.locks import lock
from regrow.processes import ProcessId

DEFAULT_PORT: Final = 8470
ADMIN_PREFIX: Final = "/regrow/v1/"
"""Where the server answers what the real one does not know."""

_LOCK: Final = "lock"
_TOKEN: Final = "token"  # noqa: S105 - the name of a file
_DATABASE: Final = "cloud.db"


@final
@dataclass(frozen=True, slots=True)
class ServerState:
    """A server that runs.

    Attributes:
        process: Its process.
        endpoint: The URL that clients give as their API endpoint.
        simulated: Whether its slices have no processes.
    """

    process: ProcessId
    endpoint: str
    simulated: bool


@final
class StateDir:
    """The directory of a local Cloud TPU.

    Attributes:
        path: It.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Names a directory; default: `cloud` in REGROW_HOME."""
        self.path = (path or Home().path / "cloud").expanduser().resolve()

    @property
    def database(self) -> Path:
        """Where the records are kept."""
        return self.path / _DATABASE

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other servers out.

        Raises:
            ClusterStartError: If another one has it, or it cannot be written.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = (self.path / _LOCK).open("ab")
        except OSError as error:
            raise ClusterStartError(f"cannot write to {self.path}: {error}") from None
        with file:
            if not lock(file):
                server = self._read()
                where = f" ({server.endpoint}, pid {server.process.pid})" if server else ""
                raise ClusterStartError(
                    f"a local Cloud TPU runs already in {self.path}{where}; end it with: regrow cloud "
                    "down, or give another --state-dir"
                )
            try:
                yield
            finally:
                (self.path / SERVER_FILE).unlink(missing_ok=True)

    def announce(self, server: ServerState) -> None:
        """Tells clients, and hosts that a former server has left, who serves now."""
        write_file(self.path / SERVER_FILE, json.dumps(dataclasses.asdict(server)))

    def server(self) -> ServerState:
        """The server that runs.

        Raises:
            NoClusterError: If none does.
        """
        server = self._read()
        if server is None or not server.process.alive():
            raise NoClusterError(
                f"no local Cloud TPU runs in {self.path}; start one with: regrow cloud up"
            )
        return server

    def _read(self) -> ServerState | None:
        try:
            fields = json.loads((self.path / SERVER_FILE).read_text(encoding="utf-8"))
            return ServerState(ProcessId(**fields.pop("process")), **fields)
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def token(self) -> str:
        """The token of this directory; made when it is first asked for."""
        path = self.path / _TOKEN
        with contextlib.suppress(FileNotFoundError):
            return path.read_text(encoding="ascii").strip()
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = secrets.token_urlsafe(24)
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(f"{fresh}\n")
        return path.read_text(encoding="ascii").strip()
