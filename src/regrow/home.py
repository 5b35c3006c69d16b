"""REGROW_HOME: which clusters run, and what is left of those that do not any more.

    REGROW_HOME/lock                    held while an entry is made or removed
    REGROW_HOME/clusters/NAME/          one for each cluster, mode 0700
        state.json                      who runs it, and how to reach it
        config.json  logs/  *.sock      see `config.HeadConfig`

Whoever ends a cluster removes its directory. If everyone who could is dead, the next command that
looks into this home does so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from regrow.config import MAX_SOCKET_PATH_BYTES, check_name
from regrow.errors import ClusterError, ClusterStartError, NoClusterError, UsageError
from regrow.locks import lock
from regrow.processes import ProcessId, end_run

HOME_VARIABLE: Final = "REGROW_HOME"
CLUSTER_VARIABLE: Final = "REGROW_CLUSTER"
_LOCK_DEADLINE_S: Final = 10.0
_ENDING_DEADLINE_S: Final = 5.0
_SHORT_PREFIX: Final = "regrow-"
# gRPC decodes the path of `grpc://unix:PATH` like a URI.
_PLAIN: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789/._-")


@final
@dataclass(frozen=True, slots=True)
class ClusterState:
    """What a home knows of a cluster.

    Attributes:
        name: Its name.
        run_id: Mark of its processes.
        dir: Its directory.
        socket_dir: Directory of its sockets.
        machine: Host name of the machine it runs on.
        supervisor: The process that started it and watches over it.
        head: Its head; None until that has been started.
        created_at: Seconds since 1970.
        target: Address for clients on this machine.
        tcp_target: Address for clients elsewhere; None without TCP.
        token: What clients over TCP must present.
        purpose: The command that it was started by.
        shared: Whether it is one that several jobs lease slices of, without a head of its own.
    """

    name: str
    run_id: str
    dir: str
    socket_dir: str
    machine: str
    supervisor: ProcessId
    head: ProcessId | None
    created_at: float
    target: str
    tcp_target: str | None = None
    token: str | None = None
    purpose: str = ""
    shared: bool = False

    @property
    def control_socket(self) -> str:
        """Path of its control socket: its head's or, if it is shared, its resource manager's."""
        return f"{self.socket_dir}/{'jobs' if self.shared else 'control'}.sock"

    @property
    def slices_socket(self) -> str:
        """Path of the socket of whoever can signal the processes of its slices."""
        return f"{self.socket_dir}/machines.sock" if self.shared else self.control_socket

    @property
    def is_here(self) -> bool:
        """Whether it belongs to this machine: a home may be shared over a network."""
        return self.machine == socket.gethostname()

    @property
    def running(self) -> bool:
        """Whether its supervisor lives, and its head unless that has not been started yet."""
        return self.supervisor.alive() and (self.head is None or self.head.alive())

    @property
    def is_dead(self) -> bool:
        """Whether nobody is left who would clean up after it."""
        return not self.supervisor.alive() and (self.head is None or not self.head.alive())

    @property
    def is_half_dead(self) -> bool:
        """Whether one of supervisor and head is dead, which the other is to clean up after."""
        return self.head is not None and self.supervisor.alive() != self.head.alive()

    def to_json(self) -> str:
        """The JSON text that `from_json` reads."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> ClusterState:
        """Reads a state; raises ValueError, TypeError or KeyError if it is none."""
        fields: dict[str, Any] = json.loads(text)
        head = fields.pop("head")
        return cls(
            supervisor=ProcessId(**fields.pop("supervisor")),
            head=None if head is None else ProcessId(**head),
            **fields,
        )


