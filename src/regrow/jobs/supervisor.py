"""The processes of a shared cluster: the resource manager and the machines.

Each of them is started again when it ends. A manager goes on where the last one was; with the machines
the slices' processes end, and come back as slices that nobody uses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, final

from regrow.config import HeadConfig
from regrow.control import request
from regrow.errors import (
    ClusterError,
    ClusterStartError,
    ControlError,
    NoClusterError,
    WaitTimeout,
)
from regrow.home import ClusterState, Home
from regrow.processes import Child, end_run, python_argv, server_environ, spawn
from regrow.supervise import last_words, start_watched

MANAGER_MODULE: Final = "regrow.jobs"
MACHINES_MODULE: Final = "regrow.jobs.machines"
_LOOK_S: Final = 0.02
_TELL_EVERY_S: Final = 10.0
_END_S: Final = 5.0
_HOPELESS: Final = 5
_LIVED_S: Final = 10.0
_KILLED: Final = 128 + signal.SIGKILL


@final
class _Kept:
    """A process that is started again when it ends."""

    def __init__(self, name: str, start: Callable[[], Child]) -> None:
        self.name = name
        self._start = start
        self._failures = 0
        self._began_at = time.monotonic()
        self.child = start()

    def again(self, config: HeadConfig) -> str:
        """Starts it again, for it has ended; returns how.

        Raises:
            ClusterError: It has ended by itself too often, soon after its start.
        """
        cause = self.child.wait(1.0)
        lived_s = time.monotonic() - self._began_at
        if self.child.status == _KILLED:
            self._failures = 0  # That was done to it, and says nothing of the next one.
        else:
            self._failures = self._failures + 1 if lived_s < _LIVED_S else 1
        if self._failures >= _HOPELESS or self.child.status in (2, 3):
            raise ClusterError(f"the {self.name} ended ({cause}){last_words(config, self.name)}")
        self._began_at = time.monotonic()
        self.child = self._start()
        return str(cause)


@final
class SharedSupervisor:
    """A shared cluster that this process has started and watches over.

    Attributes:
        config: What the machines were told.
        state: The cluster's entry in its home.
    """

    def __init__(
        self,
        home: Home,
        state: ClusterState,
        config: HeadConfig,
        options: Sequence[str],
        *,
        warm: bool,
    ) -> None:
        """Starts its processes; does not wait for them.

        Args:
            home: Where the cluster is entered.
            state: Its entry there, as `Home.claim` returned it.
            config: What the machines are like.
            options: Of the manager's command line.
            warm: Whether spares are warm.
        """
        self._home = home
        self._options = tuple(options)
        self._arguments = () if warm else ("--cold",)
        self._lifelines: list[int] = []
        self.config = config
        self.state = dataclasses.replace(state, shared=True)
        home.update(self.state)
        Path(config.log_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._kept = (
                _Kept("manager", self._start_manager),
                _Kept("machines", self._start_machines),
            )
        except OSError as error:
            self.close()
            raise ClusterStartError(f"cannot start the shared cluster: {error}") from None

    def __enter__(self) -> SharedSupervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def watched(self) -> list[int]:
        """Descriptors of its processes; one of them is readable when that has ended."""
        return [kept.child.fd for kept in self._kept]

    @property
    def pids(self) -> dict[str, int]:
        """The process ids of the manager and the machines."""
        return {kept.name: kept.child.pid for kept in self._kept}

    def mend(self) -> list[str] | None:
        """Starts again what has ended; returns what is to be said about it.

        None: the manager was asked to end, and so does the cluster.

        Raises:
            ClusterError: If one of them ends again and again.
        """
        lines = []
        for kept in self._kept:
            if kept.child.poll() is None:
                continue
            if kept.child.cause == "exit status 0":
                return None
            cause = kept.again(self.config)
            lines.append(f"the {kept.name} ended ({cause}); it is started again")
        return lines

    def wait_idle(self, timeout_s: float, *, tell: Callable[[str], None]) -> None:
        """Waits until every slice is there.

        Raises:
            ClusterStartError: If a process ended, or they are not at the deadline.
        """
        began_at = told_at = time.monotonic()
        while True:
            slices = self._slices()
            there = sum(one["state"] == "idle" for one in slices)
            if there == self.config.slices:
                return
            for kept in self._kept:
                if kept.child.poll() is not None:
                    why = last_words(self.config, kept.name)
                    raise ClusterStartError(f"the {kept.name} did not start{why}")
            what = f"all slices ({there} of {self.config.slices} are there)"
            if time.monotonic() - began_at > timeout_s:
                raise ClusterStartError(str(WaitTimeout(what, timeout_s)))
            if time.monotonic() - told_at > _TELL_EVERY_S:
                told_at = time.monotonic()
                tell(f"still waiting for {what}")
            time.sleep(_LOOK_S)

    def _slices(self) -> list[dict[str, Any]]:
        with contextlib.suppress(ControlError, NoClusterError):
            slices: list[dict[str, Any]] = request(self.state.control_socket, "status")["slices"]
            return slices
        return []

    def close(self) -> None:
        """Ends all its processes and removes what it has left."""
        children = [kept.child for kept in getattr(self, "_kept", ())]
        for child in children:
            child.send(signal.SIGTERM)
        for child in children:
            child.wait(_END_S)
        for lifeline in self._lifelines:
            os.close(lifeline)
        self._lifelines.clear()
        end_run(self.state.run_id)
        for child in children:
            child.wait(_END_S)
        self._home.release(self.state)

    def _start_manager(self) -> Child:
        argv = python_argv(
            MANAGER_MODULE, self.state.socket_dir, "--parent", str(os.getpid()), *self._options
        )
        with Path(self.config.log_dir, "manager.log").open("ab") as log:
            environ = server_environ(os.environ, self.config.run_id)
            return Child(spawn(argv, environ, output=log.fileno()))

    def _start_machines(self) -> Child:
        child, lifeline = start_watched(
            self.config, os.environ, MACHINES_MODULE, "machines", *self._arguments
        )
        self._lifelines.append(lifeline)
        return child
