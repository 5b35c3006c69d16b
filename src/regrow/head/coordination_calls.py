"""XLA's coordination service on gRPC: thin methods around `regrow.head.coordination`.

It is served on a Unix socket of the owner's, so nobody else can reach it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, final
from urllib.parse import quote

from regrow.errors import Code, StatusError
from regrow.head.coordination import Coordination, Rendezvous, Wait, closed
from regrow.wire import grpc, schema, sockets
from regrow.wire.control import Accept
from regrow.wire.headers import Headers
from regrow.wire.service import Limits, Server
from regrow.wire.streams import IGNORE, Handler, Stream
from regrow.wire.unary import Unary, parse

_log = logging.getLogger(__name__)

_SERVICE: Final = b"/xla.coordination.CoordinationService/"
_REQUESTS_BYTES: Final = 32 << 20
_LONGEST_BARRIER_S: Final = 1e6


def address_of(path: str) -> str:
    """A Unix socket's address, as gRPC writes it."""
    return f"unix:{quote(path)}"


def serve_coordination(coordination: Coordination, path: str) -> Server:
    """Serves on a Unix socket, for its owner only.

    Raises:
        ClusterStartError: The socket cannot be created.
    """
    server = Server(_Service(coordination), Limits())
    server.listen(sockets.listen_unix(Path(path)), Path(path))
    return server


@final
class _Service:
    """What `regrow.wire.service` calls a Service."""

    def __init__(self, coordination: Coordination) -> None:
        self._coordination = coordination

    def calls(self, peer: str, tcp: bool) -> Accept:
        return Calls(self._coordination).accept

    def callback_connection(self, sock: socket.socket, nonce: str) -> None:
        sock.close()


