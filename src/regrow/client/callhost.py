"""The client's end of host callbacks: connections that the client opens, and the functions behind them.

One thread serves one connection, so a callback that itself waits for the cluster, or for another
callback, holds up nobody; whenever a call leaves no connection idle, another is opened.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import secrets
import select
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, final

from regrow.channel import rgcb, values
from regrow.client.connections import detach, dial, known_as, shut
from regrow.client.failures import answer_to
from regrow.client.notice import is_news, say
from regrow.client.settings import Settings
from regrow.client.where import where
from regrow.errors import Code, ProtocolError

HostFunction: TypeAlias = Callable[..., Sequence[Any]]

_DIAL_TIMEOUT_S: Final = 10.0
_MAX_CONNECTIONS: Final = 256
_sessions: weakref.WeakSet[CallbackHost] = weakref.WeakSet()


def knock(sock: socket.socket, token: str | None) -> str:
    """Asks the head whether it would let a client in.

    Returns:
        The reason why not, or "".

    Raises:
        OSError: It does not answer.
        EOFError: It hung up.
        ProtocolError: It is no head.
    """
    sock.sendall(rgcb.preface(rgcb.KNOCK))
    _send(sock, [(token or "").encode()])
    return bytes(_receive(sock)).decode("utf-8", "replace")


@final
class CallbackHost:
    """The functions that the programs of one session may call, and the connections to call them over.

    Attributes:
        nonce: Ties the connections and the programs to the session.
        calls: How many calls were served.
    """

    def __init__(self, settings: Settings) -> None:
        self.nonce = secrets.token_hex(8)
        self.calls = 0
        self._settings = settings
        self._peers = known_as(settings.address)
        self._lock = threading.Lock()
        self._tokens = itertools.count(1)
        self._programs: dict[int, tuple[HostFunction, ...]] = {}
        self._sockets: set[socket.socket] = set()
        self._idle = 0
        self._threads = 0
        self._greeted = False
        self._closed = False
        self._exiting = False
        _forget_sockets_in_children(self)

    def start(self) -> None:
        """Opens the first connection, which also tells at once when the head is gone."""
        # After JAX has registered its own, so that ours runs before JAX ends the session.
        _watch_exit()
        _sessions.add(self)
        with self._lock:
            self._grow()

    def close(self) -> None:
        """Ends the connections; the session is over."""
        with self._lock:
            self._closed = True
            self._programs.clear()
            sockets = list(self._sockets)
        for sock in sockets:
            shut(sock)

    def register(self, functions: Sequence[HostFunction]) -> int:
        """Keeps the functions of a program until the head says that it is gone; returns its token."""
        with self._lock:
            token = next(self._tokens)
            self._programs[token] = tuple(functions)
            if not self._threads:
                self._grow()
        return token

    def forget(self, token: int) -> None:
        """Lets the functions of a program go."""
        with self._lock:
            self._programs.pop(token, None)

    def registered(self) -> int:
        """How many programs have functions here."""
        with self._lock:
            return len(self._programs)

    def _grow(self) -> None:
        if self._closed or self._threads >= _MAX_CONNECTIONS:
            return
        thread = threading.Thread(target=self._serve, name="regrow-callbacks", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return  # The interpreter is ending, or out of threads: those that are there must do.
        self._threads += 1
        self._idle += 1

    def _serve(self) -> None:
        idle = True
        try:
            sock = self._open()
        except OSError as error:
            self._not_opened(error)
            return
        try:
            while True:
                frame = _receive(sock)
                kind, token, index, rest = rgcb.parse_request(frame)
                if kind == rgcb.CALL:
                    self._take(busy=True)
                    idle = False
                    answer = self._answer(token, index, rest)
                    # A nested call may be waiting for this connection the moment the answer is out.
                    self._take(busy=False)
                    idle = True
                    _send(sock, answer)
                elif kind == rgcb.FREE:
                    self.forget(token)
                elif kind == rgcb.HELLO:
                    self._greeted = True
                elif kind == rgcb.BYE:
                    raise EOFError(bytes(rest).decode("utf-8", "replace"))
        except (OSError, EOFError, ProtocolError) as error:
            self._lost(error)
        finally:
            with self._lock:
                self._threads -= 1
                self._idle -= idle
                self._sockets.discard(sock)
            sock.close()

    def _open(self) -> socket.socket:
        sock = dial(self._settings.address, _DIAL_TIMEOUT_S)
        try:
            sock.sendall(rgcb.preface(self.nonce))
        except BaseException:
            sock.close()
            raise
        with self._lock:
            self._sockets.add(sock)
            closed = self._closed
        if closed:
            shut(sock)
        return sock

    def _not_opened(self, error: OSError) -> None:
        with self._lock:
            self._threads -= 1
            self._idle -= 1
            silent = self._closed or self._exiting
        if not silent:
            say(f"cannot open a connection for host callbacks to {self._settings.target}: {error}")

    def _take(self, *, busy: bool) -> None:
        with self._lock:
            self._idle += -1 if busy else 1
            self.calls += busy
            if self._idle == 0:
                self._grow()

    def _answer(self, token: int, index: int, rest: memoryview) -> list[values.Buffer]:
        functions = (where,) if token == rgcb.WHERE else self._programs.get(token)
        if functions is None or index >= len(functions):
            text = "a program called a host callback that does not exist any longer"
            return [rgcb.failure(Code.CANCELLED, text)]
        try:
            results = functions[index](*values.decode(rest))
            return [rgcb.values_answer(), *values.encode(results)]
        except BaseException as error:  # noqa: BLE001 (the program that called is told)
            return [answer_to(error)]

    def silent(self, how: str) -> None:
        """The head does not answer any longer: tells so, and gives it up."""
        self._lost(EOFError(how))

    def exiting(self) -> None:
        """The process ends: tells if the head is gone, and is silent from now on."""
        with self._lock:
            sockets = list(self._sockets)
        if any(map(_hung_up, sockets)):
            self._lost(EOFError("it closed the connection"))
        with self._lock:
            self._exiting = True

    def _lost(self, error: Exception) -> None:
        with self._lock:
            silent = self._closed or self._exiting or not is_news(self._settings.target)
            if self._greeted and not silent:
                # Who ends the process waits for the lock, so that this is said before.
                say(
                    f"the head at {self._settings.target} is gone ({error}); everything on the "
                    "cluster is lost to this process, and what uses it fails with UNAVAILABLE"
                )
            self._closed = True
            sockets = list(self._sockets)
            self._programs.clear()
        for sock in sockets:
            shut(sock)


def _send(sock: socket.socket, parts: Sequence[values.Buffer]) -> None:
    size = sum(memoryview(part).nbytes for part in parts)
    whole = [rgcb.LENGTH.pack(size), *parts]
    if size < 1 << 16:
        sock.sendall(b"".join(whole))
        return
    for part in whole:
        sock.sendall(part)


def _receive(sock: socket.socket) -> memoryview:
    (size,) = rgcb.LENGTH.unpack(_receive_exactly(sock, rgcb.LENGTH.size))
    if size > rgcb.MAX_FRAME_BYTES:
        raise ProtocolError(f"it announced a frame of {size} bytes")
    return _receive_exactly(sock, size)


def _receive_exactly(sock: socket.socket, size: int) -> memoryview:
    view = memoryview(bytearray(size))
    done = 0
    while done < size:
        count = sock.recv_into(view[done:])
        if not count:
            raise EOFError("it closed the connection")
        done += count
    return view


def _hung_up(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


@functools.cache
def _watch_exit() -> None:
    atexit.register(_exit)


def _exit() -> None:
    for session in list(_sessions):
        session.exiting()


def _forget_sockets_in_children(host: CallbackHost) -> None:
    """A forked child must not keep the session's connections, also those of jaxlib.

    If it did, they would be open after its parent has died; and if it used JAX, it would write into
    the midst of what its parent says.
    """
    reference = weakref.ref(host)

    def in_child() -> None:
        owner = reference()
        if owner is not None:
            for sock in owner._sockets:
                sock.close()
            detach(owner._peers)

    os.register_at_fork(after_in_child=in_child)
