"""A resource manager as a process, and hosts and jobs that talk to it over its socket."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from regrow.control import ControlConnection
from regrow.errors import ControlError, NoClusterError
from waiting import until

SHAPE = {"platform": "cpu", "hosts": 1, "devices": 2}


class Process:
    """`python -m regrow.jobs`, started, killed and started again."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.directory = directory
        self.options = options
        self.running: subprocess.Popen[str] | None = None
        self.start()

    @property
    def socket(self) -> str:
        return str(self.directory / "jobs.sock")

    def start(self) -> None:
        self.running = subprocess.Popen(
            [sys.executable, "-m", "regrow.jobs", str(self.directory), *self.options],
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        assert self.running is not None
        self.running.send_signal(number)
        self.running.communicate(timeout=30)
        return self.running.returncode

    def connect(self, timeout_s: float = 30) -> ControlConnection:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return ControlConnection(self.socket)
            except NoClusterError:
                assert time.monotonic() < deadline, "the manager does not listen"
                assert self.running is not None
                assert self.running.poll() is None, self.running.communicate()[1]
                time.sleep(0.01)


class Peer:
    """One side of the conversation: hosts of all slices, or a job."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.connection = process.connect()

    def call(self, method: str, **params: Any) -> Any:
        return self.connection.call(method, **params)  # type: ignore[arg-type]

    def tell(self, kind: str, **fields: Any) -> None:
        self.call("tell", event={"kind": kind} | fields)

    def take(self) -> list[dict[str, Any]]:
        return self.connection.take()[0]  # type: ignore[return-value]

    def close(self) -> None:
        self.connection.close()

    def until(self, kind: str, timeout_s: float = 20) -> dict[str, Any]:
        """The next instruction of that kind."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            found.extend(one for one in self.take() if one["kind"] == kind)
            return bool(found)

        until(look, timeout_s=timeout_s)
        return found[0]


class FakeHosts(Peer):
    """The hosts of all slices: they obey every fence at once."""

    def __init__(self, process: Process, slices: int) -> None:
        super().__init__(process)
        self.fenced: dict[int, int] = {}
        for index in range(slices):
            self.call("slice", index=index, shape=SHAPE)

    def obey(self) -> None:
        for one in self.take():
            assert one["kind"] == "Fence"
            self.fenced[one["index"]] = max(one["incarnation"], self.fenced.get(one["index"], 0))
            self.tell("SliceIdle", index=one["index"], incarnation=one["incarnation"])


class FakeJob(Peer):
    """A job: it takes grants, gives back what it is asked for, and remembers what it was told."""

    def __init__(self, process: Process, name: str, **spec: Any) -> None:
        super().__init__(process)
        self.name = name
        self.leases: dict[int, int] = {}
        self.newest: dict[int, int] = {}
        self.attempt = 0
        self.suspended = False
        self.call("submit", spec={"name": name, "shape": SHAPE} | spec)

    def report(self) -> None:
        """Connects to a manager that was restarted."""
        self.connection.close()
        self.connection = self.process.connect()
        self.call(
            "report",
            name=self.name,
            attempt=self.attempt,
            suspended=self.suspended,
            leases=list(self.leases.items()),
        )

    def obey(self) -> None:
        for one in self.take():
            match one["kind"]:
                case "Grant" if one["incarnation"] >= self.newest.get(one["index"], 0):
                    self.newest[one["index"]] = one["incarnation"]
                    self.leases[one["index"]] = one["incarnation"]
                case "Withdraw" if self.leases.get(one["index"]) == one["incarnation"]:
                    del self.leases[one["index"]]
                case "Start" if one["attempt"] > self.attempt:
                    assert one["restore"] == self.suspended
                    self.attempt, self.suspended = one["attempt"], False
                case "Suspend" if one["attempt"] == self.attempt:
                    self.leases.clear()
                    self.suspended = True
                    self.tell("JobSuspended", name=self.name, attempt=self.attempt)


def works(do: Callable[[], object]) -> bool:
    """Does it; False where the manager has gone meanwhile."""
    try:
        do()
    except ControlError:
        return False
    return True
