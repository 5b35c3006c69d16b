"""One command on one host: on a local host through its agent, on a real one through OpenSSH."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, final

from regrow.cloud.hosts.exec_server import LARGEST_COMMAND_BYTES, is_friend, socket_name
from regrow.cloud.remote.targets import Host
from regrow.errors import LaunchError, UnsupportedError, UsageError
from regrow.processes import Child, spawn

LOST_STATUS: Final = 255
"""Of a command whose host was lost, or could not be reached; as ssh has it."""

_SMALLEST_BUFFER_BYTES: Final = 2 * LARGEST_COMMAND_BYTES
_CONNECT_S: Final = 10.0
_END_S: Final = 2.0


class Session(Protocol):
    """A command that runs on a host."""

    def fileno(self) -> int:
        """A descriptor that is readable when the command has ended."""

    def finish(self) -> int | None:
        """Its exit status, once the descriptor is readable; None if it has not ended yet."""

    def end(self) -> None:
        """Ends it, if it runs still."""


class Shell(Protocol):
    """A way to run commands on hosts."""

    def start(self, host: Host, command: str, streams: Sequence[int]) -> Session:
        """Starts a command with these as standard input, output and error.

        Raises:
            LaunchError: If the host cannot be reached.
        """

    def describe(self, host: Host, command: str) -> str:
        """What `start` would do, as a command line."""


@final
class LocalShell:
    """Runs commands through the agents of local hosts."""

    def start(self, host: Host, command: str, streams: Sequence[int]) -> Session:
        """See `Shell`."""
        packet = json.dumps({"command": command}).encode()
        if len(packet) > LARGEST_COMMAND_BYTES:
            raise UsageError(f"a command may have {LARGEST_COMMAND_BYTES} bytes, not {len(packet)}")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(_CONNECT_S)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SMALLEST_BUFFER_BYTES)
            connection.connect(socket_name(host.address))
            if not is_friend(connection):
                raise LaunchError(f"{host.address} is held by another user's process")
            socket.send_fds(connection, [packet], list(streams))
        except OSError as error:
            connection.close()
            raise LaunchError(
                f"{host.label} ({host.address}) takes no commands: {error.strerror or error}; "
                "are its slices simulated, or on another machine?"
            ) from None
        except BaseException:
            connection.close()
            raise
        return _LocalSession(connection)

    def describe(self, host: Host, command: str) -> str:
        """See `Shell`."""
        return f"on {host.node} worker {host.worker} ({host.address}): {command}"


@final
class _LocalSession:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def fileno(self) -> int:
        return self._connection.fileno()

    def finish(self) -> int | None:
        status = LOST_STATUS
        # The connection of a host that is lost ends without a status.
        with contextlib.suppress(OSError, ValueError, KeyError):
            status = int(json.loads(self._connection.recv(1024))["status"])
        self._connection.close()
        return status

    def end(self) -> None:
        self._connection.close()


@final
@dataclass(frozen=True, slots=True)
class SshShell:
    """Runs commands through OpenSSH.

    Attributes:
        user: Whose account; empty: what OpenSSH chooses.
        internal: Whether hosts are reached by their internal addresses.
        key_file: The private key.
        flags: Further arguments of ssh.
        strict_host_key_checking: As ssh has it: yes, no, ask or accept-new.
    """

    user: str = ""
    internal: bool = False
    key_file: str = "~/.ssh/google_compute_engine"
    flags: tuple[str, ...] = ()
    strict_host_key_checking: str = "accept-new"

    def options(self) -> list[str]:
        """What ssh and scp are told alike."""
        return [
            "-i",
            str(Path(self.key_file).expanduser()),
            "-o",
            f"StrictHostKeyChecking={self.strict_host_key_checking}",
            "-o",
            "ServerAliveInterval=15",
            *self.flags,
        ]

    def destination(self, host: Host) -> str:
        """USER@ADDRESS.

        Raises:
            LaunchError: If the host has no address that serves.
        """
        address = host.address if self.internal else host.external
        if not address:
            raise LaunchError(f"{host.label} has no external address: give --internal-ip")
        return f"{self.user}@{address}" if self.user else address

    def argv(self, host: Host, command: str) -> list[str]:
        """The command line of ssh."""
        batch = ["-T", "-o", "BatchMode=yes"] if command else []
        return [
            "ssh",
            *self.options(),
            *batch,
            self.destination(host),
            *([command] * bool(command)),
        ]

    def start(self, host: Host, command: str, streams: Sequence[int]) -> Session:
        """See `Shell`."""
        return start_program(self.argv(host, command), streams)

    def describe(self, host: Host, command: str) -> str:
        """See `Shell`."""
        return shlex.join(self.argv(host, command))


def start_program(argv: Sequence[str], streams: Sequence[int]) -> Session:
    """Starts a program of this machine as a session.

    Raises:
        UnsupportedError: If it is not installed.
    """
    program = shutil.which(argv[0])
    if program is None:
        raise UnsupportedError(f"{argv[0]} is not installed; it comes with OpenSSH")
    stdin, output, errors = streams
    pid = spawn([program, *argv[1:]], os.environ, stdin=stdin, output=output, errors=errors)
    return _ProgramSession(Child(pid))


@final
class _ProgramSession:
    def __init__(self, child: Child) -> None:
        self._child = child

    def fileno(self) -> int:
        return self._child.fd

    def finish(self) -> int | None:
        self._child.poll()
        return self._child.status

    def end(self) -> None:
        self._child.send(signal.SIGTERM)
        if self._child.wait(_END_S) is None:
            self._child.send(signal.SIGKILL)
            self._child.wait(_END_S)
