"""The head's end of host callbacks: hands a worker's call to a connection of the client it belongs to.

    callbacks = Callbacks()
    callbacks.open(nonce)                       # the session with that nonce has begun
    callbacks.adopt(sock, nonce)                # a connection with the preface of `channel.rgcb` came
    callbacks.call(nonce, token, index, payload, done)   # done(answer) once, whatever happens
    callbacks.hold(nonce, token, holder)        # an executable, or a program on a host, may use these
    callbacks.release(nonce, token, holder)     # once for each hold; the last one frees the functions
    callbacks.release_all(holder)               # the host is gone
    callbacks.close(nonce)                      # the session is over: calls fail now and from now on

All methods are for the loop's thread. An answer is a frame of `channel.rgcb`, also where the head itself
makes it, and goes to the worker as it is.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter, deque
from collections.abc import Callable, Hashable
from typing import Final, TypeAlias, final

from regrow.channel import rgcb
from regrow.channel.frames import Buffer
from regrow.channel.stream import Stream, tune
from regrow.errors import Code, ProtocolError, StatusError
from regrow.head.knock import Knock

log = logging.getLogger(__name__)

Done: TypeAlias = Callable[[Buffer], None]

CONNECT_TIMEOUT_S: Final = 15.0
ANSWER_TIMEOUT_S: Final = 3600.0
_MAX_CONNECTIONS: Final = 1024
_GONE: Final = "the client that owns this host callback is gone"


@final
class Callbacks:
    """The callback connections of all sessions."""

    def __init__(
        self,
        refusal: Callable[[socket.socket, str], str | None] = lambda sock, token: None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        """Begins with no session.

        Args:
            refusal: Why a client on that connection, with that token ("" is none), is refused.
            connect_timeout_s: How long a call waits for an idle connection of its client.
            answer_timeout_s: How long the function of the user may take.
        """
        self.refusal = refusal
        self._connect_timeout_s = connect_timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._pools: dict[str, _Pool] = {}

    def open(self, nonce: str) -> None:
        """A session with that nonce has begun.

        Raises:
            StatusError: Another session has the nonce.
        """
        if nonce in self._pools or nonce == rgcb.KNOCK:
            raise StatusError(Code.ALREADY_EXISTS, "another session calls back under this nonce")
        self._pools[nonce] = _Pool(self._connect_timeout_s, self._answer_timeout_s)

    def adopt(self, sock: socket.socket, nonce: str) -> None:
        """Takes over a connection whose preface has been read; closes it if no session has the nonce."""
        if nonce == rgcb.KNOCK:
            Knock(sock, self.refusal)
            return
        pool = self._pools.get(nonce)
        if pool is None:
            log.warning("refused a callback connection that belongs to no session")
            sock.close()
        else:
            pool.adopt(sock)

    def call(self, nonce: str, token: int, index: int, payload: Buffer, done: Done) -> None:
        """Calls a function of a client; `done` gets the answer, now or later, exactly once."""
        pool = self._pools.get(nonce)
        if pool is None:
            done(rgcb.failure(Code.CANCELLED, _GONE))
        else:
            pool.call(_Call(rgcb.request(rgcb.CALL, token, index), payload, done))

    def hold(self, nonce: str, token: int, holder: Hashable) -> None:
        """`holder` may use the callbacks of a token until it has released them as often."""
        pool = self._pools.get(nonce)
        if pool is not None:
            pool.hold(token, holder)

    def release(self, nonce: str, token: int, holder: Hashable) -> None:
        """Undoes one `hold`; after the last of all the client is told to forget its functions."""
        pool = self._pools.get(nonce)
        if pool is not None:
            pool.release(token, holder)

    def release_all(self, holder: Hashable) -> None:
        """Undoes every `hold` of `holder`."""
        for pool in self._pools.values():
            pool.release_all(holder)

    def free(self, nonce: str, token: int) -> None:
        """Tells the client to forget the functions of a token, unless somebody holds them."""
        pool = self._pools.get(nonce)
        if pool is not None:
            pool.free(token)

    def end(self, cause: str) -> None:
        """The head ends: every client is told why."""
        for pool in self._pools.values():
            pool.end(cause)

    def close(self, nonce: str) -> None:
        """The session is over: its calls fail at once, those to come too."""
        pool = self._pools.pop(nonce, None)
        if pool is not None:
            pool.close()


@final
class CallbackUse:
    """The hold of one program on its callbacks: of the program itself, and of the hosts that have it.

    Each host reports for each time it loaded the program that this is over (`Callbacks.release`).
    """

    def __init__(self, callbacks: Callbacks, program: rgcb.ProgramCallbacks) -> None:
        self._callbacks = callbacks
        self._program = program
        callbacks.hold(program.nonce, program.token, self)

    def loaded_on(self, host: Hashable) -> None:
        """The program has been sent to that host."""
        self._callbacks.hold(self._program.nonce, self._program.token, host)

    def close(self) -> None:
        """The client has let the program go; may be called again."""
        self._callbacks.release(self._program.nonce, self._program.token, self)


@final
class _Call:
    """One call of a function of a client; answered exactly once."""

    __slots__ = ("_done", "head", "payload", "timer")

    def __init__(self, head: bytes, payload: Buffer, done: Done) -> None:
        self.head = head
        self.payload = payload
        self.timer: asyncio.TimerHandle | None = None
        self._done: Done | None = done

    def answer(self, answer: Buffer) -> None:
        if self.timer is not None:
            self.timer.cancel()
        done, self._done = self._done, None
        if done is not None:
            done(answer)

    @property
    def open(self) -> bool:
        return self._done is not None


@final
class _Pool:
    """The connections of one client, and the calls that wait for one."""

    def __init__(self, connect_timeout_s: float, answer_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._loop = asyncio.get_running_loop()
        self._connections: set[_Connection] = set()
        self._idle: list[_Connection] = []
        self._waiting: deque[_Call] = deque()
        self._holders: dict[int, Counter[Hashable]] = {}

    def adopt(self, sock: socket.socket) -> None:
        if len(self._connections) >= _MAX_CONNECTIONS:
            log.warning("refused a callback connection: a client has %d already", _MAX_CONNECTIONS)
            sock.close()
            return
        tune(sock)
        connection = _Connection(sock, self._idled, self._closed)
        self._connections.add(connection)
        connection.send(rgcb.request(rgcb.HELLO))
        self._idled(connection)

    def call(self, call: _Call) -> None:
        if self._idle:
            self._start(self._idle.pop(), call)
        else:
            self._waiting.append(call)
            self._limit(call, self._connect_timeout_s, "the client to open a connection for")

    def hold(self, token: int, holder: Hashable) -> None:
        self._holders.setdefault(token, Counter())[holder] += 1

    def release(self, token: int, holder: Hashable, times: int = 1) -> None:
        holders = self._holders.get(token)
        if holders is None or holder not in holders:
            return
        holders[holder] -= times
        if holders[holder] <= 0:
            del holders[holder]
        if not holders:
            del self._holders[token]
            self.free(token)

    def release_all(self, holder: Hashable) -> None:
        for token, holders in list(self._holders.items()):
            if holder in holders:
                self.release(token, holder, holders[holder])

    def free(self, token: int) -> None:
        if token in self._holders:
            return
        # Also on a busy connection: the client reads it after the call, and nothing waits for it.
        for connection in self._idle[-1:] or list(self._connections)[:1]:
            connection.send(rgcb.request(rgcb.FREE, token))

    def end(self, cause: str) -> None:
        for connection in self._connections:
            connection.send(rgcb.request(rgcb.BYE), cause.encode("utf-8", "replace"))

    def close(self) -> None:
        for connection in list(self._connections):
            connection.close()
        self._connections.clear()
        self._idle.clear()
        while self._waiting:
            self._waiting.popleft().answer(rgcb.failure(Code.CANCELLED, _GONE))

    def _start(self, connection: _Connection, call: _Call) -> None:
        self._limit(call, self._answer_timeout_s, "the function of")
        connection.start(call)

    def _limit(self, call: _Call, timeout_s: float, what: str) -> None:
        if call.timer is not None:
            call.timer.cancel()
        text = f"waited {timeout_s:g} s for {what} a host callback"
        call.timer = self._loop.call_later(
            timeout_s, call.answer, rgcb.failure(Code.CANCELLED, text)
        )

    def _idled(self, connection: _Connection) -> None:
        while self._waiting:
            call = self._waiting.popleft()
            if call.open:
                self._start(connection, call)
                return
        self._idle.append(connection)

    def _closed(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)


@final
class _Connection:
    """One callback connection; carries one call at a time."""

    def __init__(
        self,
        sock: socket.socket,
        on_idle: Callable[[_Connection], None],
        on_closed: Callable[[_Connection], None],
    ) -> None:
        self._on_idle = on_idle
        self._on_closed = on_closed
        self._call: _Call | None = None
        self._length = bytearray(rgcb.LENGTH.size)
        self._frame: bytearray | None = None
        self._view = memoryview(self._length)
        self._stream = Stream(sock, self, self._ended)

    def send(self, request: bytes, payload: Buffer = b"") -> None:
        size = len(request) + memoryview(payload).nbytes
        self._stream.write([rgcb.LENGTH.pack(size) + request, payload])

    def start(self, call: _Call) -> None:
        self._call = call
        self.send(call.head, call.payload)

    def close(self) -> None:
        self._stream.close()
        self._fail()

    def buffer(self) -> memoryview:
        return self._view

    def received(self, count: int) -> None:
        self._view = self._view[count:]
        if self._view:
            return
        if self._frame is None:
            self._begin_frame()
        else:
            self._end_frame(self._frame)

    def _begin_frame(self) -> None:
        (size,) = rgcb.LENGTH.unpack(self._length)
        if self._call is None:
            raise ProtocolError("an answer without a call on a callback connection")
        if not rgcb.ANSWER_BYTES <= size <= rgcb.MAX_FRAME_BYTES:
            raise ProtocolError(f"an answer of {size} bytes on a callback connection")
        self._frame = bytearray(size)
        self._view = memoryview(self._frame)

    def _end_frame(self, frame: bytearray) -> None:
        self._frame = None
        self._view = memoryview(self._length)
        call, self._call = self._call, None
        if call is not None:
            call.answer(frame)
        self._on_idle(self)

    def _ended(self, cause: Exception) -> None:
        log.debug("a callback connection ended: %s", cause)
        self._on_closed(self)
        self._fail()

    def _fail(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.answer(rgcb.failure(Code.CANCELLED, _GONE))
