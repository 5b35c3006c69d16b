"""Files to and from hosts: scp."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from regrow.cloud.remote.sessions import LocalShell, Session, SshShell, start_program
from regrow.cloud.remote.targets import Host
from regrow.errors import UsageError


@final
@dataclass(frozen=True, slots=True)
class RemotePath:
    """A file or directory, as scp has it: `[[USER@]NAME:]PATH`.

    Attributes:
        name: The queued resource or node; empty: this machine.
        user: The account there.
        path: Where it is there.
    """

    name: str
    user: str
    path: str

    @classmethod
    def of(cls, text: str) -> RemotePath:
        """Reads one; a path of this machine that has a colon begins with / or ./."""
        name, colon, path = text.partition(":")
        if not colon or "/" in name:
            return cls("", "", text)
        user, _, name = name.rpartition("@")
        return cls(name, user, path)


@final
@dataclass(frozen=True, slots=True)
class Transfer:
    """What is copied.

    Attributes:
        sources: What.
        target: Where to.
        recurse: Whether directories are copied, too.
        compress: Whether the connection compresses.
        flags: Further arguments of scp.
    """

    sources: tuple[RemotePath, ...]
    target: RemotePath
    recurse: bool = False
    compress: bool = False
    flags: tuple[str, ...] = ()

    @property
    def remote(self) -> RemotePath:
        """The end that is not on this machine.

        Raises:
            UsageError: If there is none, or there are several.
        """
        names = {(place.name, place.user) for place in (*self.sources, self.target) if place.name}
        sides = {bool(place.name) for place in self.sources}
        if len(names) != 1 or len(sides) != 1 or sides == {bool(self.target.name)}:
            raise UsageError(
                "scp copies from this machine to the hosts of one resource, or back: "
                "name it at one end, as NAME:PATH"
            )
        return self.target if self.target.name else self.sources[0]

    @property
    def is_download(self) -> bool:
        """Whether it goes to this machine."""
        return not self.target.name

    def start(self, shell: LocalShell | SshShell, host: Host, streams: Sequence[int]) -> Session:
        """Copies to or from a host."""
        if isinstance(shell, LocalShell):
            return shell.start(host, self._cp(), streams)
        return start_program(self._scp(shell, host), streams)

    def describe(self, shell: LocalShell | SshShell, host: Host) -> str:
        """What `start` would do, as a command line."""
        if isinstance(shell, LocalShell):
            return shell.describe(host, self._cp())
        return shlex.join(self._scp(shell, host))

    def _cp(self) -> str:
        """A local host sees the files of this machine, so that it can copy by itself."""
        paths = [*self.sources, self.target]
        words = " ".join(_on_local_host(place) for place in paths)
        return f"cp {'-R ' if self.recurse else ''}-- {words}"

    def _scp(self, shell: SshShell, host: Host) -> list[str]:
        flags = ["-r"] * self.recurse + ["-C"] * self.compress + list(self.flags)
        ends = [
            f"{shell.destination(host)}:{place.path}" if place.name else place.path
            for place in (*self.sources, self.target)
        ]
        return ["scp", *shell.options(), "-o", "BatchMode=yes", *flags, "--", *ends]


def _on_local_host(place: RemotePath) -> str:
    """A path as the shell of a local host, in its home directory, has it."""
    if not place.name:
        # A slash at the end means a directory, which Path would forget.
        return shlex.quote(f"{Path(place.path).absolute()}{'/' * place.path.endswith('/')}")
    path = place.path.removeprefix("~/") if place.path != "~" else ""
    return shlex.quote(path) if path else "."
