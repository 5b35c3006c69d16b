"""The head's end of the control socket (see `regrow.control`)."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Sequence
from typing import Any, Final, Protocol, final

from regrow.control import Event, EventKind
from regrow.control_aio import LineServer, Peer
from regrow.errors import UsageError
from regrow.launchers.leased import Lease

_PHASE: Final = re.compile(r"[\w-]{1,40}", re.ASCII)


class Controlled(Protocol):
    """What can be asked of a head. An index that is no slice is a `UsageError`."""

    def ping(self) -> None:
        """Does nothing: that it answers is the answer."""
        ...

    def status(self) -> dict[str, Any]:
        """All there is to know, as JSON values."""
        ...

    async def kill(self, index: int) -> None:
        """Ends a slice's processes with SIGKILL; returns when it has been declared lost."""
        ...

    def stop(self, index: int) -> Awaitable[None] | None:
        """Stops a slice's processes (SIGSTOP)."""
        ...

    def cont(self, index: int) -> Awaitable[None] | None:
        """Lets a slice's processes go on; refuses one that was declared lost meanwhile."""
        ...

    def restore(self, index: int) -> Awaitable[None] | None:
        """Begins to relaunch a lost slice."""
        ...

    async def suspend(
        self, slices: Sequence[int] | None, why: str, url: str | None
    ) -> dict[str, Any]:
        """Has slices (None: all) leave with their state saved at a URL (None: the usual place)."""
        ...

    async def resume(
        self, slices: Sequence[int] | None, timeout_s: float | None, hosts_per_slice: int | None
    ) -> dict[str, Any]:
        """Brings suspended slices (None: all) back, maybe with so many hosts each, and their state."""
        ...

    def suspend_job(self) -> None:
        """Lets clients know that the whole job is to end, with its state saved by themselves."""
        ...

    def suspend_requested(self) -> bool:
        """Whether that was asked for."""
        ...

    async def wait_healthy(self, timeout_s: float | None) -> None:
        """Returns when every slice is up; raises `WaitTimeout` at the deadline."""
        ...

    async def wait_client(self, timeout_s: float | None) -> None:
        """Returns when a client has connected; raises `WaitTimeout` at the deadline."""
        ...

    async def wait_step(self, step: int) -> None:
        """Returns when a client says that it begins this step, or a later one."""
        ...

    async def wait_phase(self, phase: str, index: int) -> None:
        """Returns when a phase of a client's work next begins that concerns this slice."""
        ...

    def fault(self, index: int, fault: str) -> None:
        """Does a fault to a slice (see `regrow.head.inflict`)."""
        ...

    def progress(self, step: int | None, phase: str | None) -> None:
        """Takes what a client says that it is doing, for the texts of losses."""
        ...

    def traced(self, began: float, ended: float) -> None:
        """Takes from when until when a client has traced programs, by the monotonic clock."""
        ...

    def timeline(self) -> dict[str, Any]:
        """Elastic events and goodput, as JSON values."""
        ...

    def lease(self, rank: int, lease: Lease) -> None:
        """Takes a lease for a slice (see `regrow.head.leases`)."""
        ...

    def withdraw(self, lease: Lease, cause: str) -> None:
        """A lease is over."""
        ...

    async def give_back(self, lease: Lease, cause: str) -> None:
        """Goes on without a lease; returns when no process is left on it."""
        ...

    def shutdown(self) -> None:
        """Begins to end the cluster."""
        ...


def make_event(
    kind: EventKind,
    *,
    slice_index: int | None = None,
    incarnation: int | None = None,
    text: str = "",
    took_s: float | None = None,
) -> Event:
    """An event that happens now."""
    return {
        "kind": kind,
        "slice": slice_index,
        "incarnation": incarnation,
        "text": text,
        "took_s": took_s,
        "at": time.time(),
    }


