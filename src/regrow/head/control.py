"""The head's end of the control socket (see `regrow.control`)."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import math
import os
import re
import socket
import struct
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, final

from regrow.control import Event, EventKind, encode, error_to_json
from regrow.errors import ControlError, RegrowError, UsageError

logger = logging.getLogger(__name__)

_MAX_REQUEST_BYTES: Final = 1 << 16
_MAX_CONNECTIONS: Final = 64
_MAX_BACKLOG_BYTES: Final = 1 << 20
_CREDENTIALS: Final = struct.Struct("3i")
_PHASE: Final = re.compile(r"[\w-]{1,40}", re.ASCII)


class Controlled(Protocol):
    """What can be asked of a head. An index that is no slice is a `UsageError`."""

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

    async def resume(self, slices: Sequence[int] | None, timeout_s: float | None) -> dict[str, Any]:
        """Brings suspended slices (None: all) back; returns when their state is."""
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
        self._path = Path(path)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self._subscribers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begins to listen."""
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(
            self._serve, self._path, limit=_MAX_REQUEST_BYTES
        )
        self._path.chmod(0o600)

    def publish(self, event: Event) -> None:
        """Sends an event to everyone who asked for events."""
        line = encode({"event": event})
        for writer in list(self._subscribers):
            if writer.transport.get_write_buffer_size() > _MAX_BACKLOG_BYTES:
                # It does not read; to keep its events would need memory without end.
                self._subscribers.discard(writer)
                writer.transport.abort()
            else:
                writer.write(line)

    async def close(self) -> None:
        """Stops listening and ends all connections, after what is left to be said to them."""
        if self._server is not None:
            self._server.close()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in list(self._connections):
            writer.close()
        self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= _MAX_CONNECTIONS or not _is_own_user(writer):
            writer.transport.abort()
            return
        self._connections.add(writer)
        try:
            await self._read_requests(reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            # asyncio logs a traceback for a handler that ends as cancelled.
            logger.debug("a control connection broke off")
        finally:
            self._connections.discard(writer)
            self._subscribers.discard(writer)
            writer.close()

    async def _read_requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        waiting: set[asyncio.Task[None]] = set()
        try:
            while line := await reader.readline():
                task = asyncio.create_task(self._answer(line, writer))
                for tasks in (self._tasks, waiting):
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
        except ValueError:
            error = ControlError(f"a request is longer than {_MAX_REQUEST_BYTES} bytes")
            writer.write(encode({"id": None, "error": error_to_json(error)}))
        finally:
            for task in waiting:
                # Whoever asked is gone, so there is nobody to go on waiting for.
                task.cancel()

    async def _answer(self, line: bytes, writer: asyncio.StreamWriter) -> None:
        number: object = None
        try:
            request = _parse(line)
            number = request.get("id")
            result = await self._do(request, writer)
            answer = {"id": number, "result": result}
        except RegrowError as error:
            answer = {"id": number, "error": error_to_json(error)}
        except Exception as error:
            logger.exception("control request failed: %r", line[:200])
            text = ControlError(f"the head failed: {type(error).__name__}: {error}")
            answer = {"id": number, "error": error_to_json(text)}
        with contextlib.suppress(ConnectionError):
            writer.write(encode(answer))
            await writer.drain()

    async def _do(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> Any:
        method, params = request.get("method"), request.get("params") or {}
        if not isinstance(params, dict):
            raise UsageError("the parameters of a control request are no object")
        match method:
            case "status" | "timeline" | "suspend_job" | "suspend_requested":
                return getattr(self._head, method)()
            case "kill" | "stop" | "cont" | "restore":
                done = getattr(self._head, method)(_index(params))
                return await done if inspect.isawaitable(done) else done
            case "suspend" | "resume":
                return await self._suspend(method, params)
            case "wait_healthy" | "wait_client":
                return await getattr(self._head, method)(_timeout(params))
            case "wait_step":
                return await self._head.wait_step(_step(params))
            case "wait_phase":
                return await self._head.wait_phase(str(params.get("phase")), _index(params))
            case "fault":
                return self._head.fault(_index(params), str(params.get("fault")))
            case "progress" | "traced":
                read = _progress if method == "progress" else _interval
                return getattr(self._head, method)(*read(params))
            case "events":
                self._subscribers.add(writer)
                return None
            case "shutdown":
                # The answer goes out first: the loop may end with the next turn.
                asyncio.get_running_loop().call_soon(self._head.shutdown)
                return None
            case _:
                raise UsageError(f"there is no control method {method!r}")

    async def _suspend(self, method: str, params: dict[str, Any]) -> Any:
        if method == "resume":
            return await self._head.resume(_slices(params), _timeout(params))
        why = str(params.get("why") or "asked for")
        return await self._head.suspend(_slices(params), why[:200], _url(params))


def _parse(line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except ValueError:
        raise UsageError("a control request is no JSON") from None
    if not isinstance(request, dict):
        raise UsageError("a control request is no JSON object")
    return request


def _index(params: dict[str, Any]) -> int:
    index = params.get("index")
    if type(index) is not int:
        raise UsageError(f"{index!r} is no index of a slice")
    return index


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


def _is_own_user(writer: asyncio.StreamWriter) -> bool:
    peer = writer.get_extra_info("socket")
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(raw)[1]
    return uid in (0, os.getuid())
