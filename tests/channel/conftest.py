"""A head and its workers' ends in one process, and a proxy between them that cuts connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from regrow.channel.handshake import Hello, Identity, new_secret
from regrow.channel.head_end import HeadChannel, WorkerServer, serve_workers
from regrow.channel.stream import Endpoint
from regrow.channel.worker_end import WorkerChannel
from waiting import until_on_loop

WAIT_S = 10.0


class Bench:
    """One server with one channel, whatever workers a test connects, and what both sides saw."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "workers.sock")
        self.secret = new_secret()
        self.at_head: list[bytes] = []
        self.at_worker: list[bytes] = []
        self.broken: list[str] = []
        self.attached = 0
        self.lost: list[str] = []
        self.lost_event = threading.Event()
        self.hellos: list[Hello] = []
        self.refuse_with: str | None = None
        self.workers: list[WorkerChannel] = []
        self.server: WorkerServer
        self.new_channel()

    def new_channel(self) -> None:
        """A channel for another process; forgets what the last one did."""
        self.at_head.clear()
        self.broken.clear()
        self.attached = 0
        self.channel = HeadChannel(
            "slice 0 host 0",
            lambda payload: self.at_head.append(bytes(payload)),
            self.broken.append,
            self._on_attached,
        )

    def _on_attached(self) -> None:
        self.attached += 1

    def _on_lost(self, cause: str) -> None:
        self.lost.append(cause)
        self.lost_event.set()

    def authorize(self, hello: Hello) -> HeadChannel | str:
        self.hellos.append(hello)
        return self.refuse_with or self.channel

    @contextlib.asynccontextmanager
    async def serving(self, **options: Any) -> AsyncIterator[Bench]:
        endpoint: Endpoint = options.pop("endpoint", self.path)
        self.server = await serve_workers(endpoint, self.secret, self.authorize, **options)
        try:
            yield self
        finally:
            for worker in self.workers:
                await asyncio.to_thread(worker.close)
            self.channel.close()
            await self.server.close()

    def worker(self, endpoint: Endpoint | None = None, **options: Any) -> WorkerChannel:
        on_payload = options.pop(
            "on_payload", lambda payload: self.at_worker.append(bytes(payload))
        )
        worker = WorkerChannel(
            endpoint or self.server.endpoint,
            options.pop("secret", self.secret),
            Identity("worker", 0, 0, 1, os.getpid()),
            on_payload,
            self._on_lost,
            **options,
        )
        self.workers.append(worker)
        return worker

    async def connected(self, endpoint: Endpoint | None = None, **options: Any) -> WorkerChannel:
        worker = self.worker(endpoint, **options)
        await asyncio.to_thread(worker.connect, WAIT_S)
        return worker


class CuttingProxy:
    """Forwards connections to a server, and cuts them on demand, in the middle of what they carry."""

    def __init__(self, target: str, path: str) -> None:
        self._target = target
        self.path = path
        self._writers: set[asyncio.StreamWriter] = set()
        self.refusing = False
        self.connections = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[CuttingProxy]:
        server = await asyncio.start_unix_server(self._serve, self.path)
        try:
            yield self
        finally:
            server.close()
            self.cut()
            await asyncio.sleep(0.02)

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            writer.transport.abort()
            return
        self.connections += 1
        up_reader, up_writer = await asyncio.open_unix_connection(self._target)
        pair = {writer, up_writer}
        self._writers |= pair
        await asyncio.gather(self._copy(reader, up_writer), self._copy(up_reader, writer))
        self._writers -= pair

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(50_000):
                writer.write(data)
                await writer.drain()
        except OSError:
            return
        finally:
            writer.transport.abort()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def wait_until() -> Any:
    return until_on_loop


@pytest.fixture
def proxy_for(tmp_path: Path) -> Callable[[str], CuttingProxy]:
    return lambda target: CuttingProxy(target, str(tmp_path / "proxy.sock"))
