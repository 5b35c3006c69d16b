"""Both ends of a control socket (see `regrow.control`) on asyncio.

A request is answered in its turn where its answer is there at once; one that has to be waited for is
waited for in a task of its own, and other requests of the connection pass it. What a connection that
ends was waiting for is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import json
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, TypeAlias, final

from regrow.control import MAX_LINE_BYTES, encode, error_from_json, error_to_json
from regrow.errors import ControlError, NoClusterError, RegrowError, UsageError

logger = logging.getLogger(__name__)

_MAX_REQUEST_BYTES: Final = 1 << 16
_MAX_CONNECTIONS: Final = 64
_MAX_BACKLOG_BYTES: Final = 1 << 20
_CREDENTIALS: Final = struct.Struct("3i")


@final
class Peer:
    """A connection, as the server sees it."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message that is no answer; breaks off with a peer that does not read."""
        transport = self._writer.transport
        if transport.get_write_buffer_size() > _MAX_BACKLOG_BYTES:
            # To keep more for it would need memory without end.
            transport.abort()
        elif not transport.is_closing():
            self._writer.write(encode(message))

    def tell(self, event: Any) -> None:
        """Sends an event."""
        self.send({"event": event})

    def close(self) -> None:
        """Ends the connection after what was sent."""
        self._writer.close()


Respond: TypeAlias = Callable[[Peer, str, dict[str, Any]], Any | Awaitable[Any]]