@final
class ControlServer:
    """Serves the control socket until it is closed."""

    def __init__(self, head: Controlled, path: str) -> None:
        self._head = head
        self._server = LineServer(path, self._do, gone=self._gone)
        self._subscribers: set[Peer] = set()

    async def start(self) -> None:
        """Begins to listen."""
        await self._server.start()

    def publish(self, event: Event) -> None:
        """Sends an event to everyone who asked for events."""
        for peer in self._subscribers:
            peer.tell(event)

    async def close(self) -> None:
        """Stops listening and ends all connections, after what is left to be said to them."""
        await self._server.close()

    def _gone(self, peer: Peer) -> None:
        self._subscribers.discard(peer)

    def _leases(self, method: str, params: dict[str, Any]) -> Any:
        if method == "lease":
            return self._head.lease(_number(params, "rank"), _lease(params))
        return getattr(self._head, method)(_lease(params), str(params.get("cause")))

    def _do(self, peer: Peer, method: str, params: dict[str, Any]) -> Any:
        match method:
            case "ping" | "status" | "timeline" | "suspend_job" | "suspend_requested":
                return getattr(self._head, method)()
            case "kill" | "stop" | "cont" | "restore":
                return getattr(self._head, method)(_index(params))
            case "suspend" | "resume":
                return self._suspend(method, params)
            case "wait_healthy" | "wait_client":
                return getattr(self._head, method)(_timeout(params))
            case "wait_step":
                return self._head.wait_step(_step(params))
            case "wait_phase":
                return self._head.wait_phase(str(params.get("phase")), _index(params))
            case "fault":
                return self._head.fault(_index(params), str(params.get("fault")))
            case "progress" | "traced":
                read = _progress if method == "progress" else _interval
                return getattr(self._head, method)(*read(params))
            case "lease" | "withdraw" | "give_back":
                return self._leases(method, params)
            case "events":
                self._subscribers.add(peer)
                return None
            case "shutdown":
                # The answer goes out first: the loop may end with the next turn.
                asyncio.get_running_loop().call_soon(self._head.shutdown)
                return None
            case _:
                raise UsageError(f"there is no control method {method!r}")

    def _suspend(self, method: str, params: dict[str, Any]) -> Any:
        if method == "resume":
            hosts = params.get("hosts_per_slice")
            if hosts is not None and type(hosts) is not int:
                raise UsageError(f"{hosts!r} is no number of hosts")
            return self._head.resume(_slices(params), _timeout(params), hosts)
        why = str(params.get("why") or "asked for")
        return self._head.suspend(_slices(params), why[:200], _url(params))


def _number(params: dict[str, Any], name: str) -> int:
    value = params.get(name)
    if type(value) is not int:
        raise UsageError(f"{value!r} is no {name} of a slice")
    return value


def _index(params: dict[str, Any]) -> int:
    return _number(params, "index")


def _lease(params: dict[str, Any]) -> Lease:
    return Lease(_index(params), _number(params, "incarnation"))


def _slices(params: dict[str, Any]) -> list[int] | None:
    slices = params.get("slices")
    if slices is None:
        return None
    if not isinstance(slices, list) or any(type(index) is not int for index in slices):
        raise UsageError(f"{slices!r} is no list of slices")
    return slices


def _url(params: dict[str, Any]) -> str | None:
    url = params.get("url")
    if url is not None and not (isinstance(url, str) and url):
        raise UsageError(f"{url!r} is no path or URL")
    return url


def _step(params: dict[str, Any]) -> int:
    step = params.get("step")
    if type(step) is not int or step < 0:
        raise UsageError(f"{step!r} is no step")
    return step


def _progress(params: dict[str, Any]) -> tuple[int | None, str | None]:
    step = None if params.get("step") is None else _step(params)
    phase = params.get("phase")
    if phase is not None and not (isinstance(phase, str) and _PHASE.fullmatch(phase)):
        raise UsageError(f"{phase!r} is no phase")
    return step, phase


def _interval(params: dict[str, Any]) -> tuple[float, float]:
    return _moment(params.get("began")), _moment(params.get("ended"))


def _moment(value: object) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(f"{value!r} is no time")
    return float(value)


def _timeout(params: dict[str, Any]) -> float | None:
    timeout_s = params.get("timeout_s")
    if timeout_s is None:
        return None
    if type(timeout_s) not in (int, float) or not timeout_s >= 0:
        raise UsageError(f"{timeout_s!r} is no timeout")
    return float(timeout_s)
