"""A relay between the head and its workers, which can be slow, lose what is said, or let nobody in.

It takes the place of the head's socket in the file system. Workers whose connection breaks from then
on come through it; what it does to them is set by process id.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal, TypeAlias, final

from regrow.errors import WaitTimeout

Mode: TypeAlias = Literal["slow", "cut", "lose"]

LATENCY_S: Final = 0.1
_DIRECT: Final = "direct.sock"
# A handshake takes less; what is lost is to be a message.
_HANDSHAKE_S: Final = 0.05
_LOSES_FOR_S: Final = 0.05
_CHUNK_BYTES: Final = 1 << 18
_QUEUE: Final = 1024
_START_S: Final = 5.0
_UCRED: Final = struct.Struct("iII")


@final
class Relay:
    """Relays connections to a Unix socket from `start` to `close`, on a thread of its own."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._direct = self._path.with_name(_DIRECT)
        self._modes: dict[int, Mode] = {}
        self._lines: set[_Line] = set()
        self._admitted: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="regrow-relay", daemon=True)
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._error: OSError | None = None

    def start(self) -> None:
        """Takes the socket's place.

        Raises:
            OSError: It cannot be taken.
        """
        self._thread.start()
        if not self._ready.wait(_START_S):
            raise WaitTimeout("the relay to start", _START_S)
        if self._error is not None:
            raise self._error

    def set_mode(self, pids: Iterable[int], mode: Mode | None) -> None:
        """Sets what is done to the connections of these processes; None: nothing."""
        for pid in pids:
            if mode is None:
                self._modes.pop(pid, None)
            else:
                self._modes[pid] = mode
        self._loop.call_soon_threadsafe(self._drop_cut)

    def close(self) -> None:
        """Gives the socket its place back; connections through the relay break."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # It may have just ended.
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(_START_S)

    def mode_of(self, pid: int) -> Mode | None:
        """What is done to the connections of a process."""
        return self._modes.get(pid)

    def lost(self, pid: int) -> None:
        """Something that a process has said was lost: that is done once."""
        if self._modes.get(pid) == "lose":
            del self._modes[pid]

    def _drop_cut(self) -> None:
        for line in self._lines:
            if self._modes.get(line.pid) == "cut":
                line.abort()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except OSError as error:
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._path.rename(self._direct)
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(self._path))
                self._path.chmod(0o600)
                listener.listen()
                listener.setblocking(False)
                self._loop.add_reader(listener, self._accept, listener)
                self._ready.set()
                await self._stop.wait()
                self._loop.remove_reader(listener)
        finally:
            # A head that ends removes its socket itself.
            with contextlib.suppress(FileNotFoundError):
                self._direct.replace(self._path)
        for task in self._admitted:
            task.cancel()
        await asyncio.gather(*self._admitted, return_exceptions=True)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            worker, _ = listener.accept()
            task = self._loop.create_task(self._admit(worker))
            self._admitted.add(task)
            task.add_done_callback(self._admitted.discard)
            # Also if the relay is closed before the task has begun.
            task.add_done_callback(lambda _: worker.close())

    async def _admit(self, worker: socket.socket) -> None:
        with socket.socket(socket.AF_UNIX) as head:
            credentials = worker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            pid, uid, _ = _UCRED.unpack(credentials)
            if uid != os.geteuid() or self._modes.get(pid) == "cut":
                return
            head.setblocking(False)
            worker.setblocking(False)
            line = _Line(self, pid, worker, head)
            self._lines.add(line)
            try:
                await self._loop.sock_connect(head, str(self._direct))
                await line.run()
            except OSError:
                return  # Either side has ended: so does the other.
            finally:
                self._lines.discard(line)


@final
class _Line:
    """One connection of a worker, and its continuation to the head."""

    def __init__(self, relay: Relay, pid: int, worker: socket.socket, head: socket.socket) -> None:
        self.pid = pid
        self._relay = relay
        self._worker = worker
        self._head = head
        self._loop = asyncio.get_running_loop()
        self._began_at = self._loop.time()

    async def run(self) -> None:
        """Relays until either side ends.

        Raises:
            OSError: One has.
        """
        tasks = []
        for source, sink in ((self._worker, self._head), (self._head, self._worker)):
            queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUE)
            tasks.append(asyncio.create_task(self._read(source, queue)))
            tasks.append(asyncio.create_task(self._write(queue, sink)))
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def abort(self) -> None:
        """Breaks it."""
        for sock in (self._worker, self._head):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    async def _read(self, source: socket.socket, queue: asyncio.Queue[tuple[float, bytes]]) -> None:
        while chunk := await self._loop.sock_recv(source, _CHUNK_BYTES):
            mode, now = self._relay.mode_of(self.pid), self._loop.time()
            if mode == "lose" and source is self._worker and now > self._began_at + _HANDSHAKE_S:
                self._relay.lost(self.pid)
                # What else it says until the connection breaks is lost with it.
                await asyncio.sleep(_LOSES_FOR_S)
                break
            await queue.put((now + LATENCY_S if mode == "slow" else now, chunk))
        raise ConnectionError("this side has ended")

    async def _write(self, queue: asyncio.Queue[tuple[float, bytes]], sink: socket.socket) -> None:
        while True:
            due_at, chunk = await queue.get()
            await asyncio.sleep(max(0.0, due_at - self._loop.time()))
            await self._loop.sock_sendall(sink, chunk)
