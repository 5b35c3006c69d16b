"""A host that joins a head on another machine: the other end of `regrow.launchers.joined`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from regrow.channel.handshake import (
    LENGTH,
    Hello,
    Identity,
    WorkerHandshake,
    body_bytes,
    new_link_id,
)
from regrow.channel.stream import tune
from regrow.control import MAX_LINE_BYTES
from regrow.control_aio import LineServer, Peer
from regrow.errors import ControlError, HandshakeError, UsageError, WaitTimeout
from regrow.launchers.leased import unpack_spec
from regrow.launchers.local import LocalLauncher, LocalProcess

log = logging.getLogger(__name__)

_HANDSHAKE_S: Final = 5.0
_PAUSE_S: Final = 0.5
_ENTRY: Final = "regrow.worker.main:run"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """Whom a host joins, and as what.

    Attributes:
        head: Where the head listens for hosts: its machine and a port.
        secret: What it proves to know (see `joined.worker_secret`).
        slice_index: Its slice.
        host_index: Its place in the slice.
        wait_s: How long it tries to reach the head.
    """

    head: tuple[str, int]
    secret: bytes
    slice_index: int
    host_index: int
    wait_s: float

    @property
    def label(self) -> str:
        """Short name for logs and processes."""
        return f"slice{self.slice_index}-host{self.host_index}"


@final
class Joiner:
    """Starts workers for the head that it has joined, one after the other."""

    def __init__(
        self, options: JoinOptions, log_dir: Path, tell: Callable[[str], None] = log.info
    ) -> None:
        """Begins to import what workers need.

        Args:
            options: Whom it joins, and as what.
            log_dir: Where workers log.
            tell: Is called with what happens.
        """
        self._options = options
        self._tell = tell
        self._launcher = LocalLauncher(log_dir)
        self._running: dict[int, LocalProcess] = {}
        self._started = 0
        self._own_address = ""
        self._leaving = False
        self._status = 0
        self._ended = asyncio.Event()

    async def run(self) -> int:
        """Serves one head after the other, until it is told to end; returns the exit status.

        SIGTERM is a notice, as Kubernetes sends it to the first process of a container: the worker gets
        it, too, and may leave with its state saved. A second one ends it at once, as other signals do.
        The status is that of the signal: of a pod that ends with 0 Kubernetes makes no other.

        Raises:
            WaitTimeout: If no head can be reached.
            HandshakeError: If the head does not want it.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._notice)
        loop.add_signal_handler(signal.SIGINT, self._end, 0)
        loop.add_signal_handler(signal.SIGHUP, self._end, 128 + signal.SIGHUP)
        serving = loop.create_task(self._serve())
        ending = loop.create_task(self._ended.wait())
        try:
            await asyncio.wait((serving, ending), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
        finally:
            serving.cancel()
            ending.cancel()
            await asyncio.gather(serving, ending, return_exceptions=True)
            await self._launcher.close()
        return self._status

    def _end(self, status: int) -> None:
        self._status = status
        self._ended.set()

    def _notice(self) -> None:
        """It is going to be ended: when its worker has left, or now if there is none."""
        self._status = 128 + signal.SIGTERM
        if self._leaving or not self._running:
            self._ended.set()
            return
        self._leaving = True
        self._tell(f"{self._options.label} was given notice: it ends when its worker has left")
        for process in self._running.values():
            process.obey(signal.SIGTERM)

    async def _serve(self) -> None:
        while True:
            reader, writer = await self._join()
            self._tell(f"{self._options.label} has joined")
            # A connection serves one head, and what that has started ends with it.
            await LineServer(None, self._do, gone=self._end_all).converse(reader, writer)
            self._tell(f"the head of {self._options.label} is gone")

    async def _join(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = self._options.head
        try:
            async with asyncio.timeout(self._options.wait_s):
                while True:
                    try:
                        return await self._try()
                    except (OSError, asyncio.IncompleteReadError) as error:
                        log.debug("no head at %s:%d yet: %s", host, port, error)
                    await asyncio.sleep(_PAUSE_S)
        except TimeoutError:
            raise WaitTimeout(f"a head at {host}:{port}", self._options.wait_s) from None

    async def _try(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self._options.head, limit=MAX_LINE_BYTES)
        sock: socket.socket = writer.get_extra_info("socket")
        tune(sock)
        self._own_address = sock.getsockname()[0]
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                await self._shake_hands(reader, writer)
        except BaseException:
            writer.close()
            raise
        return reader, writer

    async def _shake_hands(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        options = self._options
        identity = Identity("worker", options.slice_index, options.host_index, 0, os.getpid())
        handshake = WorkerHandshake(options.secret, Hello(identity, new_link_id(), 0))
        writer.write(handshake.answer(await _message(reader)))
        handshake.finish(await _message(reader))

    # --- what the head asks for ---

    def _do(self, peer: Peer, method: str, params: dict[str, Any]) -> Any:
        match method:
            case "start":
                return self._start(peer, params)
            case "signal":
                process = self._running.get(params.get("number", 0))
                if process is not None:
                    process.obey(signal.Signals(params["signal"]))
                return None
            case _:
                raise UsageError(f"a host has no method {method!r}")

    async def _start(self, peer: Peer, params: dict[str, Any]) -> dict[str, int]:
        options = self._options
        if self._leaving:
            raise ControlError(f"{options.label} was given notice, and starts nothing any more")
        spec = unpack_spec(params["spec"]) | {
            "endpoint": [options.head[0], int(params["port"])],
            "secret": options.secret,
            "hostname": self._own_address,
        }
        name = f"rg-s{options.slice_index}h{options.host_index}"
        self._started += 1
        number = self._started
        process = await self._launcher.start_entry(_ENTRY, spec, options.label, name)
        self._running[number] = process
        process.on_exit(lambda cause: self._exited(peer, number, cause))
        self._tell(f"{options.label}: incarnation {spec['incarnation']} has been started")
        return {"number": number, "pid": process.pid}

    def _exited(self, peer: Peer, number: int, cause: str) -> None:
        self._running.pop(number, None)
        peer.tell({"number": number, "cause": cause})
        if self._leaving and not self._running:
            self._ended.set()

    def _end_all(self, _: Peer) -> None:
        for process in self._running.values():
            process.kill()


async def _message(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readexactly(body_bytes(await reader.readexactly(LENGTH.size)))
    except HandshakeError as error:
        raise HandshakeError(f"no head of Regrow listens there: {error}") from None
