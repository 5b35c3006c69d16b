"""One client: its handles, and its requests in the order in which they came.

A request may need a host buffer whose bytes come over another connection, maybe later: then it and
what follows it wait. Responses may overtake each other; they are told apart by their `op_id`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final, final

from google.protobuf.message import DecodeError

from regrow.errors import Code, RegrowError, StatusError
from regrow.head.array_requests import ArrayRequests
from regrow.head.links import Lease
from regrow.head.program_requests import ProgramRequests
from regrow.head.runtime import Runtime
from regrow.head.tables import Later, Tables
from regrow.head.transfers import Memory
from regrow.wire.schema import proxy
from regrow.wire.status import fill, from_exception

log = logging.getLogger(__name__)

# A client keeps a traceback for each request until a response says that the server refers to it no
# longer, and it lets go of them in the order of numbers, up to the first response that is still held
# by its code. So only responses that it is done with at once say so, and only these are numbered.
_DONE_WITH_AT_ONCE: Final = frozenset(
    {
        "check_value_ready_request",
        "copy_to_host_buffer_request",
        "loaded_executable_fetch_execute_result_request",
    }
)
_NO_NUMBER: Final = 2**63 - 1
# The client sends these and goes on: their answers may wait for one that is waited for, so that a
# step of a training costs head and client no message and no waking up for them.
_NOT_WAITED_FOR: Final = frozenset(
    {
        "make_array_from_host_buffer_request",
        "make_arrays_from_host_buffer_shards_request",
        "assemble_array_from_single_device_arrays_request",
        "disassemble_into_single_device_arrays_request",
        "copy_arrays_request",
        "remap_arrays_request",
        "reshard_arrays_request",
        "fully_replicated_shard_request",
        "delete_array_request",
        "destruct_array_request",
    }
)
_EXECUTE: Final = "loaded_executable_execute_request"
_HOLD_S: Final = 0.05
_HELD_MAX: Final = 64
# Fields that hold handles which the client made for the results: they must hold the error, too.
_RESULTS: Final = {
    "make_array_from_host_buffer_request": ("array_handle",),
    "make_arrays_from_host_buffer_shards_request": ("array_handles",),
    "make_error_arrays_request": ("array_handles",),
    "assemble_array_from_single_device_arrays_request": ("result_handle",),
    "remap_arrays_request": ("result_handles",),
    "bitcast_arrays_request": ("result_handles",),
    "reshard_arrays_request": ("result_handles",),
    "disassemble_into_single_device_arrays_request": ("result_handles",),
    "copy_arrays_request": ("result_handles",),
    "fully_replicated_shard_request": ("result_handle",),
    "loaded_executable_execute_request": ("result_array_handle", "result_status_handle"),
}


@final
class Session:
    """The session of one client; what `regrow.wire.service` calls a Session."""

    def __init__(
        self,
        session_id: int,
        protocol: int,
        runtime: Runtime,
        init: Callable[[int], Any],
        nonce: str,
        send: Callable[[bytes], None],
        on_closed: Callable[[], None],
    ) -> None:
        self.session_id = session_id
        self.protocol = protocol
        self._runtime = runtime
        self._send = send
        self._on_closed = on_closed
        self._init = init
        self.nonce = nonce
        self._tables = Tables(nonce)
        self._numbered = 0
        self._contexts: list[int] = []
        self._held: list[bytes] = []
        self._releasing = False
        self._inbox: deque[Any] = deque()
        self._incoming: dict[int, Memory] = {}
        self._closed = False
        self.requests = 0
        groups: tuple[Any, ...] = (
            ArrayRequests(self._tables, runtime),
            ProgramRequests(self._tables, runtime),
        )
        self._handlers: dict[str, Callable[[Any], Any]] = {"init_request": self._init_request}
        for group in groups:
            for name in dir(group):
                if name.endswith("_request"):
                    self._handlers[name] = getattr(group, name)
        runtime.observer.around(self._handlers, self._tables)

    @property
    def tables(self) -> Tables:
        """What its handles stand for."""
        return self._tables

    # --- host buffers ---

    def store_begin(self, handle: int, size: int) -> memoryview:
        """Room for a host buffer that the client sends.

        Raises:
            StatusError: It is larger than the head can take; whatever waits for it fails, too.
        """
        try:
            memory = self._runtime.transfers.room(size)
        except RegrowError as error:
            refusal = from_exception(error)
            self._fail_buffer(handle, refusal)
            raise refusal.fresh() from None
        self._incoming[handle] = memory
        return memory.view if isinstance(memory, Lease) else memoryview(memory)

    def store_end(self, handle: int) -> None:
        """The host buffer is complete."""
        self._tables.host_buffers[handle] = self._incoming.pop(handle)
        self._go_on()

    def store_abort(self, handle: int) -> None:
        """The host buffer will not come."""
        self._incoming.pop(handle, None)
        text = f"host buffer {handle} was not sent completely"
        self._fail_buffer(handle, StatusError.user(Code.INVALID_ARGUMENT, text))

    def _fail_buffer(self, handle: int, error: StatusError) -> None:
        self._tables.host_buffers[handle] = error
        self._go_on()

    def lookup(self, handle: int) -> memoryview | None:
        """The bytes of a host buffer."""
        memory = self._tables.host_buffers.get(handle)
        if memory is None or isinstance(memory, StatusError):
            return None
        if isinstance(memory, Lease):
            return memory.view
        return memoryview(memory)

    def delete(self, handle: int) -> None:
        """The client needs a host buffer no longer."""
        self._tables.host_buffers.pop(handle, None)

    def closed(self) -> None:
        """The client is gone."""
        self._closed = True
        self._runtime.gate.forget(self)
        self._inbox.clear()
        self._incoming.clear()
        self._tables.clear()
        self._on_closed()

    # --- requests ---

    def request(self, data: bytes) -> None:
        """One serialized request.

        Raises:
            StatusError: The bytes are no request.
        """
        try:
            request = proxy.IfrtRequest.FromString(data)
        except DecodeError:
            raise StatusError(
                Code.INVALID_ARGUMENT, f"a message of {len(data)} bytes is no IfrtRequest"
            ) from None
        self.requests += 1
        context = request.request_metadata.user_context_id
        if context:
            self._contexts.append(context)
        if self._inbox or self._held_back(request) or not self._handle(request):
            self._inbox.append(request)

    def _held_back(self, request: Any) -> bool:
        """Whether slices are suspended: then the request waits until they are back."""
        gate = self._runtime.gate
        if not gate.closed or request.WhichOneof("request") == "init_request":
            return False
        gate.park(self, self._go_on)
        return True

    def _go_on(self) -> None:
        while self._inbox and not self._held_back(self._inbox[0]) and self._handle(self._inbox[0]):
            self._inbox.popleft()

    def _handle(self, request: Any) -> bool:
        """Carries a request out; False: it must wait for a host buffer."""
        name = request.WhichOneof("request")
        meta = request.request_metadata
        handler = self._handlers.get(name)
        try:
            if handler is None:
                what = "an empty request" if name is None else name.removesuffix("_request")
                raise StatusError(Code.UNIMPLEMENTED, f"{what} is not supported by this server")
            body = getattr(request, name)
            answer = handler(body)
        except Exception as error:
            if not isinstance(error, RegrowError):
                log.exception("session %d: %s failed", self.session_id, name)
            status = from_exception(error).fresh()
            if name in _RESULTS:
                self._poison(_RESULTS[name], getattr(request, name), status)
            self._refuse(meta.op_id, status)
            return True
        if answer is None:
            return False
        if isinstance(answer, Later):
            answer.subscribe(lambda error, value: self._answer(meta.op_id, name, error, value))
        else:
            handled = name == _EXECUTE and bool(body.result_array_handle)
            self._reply(meta.op_id, name, answer, handled)
        return True

    def _poison(self, fields: tuple[str, ...], body: Any, error: StatusError) -> None:
        for field in fields:
            value = getattr(body, field)
            for handle in (value,) if isinstance(value, int) else value:
                if handle:
                    self._tables.fail(handle, error)

    def _answer(self, op_id: int, name: str, error: StatusError | None, value: Any) -> None:
        if self._closed:
            return
        if error is not None:
            self._refuse(op_id, error)
        else:
            self._reply(op_id, name, value)

    def _reply(self, op_id: int, name: str, response: Any, handled: bool = False) -> None:
        """Answers; `handled` for an execution whose results have handles of the client's."""
        meta = response.response_metadata
        meta.op_id = op_id
        meta.seq_num = _NO_NUMBER
        if self._contexts and (handled or name in _DONE_WITH_AT_ONCE):
            # No error of ours refers to one, so they are needed no longer than it takes to answer.
            meta.destroyed_user_context_ids.extend(self._contexts)
            self._contexts.clear()
            meta.seq_num = self._numbered
            self._numbered += 1
        if name in _NOT_WAITED_FOR or (name == _EXECUTE and handled):
            self._hold(response.SerializeToString())
        else:
            self._deliver(response.SerializeToString())

    def _hold(self, answer: bytes) -> None:
        self._held.append(answer)
        if len(self._held) >= _HELD_MAX:
            self._release()
        elif not self._releasing:
            self._releasing = True
            asyncio.get_running_loop().call_later(_HOLD_S, self._release)

    def _release(self) -> None:
        self._releasing = False
        held, self._held = self._held, []
        if not self._closed:
            for answer in held:
                self._send(answer)

    def _deliver(self, answer: bytes) -> None:
        if self._held:
            self._release()
        self._send(answer)

    def _refuse(self, op_id: int, error: StatusError) -> None:
        response = proxy.IfrtResponse()
        response.response_metadata.op_id = op_id
        fill(response.response_metadata.status, error)
        self._deliver(response.SerializeToString())

    def _init_request(self, _: Any) -> Any:
        return self._init(self.session_id)
