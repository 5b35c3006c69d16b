"""The process of a local host: its metadata server, its scripts and commands, and their end.

It ends everything that runs on the host when the server says so (SIGTERM), and by itself when its
server has died and none has come back in time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, final

from regrow.cloud.hosts.exec_server import ExecServer
from regrow.cloud.hosts.metadata_server import MetadataServer
from regrow.cloud.hosts.spec import (
    GUEST_FILE,
    STARTUP_LOG,
    AgentState,
    HostSpec,
    read_process,
    write_file,
)
from regrow.processes import (
    Child,
    ProcessId,
    become_subreaper,
    descendants_of,
    end_all,
    set_name,
    spawn,
    with_site,
)

_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
_LOOK_EVERY_S: Final = 0.25
_ENDING_POLL_S: Final = 0.05
_SHELL: Final = "/bin/sh"
_COMMAND_SHELL: Final = "/bin/bash" if Path("/bin/bash").exists() else _SHELL
_NAMESPACE: Final = "startup-script"


@final
class Agent:
    """One host that runs."""

    def __init__(self, directory: Path, ready_fd: int) -> None:
        """Starts the metadata server, and tells that the host is up.

        Args:
            directory: The host's directory.
            ready_fd: Where to tell it.
        """
        self._directory = directory
        self._spec = HostSpec.read(directory)
        self._writing = threading.Lock()
        self._script: Child | None = None
        self._has_run_script = False
        self._server: ProcessId | None = read_process(Path(self._spec.server_file))
        self._orphan_since: float | None = None
        self._metadata = MetadataServer(
            (self._spec.address, self._spec.port),
            self._spec.metadata,
            self._read_guest_attributes(),
            self._write_guest_attributes,
        )
        # Commands that run: theirs to reap, by the threads that wait for them.
        self._commands: list[Child] = []
        self._starting = threading.Lock()
        self._exec = ExecServer(self._spec.address, self._run_command, self._spec.stop_s)
        state = AgentState(ProcessId.own(), self._spec.incarnation, self._spec.boot)
        state.write(directory)
        os.write(ready_fd, b"ready\n")
        os.close(ready_fd)

    def run(self) -> None:
        """Stays until the host is to end."""
        self._start_script()
        while not self._is_orphan():
            received = signal.sigtimedwait(_SIGNALS, _LOOK_EVERY_S)
            number = None if received is None else received.si_signo
            if number == signal.SIGTERM:
                break
            if number == signal.SIGHUP:
                self._reload()
            self._reap()
        self._end()

    def _reload(self) -> None:
        self._spec = HostSpec.read(self._directory)
        self._metadata.replace(self._spec.metadata)
        self._start_script()

    # --- the startup script ---

    def _start_script(self) -> None:
        text = self._metadata_value("startup-script")
        if text and self._spec.run_script and not self._has_run_script:
            self._has_run_script = True
            self._script = self._start("startup-script", text)

    def _metadata_value(self, key: str) -> str:
        attributes: dict[str, Any] = self._spec.metadata["instance"]["attributes"]
        return str(attributes.get(key, ""))

    def _start(self, name: str, text: str) -> Child | None:
        """Runs a script in the host's disk, with its output kept beside that of earlier boots."""
        path = self._directory / name
        write_file(path, text if text.startswith("#!") else f"#!{_SHELL}\n{text}")
        path.chmod(0o700)
        logs = Path(self._spec.logs)
        logs.mkdir(parents=True, exist_ok=True)
        with (logs / STARTUP_LOG).open("ab", buffering=0) as log:
            number = f"incarnation {self._spec.incarnation}, boot {self._spec.boot}"
            log.write(f"--- {name}: {number}, {time.strftime('%FT%TZ', time.gmtime())}\n".encode())
            # posix_spawn has no working directory, so that a shell goes there first.
            argv = [_SHELL, "-c", 'cd "$HOME" && exec "$0"', str(path)]
            try:
                return Child(spawn(argv, self._environ(), output=log.fileno()))
            except OSError as error:
                log.write(f"cannot start it: {error}\n".encode())
                return None

    def _environ(self) -> dict[str, str]:
        return {
            **os.environ,
            **self._spec.environ,
            "HOME": str(self._spec.disk),
            "PYTHONPATH": with_site(os.environ.get("PYTHONPATH", "")),
        }

    # --- commands from outside ---

    def _run_command(self, command: str, streams: Sequence[int]) -> Child:
        """Runs a command, or without one a shell, in the host's disk."""
        shell = [_COMMAND_SHELL, "-c", command] if command else [_COMMAND_SHELL]
        argv = [_SHELL, "-c", 'cd "$HOME" && exec "$0" "$@"', *shell]
        stdin, output, errors = streams
        with self._starting:
            pid = spawn(argv, self._environ(), stdin=stdin, output=output, errors=errors)
            child = Child(pid)
            self._commands = [one for one in self._commands if one.cause is None] + [child]
        return child

    def _reap(self) -> None:
        script = self._script
        if script is not None and script.poll() is not None:
            self._script = None
            with Path(self._spec.logs, STARTUP_LOG).open("a", encoding="utf-8") as log:
                log.write(f"--- startup-script: {script.cause}\n")
            self._metadata.write(_NAMESPACE, "exit-status", str(script.status))
            self._metadata.write(_NAMESPACE, "boot", str(self._spec.boot))
        with self._starting, contextlib.suppress(ChildProcessError):
            awaited = {one.pid for one in self._commands if one.cause is None}
            if self._script is not None:
                awaited.add(self._script.pid)
            # Orphans of the script become children of this process.
            while (
                info := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            ) is not None:
                if info.si_pid in awaited:
                    break
                os.waitpid(info.si_pid, os.WNOHANG)

    # --- guest attributes ---

    def _read_guest_attributes(self) -> dict[str, dict[str, str]]:
        try:
            text = (self._directory / GUEST_FILE).read_text(encoding="utf-8")
            attributes: dict[str, dict[str, str]] = json.loads(text)
        except (OSError, ValueError):
            return {}
        return attributes

    def _write_guest_attributes(self) -> None:
        with self._writing:
            text = json.dumps(self._metadata.guest_attributes)
            write_file(self._directory / GUEST_FILE, text)

    # --- the end ---

    def _is_orphan(self) -> bool:
        """Whether the server has been dead for too long; a new one adopts the host."""
        if self._server is not None and self._server.alive():
            self._orphan_since = None
            return False
        self._server = read_process(Path(self._spec.server_file))
        now = time.monotonic()
        if self._orphan_since is None:
            self._orphan_since = now
        return now - self._orphan_since > self._spec.orphan_s

    def _end(self) -> None:
        """Ends all that runs here: the shutdown script, then SIGTERM, then SIGKILL."""
        self._exec.close()
        deadline = time.monotonic() + self._spec.stop_s
        text = self._metadata_value("shutdown-script")
        script = self._start("shutdown-script", text) if text else None
        if script is not None:
            script.wait(self._spec.stop_s)
        own = {os.getpid()}
        end_all(descendants_of(own), signum=signal.SIGTERM)
        while self._running() and time.monotonic() < deadline:
            time.sleep(_ENDING_POLL_S)
        while end_all(descendants_of(own)):
            time.sleep(_ENDING_POLL_S)
            self._running()

    def _running(self) -> bool:
        """Whether anything runs here still; reaps what does not."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        return bool(descendants_of({os.getpid()}))


def main(directory: str, ready_fd: str) -> None:
    """Is a host until it is to end."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_name("regrow-host")
    become_subreaper()
    Agent(Path(directory), int(ready_fd)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