@final
class LineServer:
    """Serves a Unix socket of the owner's until it is closed."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        respond: Respond,
        *,
        gone: Callable[[Peer], None] = lambda peer: None,
        connections: int = _MAX_CONNECTIONS,
    ) -> None:
        """Readies it.

        Args:
            path: Of the socket; None: there is none, only what `converse` is given.
            respond: Called with a peer, a method and its parameters; the answer's result, or
                something that can be awaited for it. A `RegrowError` of it is told to the peer.
            gone: Called once for each peer whose connection has ended, but not after `close`.
            connections: How many there may be at a time; further ones are broken off.
        """
        self._path = None if path is None else Path(path)
        self._respond = respond
        self._gone = gone
        self._limit = connections
        self._server: asyncio.Server | None = None
        self._peers: set[Peer] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def start(self) -> None:
        """Begins to listen; what is left of a dead server's socket is replaced."""
        assert self._path is not None
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(
            self._serve, self._path, limit=_MAX_REQUEST_BYTES
        )
        self._path.chmod(0o600)

    def stop(self) -> None:
        """Stops listening and ends all connections, after what is left to be said to them."""
        self._closed = True
        if self._server is not None:
            self._server.close()
        for peer in list(self._peers):
            peer.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    async def close(self) -> None:
        """As `stop`, after what requests still wait for was cancelled."""
        self._closed = True
        if self._server is not None:
            self._server.close()
        # What was accepted just now is to see that it came too late.
        await asyncio.sleep(0)
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closed or len(self._peers) >= self._limit or not _is_own_user(writer):
            writer.transport.abort()
            return
        # asyncio logs a traceback for a handler that ends as cancelled.
        with contextlib.suppress(asyncio.CancelledError):
            await self.converse(reader, writer)

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves a connection, whoever made it; returns when it has ended."""
        peer = Peer(writer)
        self._peers.add(peer)
        try:
            await self._read(peer, reader, writer)
        except ConnectionError:
            logger.debug("a control connection broke off")
        finally:
            self._peers.discard(peer)
            writer.close()
            if not self._closed:
                self._gone(peer)

    async def _read(
        self, peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        waiting: set[asyncio.Task[None]] = set()
        try:
            while not self._closed and (line := await reader.readline()):
                task = self._take(peer, line)
                if task is not None:
                    for tasks in (self._tasks, waiting):
                        tasks.add(task)
                        task.add_done_callback(tasks.discard)
                await writer.drain()
        except ValueError:
            error = ControlError(f"a request is longer than {_MAX_REQUEST_BYTES} bytes")
            peer.send({"id": None, "error": error_to_json(error)})
        finally:
            for task in waiting:
                # Whoever asked is gone, so there is nobody to go on waiting for.
                task.cancel()

    def _take(self, peer: Peer, line: bytes) -> asyncio.Task[None] | None:
        """Answers a request, or returns the task that will."""
        number: object = None
        try:
            request = _parse(line)
            number, params = request.get("id"), request.get("params") or {}
            if not isinstance(params, dict):
                raise UsageError("the parameters of a control request are no object")
            result = self._respond(peer, str(request.get("method")), params)
        except Exception as error:  # noqa: BLE001 - the peer is told
            peer.send(_refusal(number, error))
            return None
        if inspect.isawaitable(result):
            task = asyncio.ensure_future(self._wait(peer, number, result))
            if inspect.iscoroutine(result):
                # One that was cancelled before it began has not even looked at it.
                task.add_done_callback(lambda _: result.close())
            return task
        peer.send({"id": number, "result": result})
        return None

    async def _wait(self, peer: Peer, number: object, result: Awaitable[Any]) -> None:
        try:
            answer = {"id": number, "result": await result}
        except Exception as error:  # noqa: BLE001 - the peer is told
            answer = _refusal(number, error)
        peer.send(answer)


def _parse(line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except ValueError:
        raise UsageError("a control request is no JSON") from None
    if not isinstance(request, dict):
        raise UsageError("a control request is no JSON object")
    return request


def _refusal(number: object, error: Exception) -> dict[str, Any]:
    if not isinstance(error, RegrowError):
        logger.error("a control request failed", exc_info=error)
        error = ControlError(f"the request failed: {type(error).__name__}: {error}")
    return {"id": number, "error": error_to_json(error)}


def _is_own_user(writer: asyncio.StreamWriter) -> bool:
    peer = writer.get_extra_info("socket")
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(raw)[1]
    return uid in (0, os.getuid())


@final
class LineClient:
    """A connection to a control socket, for one loop."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_event: Callable[[Any], None],
        on_end: Callable[[], None],
    ) -> None:
        """Takes a connection over; `connect` makes one."""
        self._writer = writer
        self._on_event = on_event
        self._on_end = on_end
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._closed = False
        self._task = asyncio.get_running_loop().create_task(self._read(reader))

    @classmethod
    async def connect(
        cls,
        path: str | os.PathLike[str],
        on_event: Callable[[Any], None],
        on_end: Callable[[], None],
    ) -> LineClient:
        """Connects.

        Args:
            path: Of the socket.
            on_event: Called with each event.
            on_end: Called once when the other side has ended the connection.

        Raises:
            NoClusterError: If nobody listens there.
        """
        try:
            reader, writer = await asyncio.open_unix_connection(path, limit=MAX_LINE_BYTES)
        except OSError as error:
            raise NoClusterError(f"nobody answers at {path}: {error.strerror or error}") from None
        return cls(reader, writer, on_event, on_end)

    async def call(self, method: str, *, timeout_s: float, **params: Any) -> Any:
        """Sends a request and waits for its answer.

        Raises:
            ControlError: If the other side is gone, or does not answer in time.
            RegrowError: What the request was refused with.
        """
        answer = self.send(method, **params)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise ControlError(f"waited {timeout_s:g} s for an answer to {method!r}") from None

    def send(self, method: str, **params: Any) -> asyncio.Future[Any]:
        """Sends a request; its answer, or the error that it was refused with, comes later."""
        number = next(self._numbers)
        answer = asyncio.get_running_loop().create_future()
        # Who asks without waiting has no use for an error either.
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        if self._closed:
            answer.set_exception(ControlError("the connection has ended"))
            return answer
        self._waiting[number] = answer
        self._writer.write(encode({"id": number, "method": method, "params": params}))
        return answer

    def close(self) -> None:
        """Ends the connection."""
        self._end()
        self._task.cancel()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError, ValueError):
            while line := await reader.readline():
                self._take(json.loads(line))
        self._end()
        self._on_end()

    def _take(self, message: dict[str, Any]) -> None:
        if "event" in message:
            self._on_event(message["event"])
            return
        waiting = self._waiting.pop(message.get("id") or 0, None)
        if waiting is None or waiting.done():
            return
        if "error" in message:
            waiting.set_exception(error_from_json(message["error"]))
        else:
            waiting.set_result(message.get("result"))

    def _end(self) -> None:
        self._closed = True
        self._writer.close()
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(ControlError("the connection ended before the answer"))
