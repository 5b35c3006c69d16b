"""A job's side of the resource manager's socket: what it was told, over all lives of the manager.

The connection ends when the manager is killed; the next manager is told what the job believes, and
what the last one has not confirmed is said again. Nothing here waits: `step` is called when `fileno`
is readable, or `next_at` has come.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

from regrow.control import ControlConnection, error_from_json
from regrow.errors import ControlError, NoClusterError, RegrowError
from regrow.jobs.service import SOCKET_NAME
from regrow.jobs.store import STATE_NAME

_RETRY_S: Final = 0.1
_CALL_S: Final = 10.0
_NEXT_MANAGER_S: Final = 10.0
_WHO: Final = "resource manager"


@final
class Tenancy:
    """What a job was told. No I/O.

    Attributes:
        leases: Index and incarnation of each of its slices, by rank.
        attempt: The latest that it was started for; 0: none.
        suspended: Whether its state is in storage, and it has no slices.
    """

    def __init__(self) -> None:
        self.leases: dict[int, tuple[int, int]] = {}
        self.attempt = 0
        self.suspended = False
        self._newest: dict[int, int] = {}
        self._leaving: set[tuple[int, int]] | None = None

    def take(self, instruction: Mapping[str, Any]) -> bool:
        """Takes an instruction; whether it tells anything new."""
        match instruction["kind"]:
            case "Grant":
                return self._granted(instruction)
            case "Withdraw":
                return self._drop(instruction["index"], instruction["incarnation"])
            case "AskBack":
                place = (instruction["index"], instruction["incarnation"])
                return any(place == lease for lease in self.leases.values())
            case "Start":
                fresh: bool = instruction["attempt"] > self.attempt
                self.attempt = max(self.attempt, instruction["attempt"])
                return fresh
            case "Stop" if instruction["attempt"] == self.attempt:
                # What is granted from now on is for the next attempt.
                self._leaving = set(self.leases.values())
                return True
            case _:
                return bool(instruction["attempt"] == self.attempt)

    def lost(self, index: int, incarnation: int) -> bool:
        """A slice of its own is lost, or was given back; whether it was leased until now."""
        return self._drop(index, incarnation)

    def ended(self) -> None:
        """The present attempt has ended, and with it its leases."""
        self.suspended = False
        leaving, self._leaving = self._leaving, None
        for rank, place in list(self.leases.items()):
            if leaving is None or place in leaving:
                del self.leases[rank]

    def _granted(self, grant: Mapping[str, Any]) -> bool:
        rank, index, incarnation = grant["rank"], grant["index"], grant["incarnation"]
        if incarnation <= self._newest.get(index, 0):
            return False
        self._newest[index] = incarnation
        self.leases[rank] = (index, incarnation)
        return True

    def _drop(self, index: int, incarnation: int) -> bool:
        for rank, place in list(self.leases.items()):
            if place == (index, incarnation):
                del self.leases[rank]
                return True
        return False


@final
class Tenant:
    """A job that is connected to a resource manager.

    Attributes:
        name: The job.
        tenancy: What it was told.
        next_at: When `step` must be called at the latest, by the monotonic clock; None: only when
            there is something to read.
    """

    def __init__(self, directory: Path) -> None:
        """Connects.

        Raises:
            NoClusterError: If no manager listens in that directory.
        """
        self.name = ""
        self.tenancy = Tenancy()
        self.next_at: float | None = None
        self._path = directory / SOCKET_NAME
        # It can be waited for itself, whichever connection there is.
        self._selector = selectors.EpollSelector()
        self._unconfirmed: dict[int, dict[str, Any]] = {}
        self._numbers = itertools.count(1)
        self._connection: ControlConnection | None = None
        try:
            self._first_connect()
        except NoClusterError:
            self._selector.close()
            raise

    def __enter__(self) -> Tenant:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection: the job is withdrawn."""
        if self._connection is not None:
            self._connection.close()
        self._selector.close()

    def fileno(self) -> int:
        """What to wait on."""
        return self._selector.fileno()

    def submit(self, spec: dict[str, Any]) -> None:
        """Submits the job.

        Raises:
            UsageError: If the manager refuses it.
            NoClusterError: If the manager is gone.
        """
        while True:
            if self._connection is None:
                self._first_connect()
            assert self._connection is not None
            try:
                self._connection.call("submit", spec=spec)
            except ControlError:
                # It died over it. The next one takes the same job twice as once.
                self._lost_connection()
                continue
            self.name = spec["name"]
            return

    def status(self) -> dict[str, Any] | None:
        """What the manager knows; None where it does not answer now."""
        with contextlib.suppress(ControlError):
            if self._connection is not None:
                told: dict[str, Any] = self._connection.call("status", timeout_s=_CALL_S)
                return told
        self._lost_connection()
        return None

    def own_status(self) -> dict[str, Any] | None:
        """What the manager knows of the job, {} if it has ended; None where it does not answer."""
        status = self.status()
        if status is None:
            return None
        return next((job for job in status["jobs"] if job["name"] == self.name), {})

    def slices(self) -> list[dict[str, Any]]:
        """The shape of each slice of the cluster.

        Raises:
            ControlError: If the manager is gone.
        """
        return [one["shape_of"] for one in self._status()["slices"]]

    def spares(self) -> int:
        """How many idle slices of each shape are kept for jobs that have lost one.

        Raises:
            ControlError: If the manager is gone.
        """
        spares: int = self._status()["spares"]
        return spares

    def names(self) -> set[str]:
        """The jobs that there are.

        Raises:
            ControlError: If the manager is gone.
        """
        return {job["name"] for job in self._status()["jobs"]}

    def _status(self) -> dict[str, Any]:
        status = self.status()
        if status is None:
            raise ControlError("the resource manager is gone")
        return status

    def ended(self, *, ok: bool, cause: str, attempt: int | None) -> None:
        """Tells that an attempt has ended, or, with None, the job as a whole."""
        self.tenancy.ended()
        self.tell("JobEnded", name=self.name, ok=ok, cause=cause, attempt=attempt)

    def suspended(self) -> None:
        """Tells that the state of the present attempt is in storage, and its slices are left."""
        self.tenancy.ended()
        self.tenancy.suspended = True
        self.tell("JobSuspended", name=self.name, attempt=self.tenancy.attempt)

    def patience(self, longest_s: float) -> float:
        """How long there is nothing to do unless `fileno` is readable, at most `longest_s`."""
        if self.next_at is None:
            return longest_s
        return min(longest_s, max(0.0, self.next_at - time.monotonic()))

    def tell(self, kind: str, **fields: Any) -> None:
        """Tells an event; told again to the next manager if this one does not confirm it."""
        self._send({"kind": kind} | fields)

    def step(self) -> list[dict[str, Any]]:
        """Reads what there is; returns the instructions that are new, in order."""
        if self._connection is None and (self.patience(1.0) > 0 or not self._connect()):
            return []
        assert self._connection is not None
        try:
            events, answers = self._connection.take()
        except (ControlError, json.JSONDecodeError):
            self._lost_connection()
            return []
        for answer in answers:
            self._confirmed(answer)
        told: list[Any] = list(events)
        return [one for one in told if self.tenancy.take(one)]

    def _first_connect(self) -> None:
        """Connects; waits for the next manager where one has been.

        Raises:
            NoClusterError: If there is none, and none comes.
        """
        deadline = time.monotonic() + _NEXT_MANAGER_S
        while True:
            try:
                self._use(ControlConnection(str(self._path), who=_WHO))
            except NoClusterError:
                was_here = self._path.with_name(STATE_NAME).exists()
                if not was_here or time.monotonic() > deadline:
                    text = f"no shared cluster answers at {self._path}"
                    raise NoClusterError(text) from None
                time.sleep(_RETRY_S)
            else:
                return

    def _use(self, connection: ControlConnection) -> None:
        self._connection, self.next_at = connection, None
        self._selector.register(connection, selectors.EVENT_READ)

    def _send(self, event: dict[str, Any]) -> None:
        number = -next(self._numbers)
        if self._connection is not None:
            try:
                number = self._connection.send("tell", event=event)
            except ControlError:
                self._lost_connection()
        self._unconfirmed[number] = event

    def _confirmed(self, answer: dict[str, Any]) -> None:
        self._unconfirmed.pop(answer.get("id") or 0, None)
        if "error" in answer:
            raise error_from_json(answer["error"])

    def _lost_connection(self) -> None:
        if self._connection is not None:
            self._selector.unregister(self._connection)
            self._connection.close()
            self._connection = None
        self.next_at = time.monotonic() + _RETRY_S

    def _connect(self) -> bool:
        """Tells another manager what the job believes; whether there is one."""
        self.next_at = time.monotonic() + _RETRY_S
        if not self._path.parent.is_dir():
            raise NoClusterError(f"the cluster that job {self.name!r} runs on is gone")
        try:
            connection = ControlConnection(str(self._path), who=_WHO)
        except NoClusterError:
            return False
        try:
            connection.call(
                "report",
                timeout_s=_CALL_S,
                name=self.name,
                attempt=self.tenancy.attempt,
                suspended=self.tenancy.suspended,
                leases=list(self.tenancy.leases.values()),
            )
        except RegrowError:
            # It has died again, or still holds our last connection to be alive.
            connection.close()
            return False
        self._use(connection)
        unconfirmed, self._unconfirmed = list(self._unconfirmed.values()), {}
        for event in unconfirmed:
            self._send(event)
        return True


def place_of(address: str) -> Path | None:
    """The directory of a resource manager that is named by its socket or directory; None: by a name."""
    path = address.removeprefix("unix:")
    if os.sep not in path:
        return None
    found = Path(path)
    return found.parent if found.name == SOCKET_NAME else found
