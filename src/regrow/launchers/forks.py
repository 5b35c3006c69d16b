"""The head's end of the template process (see `template`): spawn it, ask it, outlive it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from regrow.errors import LaunchError
from regrow.launchers.template import pack, unpack
from regrow.processes import (
    RUN_MARK,
    Child,
    children_of,
    end_child,
    marked,
    python_argv,
    spawn,
    tail,
)

logger = logging.getLogger(__name__)

FORK_DEADLINE_S: Final = 60.0
_ATTEMPTS: Final = 3
_PING_S: Final = 1.0
# Pings are counted, and not seconds: the head itself may have slept.
_PINGS_UNANSWERED: Final = 5
_PINGS_WHILE_IT_IMPORTS: Final = 120


@final
@dataclass(slots=True, eq=False)
class _Pending:
    request: dict[str, Any]
    answer: asyncio.Future[int]


@final
class ForkServer:
    """Forks processes from a template that is started again when it dies or is silent.

    The template is spawned by the constructor, which needs no event loop, so that it can import
    while the head does.
    """

    def __init__(
        self,
        modules: Sequence[str],
        environ: Mapping[str, str],
        log: Path,
        *,
        known: Callable[[], set[int]],
    ) -> None:
        """Spawns the template.

        Args:
            modules: What it imports before it forks.
            environ: Its environment, and that of what it forks.
            log: File for its output.
            known: Tells the process ids of children of this process that have an owner.
        """
        self._modules = list(modules)
        self._environ = dict(environ)
        self._log = log
        self._known = known
        self._ids = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beats: asyncio.TimerHandle | None = None
        self._unanswered = 0
        self._ready = False
        self._deaths = 0
        self._error: str | None = None
        self._closed = False
        self._inbox = bytearray()
        self._outbox = bytearray()
        self._socket, self._child = self._spawn()

    @property
    def pid(self) -> int:
        """Process id of the present template."""
        return self._child.pid

    def _spawn(self) -> tuple[socket.socket, Child]:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs, self._log.open("ab") as output:
            fd = theirs.fileno()
            argv = python_argv(
                "regrow.launchers.template", str(fd), str(os.getpid()), *self._modules
            )
            try:
                pid = spawn(argv, self._environ, output=output.fileno(), keep=[fd])
            except BaseException:
                ours.close()
                raise
        return ours, Child(pid)

    def _attach(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._closed:
            raise LaunchError("the launcher is closed")
        if self._loop is None:
            self._loop = loop
            if self._child.cause is not None:
                self._revive()
            loop.add_reader(self._socket, self._readable)
            self._beat()
        return loop

    def _detach(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._loop = None
        if self._beats is not None:
            self._beats.cancel()

    def _beat(self) -> None:
        if self._unanswered >= (_PINGS_UNANSWERED if self._ready else _PINGS_WHILE_IT_IMPORTS):
            silent_s = self._unanswered * _PING_S
            logger.error("the template has been silent for %g s: it is ended", silent_s)
            self._child.send(9)
            return
        self._unanswered += 1
        self._send({"ping": True})
        self._beats = asyncio.get_running_loop().call_later(_PING_S, self._beat)

    async def fork(self, entry: str, spec: Mapping[str, Any], *, log: Path, name: str) -> int:
        """Forks a process that calls `entry` ("module:function") with `spec`.

        Returns:
            Its process id. It is a child of this process, in a session of its own.

        Raises:
            LaunchError: If it could not be forked.
        """
        try:
            loop = self._attach()
        except OSError as error:
            self._detach()
            raise LaunchError(f"the template process cannot be started again: {error}") from None
        number = next(self._ids)
        request = {"id": number, "entry": entry, "spec": spec, "log": str(log), "name": name}
        pending = _Pending(request, loop.create_future())
        self._pending[number] = pending
        self._send(request)
        try:
            async with asyncio.timeout(FORK_DEADLINE_S):
                return await pending.answer
        except TimeoutError:
            raise LaunchError(
                f"waited {FORK_DEADLINE_S:g} s for the template process to start {name}"
            ) from None
        finally:
            del self._pending[number]

    def _send(self, request: dict[str, Any]) -> None:
        self._outbox += pack(request)
        self._flush()

    def _flush(self) -> None:
        assert self._loop is not None
        try:
            while self._outbox:
                del self._outbox[: self._socket.send(self._outbox)]
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._flush)
            return
        except OSError:
            # The template is dead; reading from the socket tells so too, and deals with it.
            self._outbox.clear()
        self._loop.remove_writer(self._socket)

    def _readable(self) -> None:
        try:
            chunk = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._died()
            return
        self._unanswered = 0
        self._inbox += chunk
        for message in unpack(self._inbox):
            self._handle(message)

    def _handle(self, message: dict[str, Any]) -> None:
        if "ping" in message:
            return
        if "id" not in message:
            self._ready = True
            self._error = message.get("error")
            if message.get("threads", 1) != 1:
                logger.warning("the template has %d threads: unsafe to fork", message["threads"])
            return
        pending = self._pending.get(message["id"])
        answered = pending is None or pending.answer.done()
        if "pid" in message:
            self._deaths = 0
            if answered:
                end_child(message["pid"])
            elif pending is not None:
                pending.answer.set_result(message["pid"])
        elif pending is not None and not answered:
            pending.answer.set_exception(LaunchError(message["error"]))

    def _died(self) -> None:
        """Starts the template again, unless that seems to be of no use."""
        self._detach()
        cause = self._child.wait(1.0) or "it closed its connection"
        self._child.send(9)
        self._end_strays()
        self._deaths += 1
        if self._error is None and self._deaths < _ATTEMPTS:
            logger.warning("the template process died (%s); it is started again", cause)
            try:
                # Its successor imports while nobody waits for it.
                self._attach()
            except OSError as error:
                self._detach()
                cause = f"{cause}; its successor cannot be started: {error}"
            else:
                return
        why = self._error or cause
        hint = "".join(f"; {line}" for line in tail(self._log, lines=1))
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(
                    LaunchError(f"the template process of the workers died: {why}{hint}")
                )
        self._error, self._deaths = None, 0

    def _revive(self) -> None:
        fresh = self._spawn()
        self._socket.close()
        self._socket, self._child = fresh
        self._inbox.clear()
        self._outbox.clear()
        self._unanswered, self._ready = 0, False
        for pending in self._pending.values():
            self._outbox += pack(pending.request)
        assert self._loop is not None
        self._loop.add_writer(self._socket, self._flush)

    def _end_strays(self) -> None:
        """Ends what the template forked without having been able to tell of it.

        It will be asked for again. Such a process is a child of ours that carries our mark and
        that nobody knows of. The process between may be one too, hence the second look.
        """
        run_id = self._environ.get(RUN_MARK)
        while run_id is not None:
            strays = (children_of(os.getpid()) & marked(run_id)) - self._known()
            if not strays:
                break
            for pid in strays:
                end_child(pid)

    def close(self) -> None:
        """Ends the template; what it has forked goes on."""
        self._detach()
        self._closed = True
        self._socket.close()
        self._child.send(9)
        self._child.wait(1.0)