@final
class Home:
    """A REGROW_HOME.

    Attributes:
        path: Its directory.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        """Names a home; it is made when something is entered in it.

        Args:
            path: Its directory; default: REGROW_HOME, or ~/.regrow.

        Raises:
            UsageError: If it is no directory, and cannot be one.
        """
        given = Path(path or os.environ.get(HOME_VARIABLE) or "~/.regrow")
        try:
            self.path = given.expanduser().resolve()
            is_something_else = self.path.exists() and not self.path.is_dir()
        # `expanduser` raises RuntimeError for a user that there is not, `resolve` for a loop of links.
        except (OSError, RuntimeError, ValueError) as error:
            raise UsageError(
                f"{given} cannot be a home: {error}; {HOME_VARIABLE} names a directory"
            ) from None
        if is_something_else:
            raise UsageError(
                f"{self.path} is no directory, and so no home: {HOME_VARIABLE} names a directory"
            )

    @property
    def _clusters(self) -> Path:
        return self.path / "clusters"

    def claim(self, name: str | None, *, stem: str = "cluster", purpose: str = "") -> ClusterState:
        """Enters a new cluster, supervised by this process.

        Args:
            name: Its name; by default `stem` with the first free number.
            stem: See `name`.
            purpose: The command that it is started by.

        Raises:
            ClusterStartError: If a cluster of that name runs, or the home cannot be written.
        """
        if name is not None:
            check_name(name)
        self.sweep()
        try:
            with self._locked():
                taken = {entry.name for entry in self._clusters.iterdir()}
                chosen = name if name is not None else _first_free(stem, taken)
                if chosen in taken:
                    raise ClusterStartError(self._taken_text(chosen))
                return self._enter(chosen, purpose)
        except OSError as error:
            raise ClusterStartError(f"cannot write to {self.path}: {error}") from None

    def _taken_text(self, name: str) -> str:
        state = self._read(name)
        who = f" (pid {state.supervisor.pid} on {state.machine})" if state is not None else ""
        return (
            f"a cluster named {name!r} runs already in {self.path}{who}; "
            f"give another --name, or end it with: regrow down --cluster {name}"
        )

    def _enter(self, name: str, purpose: str) -> ClusterState:
        directory = self._clusters / name
        directory.mkdir(mode=0o700)
        sockets = str(directory)
        try:
            sockets = _socket_dir(directory)
            state = ClusterState(
                name=name,
                run_id=secrets.token_hex(8),
                dir=str(directory),
                socket_dir=sockets,
                machine=socket.gethostname(),
                supervisor=ProcessId.own(),
                head=None,
                created_at=time.time(),
                target=f"grpc://unix:{sockets}/client.sock",
                purpose=purpose,
            )
            _write(directory / "state.json", state.to_json())
        except BaseException:  # A Ctrl-C, too.
            _remove_places(str(directory), sockets)
            raise
        return state

    def update(self, state: ClusterState) -> None:
        """Writes what has changed of a cluster's state."""
        _write(Path(state.dir) / "state.json", state.to_json())

    def clusters(self) -> list[ClusterState]:
        """The clusters that run on this machine, the oldest first."""
        self.sweep()
        states = [state for state in self.entries() if state.is_here and state.running]
        return sorted(states, key=lambda state: state.created_at)

    def find(self, name: str | None = None) -> ClusterState:
        """The cluster of that name; without a name, the only one.

        The environment variable REGROW_CLUSTER stands in for a name that is not given.

        Raises:
            NoClusterError: If there is none, or several and no name is given.
        """
        name = name or os.environ.get(CLUSTER_VARIABLE) or None
        running = self.clusters()
        names = ", ".join(state.name for state in running)
        if name is not None:
            for state in running:
                if state.name == name:
                    return state
            others = f"; there is: {names}" if names else ""
            raise NoClusterError(f"no cluster named {name!r} runs in {self.path}{others}")
        if not running:
            raise NoClusterError(f"no cluster runs in {self.path}; start one with: regrow up")
        if len(running) > 1:
            raise NoClusterError(f"several clusters run ({names}): choose with --cluster NAME")
        return running[0]

    def release(self, state: ClusterState) -> None:
        """Removes what a cluster has left on disk; nothing happens when that was done already."""
        if not self._clusters.is_dir():
            return
        with self._locked():
            present = self._read(state.name)
            # Another cluster may have taken the name since then.
            if present is not None and present.run_id == state.run_id:
                _remove_places(present.dir, present.socket_dir)

    def sweep(self) -> list[str]:
        """Cleans up after clusters whose supervisor and head are dead; returns their names.

        A cluster of which only one is dead is being ended by the other; that is waited for.
        """
        if not self._clusters.is_dir():
            return []
        deadline = time.monotonic() + _ENDING_DEADLINE_S
        while (ending := self._half_dead()) and time.monotonic() < deadline:
            time.sleep(0.02)
        swept = []
        with self._locked():
            for entry in list(self._clusters.iterdir()):
                state = self._read(entry.name)
                if state is None:
                    # It is entered and written under the lock, so its maker died in between.
                    shutil.rmtree(entry, ignore_errors=True)
                elif state.is_here and (state.is_dead or state.run_id in ending):
                    end_run(state.run_id)
                    _remove_places(state.dir, state.socket_dir)
                    swept.append(state.name)
        return swept

    def _half_dead(self) -> set[str]:
        return {state.run_id for state in self.entries() if state.is_here and state.is_half_dead}

    def entries(self) -> list[ClusterState]:
        """Every cluster that is entered, also those of other machines and dead ones."""
        if not self._clusters.is_dir():
            return []
        states = (self._read(entry.name) for entry in self._clusters.iterdir())
        return [state for state in states if state is not None]

    def _read(self, name: str) -> ClusterState | None:
        try:
            text = (self._clusters / name / "state.json").read_text(encoding="utf-8")
            return ClusterState.from_json(text)
        except (OSError, ValueError, TypeError, KeyError):
            return None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self._clusters.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.path / "lock").open("ab") as file:
            if not lock(file, timeout_s=_LOCK_DEADLINE_S):
                raise ClusterError(
                    f"waited {_LOCK_DEADLINE_S:g} s for another command to let go of "
                    f"{self.path}/lock"
                )
            yield


def _first_free(stem: str, taken: set[str]) -> str:
    number = 1
    while f"{stem}-{number}" in taken:
        number += 1
    return f"{stem}-{number}"


def _socket_dir(directory: Path) -> str:
    """`directory` itself, or a new short one if its path does not suit a socket."""
    longest = f"{directory}/workers.sock"
    if len(longest.encode()) <= MAX_SOCKET_PATH_BYTES and _PLAIN.issuperset(longest):
        return str(directory)
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if not Path(base).is_dir() or len(base) > 60 or not _PLAIN.issuperset(base) or not base:
        base = "/tmp"  # noqa: S108 - mkdtemp makes a directory that only its owner can enter
    return tempfile.mkdtemp(prefix=_SHORT_PREFIX, dir=base)


def _write(path: Path, text: str) -> None:
    """Writes a file as a whole or not at all, for its owner only."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    draft.replace(path)


def _remove_places(directory: str, sockets: str) -> None:
    if sockets != directory and Path(sockets).name.startswith(_SHORT_PREFIX):
        shutil.rmtree(sockets, ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)
