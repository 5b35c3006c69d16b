"""What a host is told, and the files by which it and the server know each other.

STATE/server.json                      the server that runs, if one does
STATE/hosts/UID/INCARNATION/WORKER/    a host
    host.json                          what it is told; the server writes it, SIGHUP has it read
    agent.json                         its process and boot; the host writes it when it is up
    guest-attributes.json              what the guest has written through the metadata server
    agent.log
    disk/                              home and working directory of everything that runs on it
STATE/logs/UID-NODE/worker-W/          what startup scripts have printed; kept
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from regrow.processes import ProcessId, end_run

HOSTS_DIR: Final = "hosts"
LOGS_DIR: Final = "logs"
HOST_FILE: Final = "host.json"
AGENT_FILE: Final = "agent.json"
GUEST_FILE: Final = "guest-attributes.json"
SERVER_FILE: Final = "server.json"
DISK: Final = "disk"
STARTUP_LOG: Final = "startup-script.log"


@final
@dataclass(frozen=True, slots=True)
class HostSpec:
    """What a host is told.

    Attributes:
        directory: Its directory.
        logs: Where the output of its scripts is kept.
        server_file: Tells which server it belongs to.
        address: Its address.
        port: Where its metadata server listens.
        incarnation: Which of its node's sets of hosts it belongs to.
        boot: Which start of them this is.
        run_script: Whether the startup script may run.
        stop_s: From SIGTERM to SIGKILL for what runs on it.
        orphan_s: How long it waits for a new server when its own has died.
        environ: Variables of what runs on it.
        metadata: What its metadata server tells.
    """

    directory: str
    logs: str
    server_file: str
    address: str
    port: int
    incarnation: int
    boot: int
    run_script: bool
    stop_s: float
    orphan_s: float
    environ: dict[str, str]
    metadata: dict[str, Any]

    @property
    def disk(self) -> Path:
        """Home of everything that runs on it."""
        return Path(self.directory, DISK)

    def write(self) -> None:
        """Writes it where the host reads it."""
        self.disk.mkdir(parents=True, exist_ok=True)
        write_file(Path(self.directory, HOST_FILE), json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, directory: Path) -> HostSpec:
        """Reads what the server has written."""
        return cls(**json.loads((directory / HOST_FILE).read_text(encoding="utf-8")))


@final
@dataclass(frozen=True, slots=True)
class AgentState:
    """A host that is up.

    Attributes:
        process: Its process.
        incarnation: See `HostSpec`.
        boot: See `HostSpec`.
    """

    process: ProcessId
    incarnation: int
    boot: int

    def write(self, directory: Path) -> None:
        """Writes it where a later server reads it."""
        write_file(directory / AGENT_FILE, json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, directory: Path) -> AgentState | None:
        """Reads it; None if the host has never been up."""
        try:
            fields = json.loads((directory / AGENT_FILE).read_text(encoding="utf-8"))
            return cls(ProcessId(**fields.pop("process")), **fields)
        except (OSError, ValueError, TypeError, KeyError):
            return None


def read_process(path: Path) -> ProcessId | None:
    """The process that a server file tells of."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))["process"]
        return ProcessId(**fields)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_file(path: Path, text: str) -> None:
    """Writes a file as a whole or not at all, for its owner only."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    draft.replace(path)


def run_id(uid: str) -> str:
    """The mark of all processes of a node, whichever boot they are of."""
    return f"cloud-{uid}"


def end_left(state_dir: Path) -> None:
    """Ends the processes of all hosts that a dead server has left."""
    for entry in (state_dir / HOSTS_DIR).glob("*"):
        end_run(run_id(entry.name))
