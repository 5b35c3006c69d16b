"""A command on all hosts at once, again and again: for experiments."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Final, Protocol, final

from regrow.cloud.remote.fanout import FailFast, Result, Stream, Watch, run_everywhere
from regrow.cloud.remote.sessions import LOST_STATUS, Session, Shell, SshShell
from regrow.cloud.remote.targets import Host
from regrow.errors import UsageError
from regrow.multihost import scripts
from regrow.multihost.package import Package

_RUN_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,99}")
_CUT_AFTER_S: Final = scripts.GRACE_S + 5.0
# A host that has just been made, or told of a key, may not answer yet.
_SSH_TRIES: Final = 6
_SSH_PAUSE_S: Final = 5.0


def now_name() -> str:
    """A name for a run that begins now."""
    return datetime.now().astimezone().strftime("%Y-%m-%d-%H-%M-%S")


def check_run_name(name: str) -> str:
    """Returns a name that a folder can have.

    Raises:
        UsageError: If it may not.
    """
    if not _RUN_NAME.fullmatch(name):
        raise UsageError(f"--run-name={name}: letters, digits, '_', '.' and '-' only, please")
    return name


class Screen(Watch, Protocol):
    """What is shown of a run."""

    def phase(self, name: str, hosts: Sequence[Host]) -> None:
        """Something begins on all hosts."""

    def line(self, host: Host, stream: Stream, line: bytes) -> None:
        """A host has printed a line."""


@final
@dataclass(frozen=True, slots=True)
class Run:
    """What is to be done.

    Attributes:
        hosts: Where.
        shell: How they are reached.
        name: Of the run, and of its folder on the hosts.
        command: What runs there.
        package: The folder; None: it is there already.
        logs: Where the output of each host is kept.
        id: Of this run and no other.
    """

    hosts: Sequence[Host]
    shell: Shell
    name: str
    command: str
    package: Package | None
    logs: Path
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def _devices(self) -> Sequence[str]:
        # The devices of this machine have nothing to do with local hosts.
        return scripts.DEVICES if isinstance(self.shell, SshShell) else ()

    def prepare(self, screen: Screen) -> list[Result]:
        """Ends what the last run has left on the hosts, and copies the folder to them."""
        package = self.package
        script = scripts.prepare(self.name, unpack=package is not None, devices=self._devices)

        def launch(host: Host, streams: Sequence[int]) -> Session:
            nowhere, *outputs = streams
            if package is None:
                return self.shell.start(host, script, [nowhere, *outputs])
            with package.reader() as reader:
                return self.shell.start(host, script, [reader, *outputs])

        def attempt(hosts: Sequence[Host]) -> list[Result]:
            return run_everywhere(hosts, launch, len(hosts), screen.line, watch=screen)

        screen.phase("copy" if package else "prepare", self.hosts)
        results = {one.host: one for one in attempt(self.hosts)}
        for _ in range(_SSH_TRIES - 1 if isinstance(self.shell, SshShell) else 0):
            lost = [host for host, one in results.items() if one.status == LOST_STATUS]
            if not lost:
                break
            time.sleep(_SSH_PAUSE_S)
            results |= {one.host: one for one in attempt(lost)}
        return [results[host] for host in self.hosts]

    def execute(self, screen: Screen) -> list[Result]:
        """Runs the command everywhere; the first failure ends it everywhere."""
        script = scripts.run(self.name, self.command, self._variables(), self.id)
        with _lifeline() as (reader, cut), _logs(self.logs, self.hosts) as log:

            def tell(host: Host, stream: Stream, line: bytes) -> None:
                log(host, line)
                screen.line(host, stream, line)

            screen.phase("command", self.hosts)
            return run_everywhere(
                self.hosts,
                lambda host, streams: self.shell.start(host, script, [reader, *streams[1:]]),
                len(self.hosts),
                tell,
                fail_fast=FailFast(cut, _CUT_AFTER_S),
                watch=screen,
            )

    def sweep(self, screen: Screen) -> list[Result]:
        """Makes sure that nothing of the run is left on the hosts."""
        script = scripts.sweep(self.id)
        screen.phase("end", self.hosts)
        return run_everywhere(
            self.hosts,
            lambda host, streams: self.shell.start(host, script, streams),
            len(self.hosts),
            screen.line,
            watch=screen,
        )

    def _variables(self) -> dict[str, str]:
        # What Python prints into a pipe would else be seen only at its end.
        return {"REGROW_RUN_NAME": self.name, "PYTHONUNBUFFERED": "1"}


def log_name(host: Host) -> str:
    """Name of the file that keeps what a host prints."""
    return f"{host.node}-worker-{host.worker}.log"


@contextmanager
def _logs(directory: Path, hosts: Sequence[Host]) -> Iterator[Callable[[Host, bytes], None]]:
    """A log file for each host."""
    with ExitStack() as stack:
        directory.mkdir(parents=True, exist_ok=True)
        files: dict[Host, BinaryIO] = {
            host: stack.enter_context((directory / log_name(host)).open("wb", buffering=0))
            for host in hosts
        }
        yield lambda host, line: (files[host].write(line), None)[1]


@contextmanager
def _lifeline() -> Iterator[tuple[int, Callable[[], None]]]:
    """A pipe that ends with this process, or when it is cut: then what hangs on it ends, too."""
    reader, writer = os.pipe()
    held = [writer]

    def cut() -> None:
        while held:
            os.close(held.pop())

    try:
        yield reader, cut
    finally:
        cut()
        os.close(reader)