@final
class Calls:
    """The calls on one connection."""

    def __init__(self, coordination: Coordination) -> None:
        self._coordination = coordination
        self._budget = grpc.Budget(_REQUESTS_BYTES)

    def accept(self, stream: Stream, fields: Headers) -> Handler:
        """The handler of a new request."""
        path = fields.get(b":path", b"")
        method = path.removeprefix(_SERVICE).decode("ascii", "replace")
        respond = self._methods.get(method)
        if respond is None or not hasattr(schema.coordination, f"{method}Request"):
            _log.warning("an agent calls %s, which is not there", method)
            grpc.fail(stream, StatusError(Code.UNIMPLEMENTED, f"there is no method {method}"))
            return IGNORE
        take = functools.partial(self._take, stream, method, respond)
        return Unary(stream, method, grpc.Messages(self._budget), take)

    def _take(
        self, stream: Stream, method: str, respond: Callable[..., Any], data: bytes
    ) -> Handler | None:
        request = parse(getattr(schema.coordination, f"{method}Request"), data)
        response = getattr(schema.coordination, f"{method}Response")()
        call = _Call(stream, response)
        wait = respond(self, request, call)
        if isinstance(wait, Wait):
            return call.held(wait)
        grpc.answer(stream, response.SerializeToString())
        return None

    def _open(self, request: Any) -> Rendezvous:
        found = self._coordination.find(request.incarnations.service_incarnation)
        if found is None:
            raise closed(Code.FAILED_PRECONDITION)
        return found

    # --- members: none of these may fail for an agent that plays by the rules ---

    def _register(self, request: Any, call: _Call) -> None:
        call.response.service_incarnation = self._coordination.register(
            request.source_task_id, request.incarnation
        )

    def _heartbeat(self, request: Any, call: _Call) -> None:
        call.response.service_incarnation = request.incarnations.service_incarnation

    def _shutdown(self, request: Any, call: _Call) -> None:
        found = self._coordination.find(request.incarnations.service_incarnation)
        if found is not None:
            found.leave(request.source_task_id)

    def _poll(self, request: Any, call: _Call) -> Wait:
        found = self._coordination.find(request.incarnations.service_incarnation)
        if found is None:
            raise closed(Code.CANCELLED)
        return found.poll(request.source_task_id, call.answer)

    def _report(self, request: Any, call: _Call) -> None:
        _log.warning("an agent reports its error: %s", request.error_message[:1000])

    def _watch(self, request: Any, call: _Call) -> Wait:
        def answer(error: StatusError | None, value: Any) -> None:
            if error is None:
                version, members = value
                call.response.version_number = version
                for node, incarnation in enumerate(members):
                    _add_task(call.response, node, incarnation)
            call.answer(error)

        return self._open(request).watch(request.version_number, answer)

    # --- values ---

    def _insert(self, request: Any, call: _Call) -> None:
        entry = request.kv
        self._open(request).insert(entry.key, entry.value, request.allow_overwrite)

    def _get(self, request: Any, call: _Call) -> Wait:
        def answer(error: StatusError | None, value: Any) -> None:
            if error is None:
                call.response.kv.key, call.response.kv.value = request.key, value
            call.answer(error)

        return self._open(request).read(request.key, answer)

    def _try_get(self, request: Any, call: _Call) -> None:
        call.response.kv.value = self._open(request).read_now(request.key)
        call.response.kv.key = request.key

    def _directory(self, request: Any, call: _Call) -> None:
        call.response.directory_key = request.directory_key
        for name, value in self._open(request).directory(request.directory_key):
            call.response.kv.add(key=name, value=value)

    def _increment(self, request: Any, call: _Call) -> None:
        call.response.kv.value = self._open(request).increment(request.key, request.increment)
        call.response.kv.key = request.key

    def _delete(self, request: Any, call: _Call) -> None:
        self._open(request).delete(request.key)

    # --- waiting for each other ---

    def _barrier(self, request: Any, call: _Call) -> Wait:
        call.response.counter = request.counter
        wait = self._open(request).barrier(
            request.barrier_id,
            request.counter,
            request.task_ids,
            request.source_task_id,
            call.answer,
        )
        call.expire_after(
            min(max(request.barrier_timeout_in_ms / 1000, 0.0), _LONGEST_BARRIER_S),
            lambda: wait.settle(
                StatusError(Code.DEADLINE_EXCEEDED, f"barrier {request.barrier_id}: not all came")
            ),
        )
        return wait

    def _cancel_barrier(self, request: Any, call: _Call) -> None:
        self._open(request).cancel_barrier(request.barrier_id, request.counter)

    def _alive(self, request: Any, call: _Call) -> Wait:
        def answer(error: StatusError | None, value: Any) -> None:
            for node, incarnation in value or ():
                call.response.alive_task_ids.append(node)
                call.response.incarnations.append(incarnation)
            call.answer(error)

        rendezvous = self._open(request)
        return rendezvous.alive(request.task_ids, request.requesting_task_id, answer)

    _methods: Final[dict[str, Callable[[Calls, Any, _Call], Wait | None]]] = {
        "RegisterTask": _register,
        "Heartbeat": _heartbeat,
        "ShutdownTask": _shutdown,
        "PollForError": _poll,
        "ReportErrorToService": _report,
        "WatchTasks": _watch,
        "InsertKeyValue": _insert,
        "GetKeyValue": _get,
        "TryGetKeyValue": _try_get,
        "GetKeyValueDir": _directory,
        "IncrementKeyValue": _increment,
        "DeleteKeyValue": _delete,
        "Barrier": _barrier,
        "CancelBarrier": _cancel_barrier,
        "GetAliveTasks": _alive,
    }


@final
class _Call:
    """A call that may wait; afterwards the handler of its stream."""

    def __init__(self, stream: Stream, response: Any) -> None:
        self.response = response
        self._stream = stream
        self._wait: Wait | None = None
        self._timer: asyncio.TimerHandle | None = None

    def answer(self, error: StatusError | None, value: Any = None) -> None:
        self._cancel_timer()
        if error is not None:
            grpc.fail(self._stream, error)
        else:
            grpc.answer(self._stream, self.response.SerializeToString())

    def held(self, wait: Wait) -> _Call:
        self._wait = wait
        return self

    def expire_after(self, timeout_s: float, expire: Callable[[], None]) -> None:
        self._timer = asyncio.get_running_loop().call_later(timeout_s, expire)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def data(self, view: memoryview) -> None:
        pass

    def room(self) -> memoryview | None:
        return None

    def filled(self, count: int) -> None:
        raise AssertionError("the request was complete")

    def ended(self) -> None:
        pass

    def over(self) -> None:
        self._cancel_timer()
        if self._wait is not None:
            self._wait.drop()


def _add_task(response: Any, node: int, incarnation: int | None) -> None:
    states = schema.coordination.TaskState
    task = response.task_state.add(task_id=node)
    task.state = states.Value("DISCONNECTED" if incarnation is None else "CONNECTED")
    if incarnation is not None:
        task.incarnation = incarnation
