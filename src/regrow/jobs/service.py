"""The resource manager's Unix socket: jobs, hosts and operators on one side, the manager on the other.

Lines of JSON as on the head's control socket (see `regrow.control`). A job's connection is made by
`submit` or `report`, that of hosts by `slice`; instructions come as `{"event": {...}}`. A connection
that ends takes its job or its slices with it: over a Unix socket it ends with the process.

| method | params | who |
|---|---|---|
| submit | spec; its priority is that of priority_class | a job |
| report | what a `JobReport` has | a job, to a manager that was restarted |
| slice | what a `SliceReport` has | hosts |
| tell | event: kind and fields, of the connection's own job or slices | a job, hosts |
| suspend, resume, cancel | name | an operator |
| watch | changes come as events of the kind `Change` | an operator |
| status, shutdown | | an operator |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, final

from regrow.control_aio import LineServer, Peer
from regrow.errors import ClusterError, UsageError
from regrow.jobs.codec import build, decode_event, encode
from regrow.jobs.manager import Manager
from regrow.jobs.model import (
    Event,
    Fence,
    Instruction,
    JobEnded,
    JobReport,
    JobSpec,
    JobSubmitted,
    Policy,
    ResumeRequested,
    SliceFailed,
    SliceIdle,
    SliceReport,
    SuspendRequested,
    name_taken,
)
from regrow.jobs.priorities import NO_CLASS, PriorityClasses
from regrow.jobs.records import shallow
from regrow.jobs.store import Store

logger = logging.getLogger(__name__)

SOCKET_NAME: Final = "jobs.sock"
_MAX_PEERS: Final = 1024


@dataclass(eq=False, slots=True)
class _Peer:
    """A connection, and whom it speaks for."""

    connection: Peer
    job: str | None = None
    slices: set[int] = field(default_factory=set)


@final
class Service:
    """A manager with its store and its socket, in one asyncio loop.

    Attributes:
        ended: Set when it is to end: it was asked to, or its state could not be written.
        error: Why its state could not be written.
    """

    def __init__(self, store: Store, policy: Policy, classes: PriorityClasses) -> None:
        """Goes on from the store's state, if there is one.

        Raises:
            ClusterError: If that state cannot be read.
        """
        self.ended = asyncio.Event()
        self.error: ClusterError | None = None
        self._store = store
        self._classes = classes
        self._peers: dict[Peer, _Peer] = {}
        self._watchers: set[Peer] = set()
        self._jobs: dict[str, _Peer] = {}
        self._hosts: dict[int, _Peer] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._server = LineServer(
            store.path.with_name(SOCKET_NAME), self._do, gone=self._gone, connections=_MAX_PEERS
        )
        state, changes = store.load(policy.changes)
        if state is None:
            self._manager = Manager(policy)
            return
        try:
            self._manager, _ = Manager.recover(state, time.time(), policy, changes)
        except (ValueError, TypeError, KeyError) as error:
            raise ClusterError(f"the resource manager's state {store.path}: {error!r}") from None

    async def start(self) -> None:
        """Begins to listen."""
        self._commit(())
        # The store is ours alone, so a socket that is there is a dead manager's.
        await self._server.start()

    def close(self) -> None:
        """Ends all connections; what they stand for goes on, for the next manager."""
        if self._timer is not None:
            self._timer.cancel()
        self.ended.set()
        self._server.stop()

    # --- the manager ---

    def _take(self, event: Event) -> None:
        self._commit(self._manager.handle(event, time.time()))

    def _tick(self) -> None:
        self._commit(self._manager.tick(time.time()))

    def _commit(self, instructions: Iterable[Instruction]) -> None:
        """Writes the new state down, then says what follows from it."""
        try:
            changes = self._manager.take_changes()
            self._store.save(self._manager.to_json(), changes)
        except ClusterError as error:
            # What is not written down must not be said, and the next event would be as bad.
            logger.exception("the state cannot be written")
            self.error = error
            self.ended.set()
            raise
        for watcher in self._watchers:
            for change in changes:
                watcher.tell({"kind": "Change"} | shallow(change))
        for instruction in instructions:
            if isinstance(instruction, Fence):
                peer = self._hosts.get(instruction.index)
            else:
                peer = self._jobs.get(instruction.job)
            # Whoever is not there hears of it when it reports.
            if peer is not None:
                peer.connection.tell(encode(instruction))
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._manager.deadline()
        if due is not None:
            delay_s = max(0.0, due - time.time())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    # --- connections ---

    def _gone(self, connection: Peer) -> None:
        peer = self._peers.pop(connection, None)
        self._watchers.discard(connection)
        # At our own end it is we who have gone.
        if peer is not None and not self.ended.is_set():
            with contextlib.suppress(ClusterError):
                self._forget(peer)

    def _forget(self, peer: _Peer) -> None:
        for index in sorted(peer.slices):
            if self._hosts.get(index) is peer:
                del self._hosts[index]
                self._take(SliceFailed(index, self._incarnation(index), "its hosts are gone"))
        if peer.job is not None and self._jobs.get(peer.job) is peer:
            del self._jobs[peer.job]
            self._take(JobEnded(peer.job, ok=False, cause="its process is gone"))

    def _incarnation(self, index: int) -> int:
        slices = self._manager.status()["slices"]
        return next((one["incarnation"] for one in slices if one["index"] == index), 0)

    def _do(self, connection: Peer, method: str, params: dict[str, Any]) -> Any:
        peer = self._peers.setdefault(connection, _Peer(connection))
        match method:
            case "submit":
                self._submit(peer, params)
            case "report":
                report = build(JobReport, params)
                self._adopt(peer, report.name)
                self._take(report)
            case "slice":
                self._slice(peer, build(SliceReport, params))
            case "tell":
                self._tell(peer, params.get("event"))
            case "suspend":
                self._take(build(SuspendRequested, params))
            case "resume":
                self._take(build(ResumeRequested, params))
            case "cancel":
                self._take(JobEnded(str(params.get("name")), ok=False, cause="cancelled"))
            case "status":
                return self._manager.status()
            case "watch":
                self._watchers.add(connection)
            case "shutdown":
                # The answer goes out first.
                asyncio.get_running_loop().call_soon(self.ended.set)
            case _:
                raise UsageError(f"the resource manager has no method {method!r}")
        return None

    def _submit(self, peer: _Peer, params: dict[str, Any]) -> None:
        asked = params.get("spec")
        if not isinstance(asked, dict):
            raise UsageError("the specification of a job is no JSON object")
        found = self._classes.find(asked.get("priority_class"))
        given = asked | {"priority": found.value, "preempts": found.preempts}
        if found is not NO_CLASS:
            # The global default is told by its name, as Kubernetes does.
            given["priority_class"] = found.name
        spec = build(JobSpec, given)
        had = peer.job
        if self._jobs.get(spec.name, peer) is not peer:
            raise name_taken(spec.name)
        self._adopt(peer, spec.name)
        try:
            self._take(JobSubmitted(spec))
        except UsageError:
            if had is None:
                peer.job = None
                del self._jobs[spec.name]
            raise

    def _adopt(self, peer: _Peer, name: str) -> None:
        if peer.job is not None and peer.job != name:
            raise UsageError(f"this connection is that of job {peer.job!r}")
        if self._jobs.get(name, peer) is not peer:
            raise UsageError(f"job {name!r} is connected already")
        peer.job = name
        self._jobs[name] = peer

    def _slice(self, peer: _Peer, report: SliceReport) -> None:
        if self._hosts.get(report.index, peer) is not peer:
            raise UsageError(f"slice {report.index} is connected already")
        peer.slices.add(report.index)
        self._hosts[report.index] = peer
        self._take(report)

    def _tell(self, peer: _Peer, message: object) -> None:
        event = decode_event(message if isinstance(message, dict) else {})
        if isinstance(event, SliceFailed | SliceIdle | SliceReport):
            # A job reports its own slices' failures, too: it is the first to notice.
            known = event.index in peer.slices or (
                isinstance(event, SliceFailed) and peer.job is not None
            )
            if not known:
                raise UsageError(f"slice {event.index} is not of this connection")
        else:
            name = event.spec.name if isinstance(event, JobSubmitted) else event.name
            if peer.job != name or isinstance(event, JobSubmitted):
                raise UsageError(f"job {name!r} is not of this connection")
        self._take(event)
