"""What the tests of the client share: a cluster in small, and scripts in processes of their own."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import regrow
from regrow.channel import rgcb
from regrow.client.callhost import CallbackHost
from regrow.client.settings import Settings
from regrow.head.callbacks import Callbacks
from regrow.worker.callbacks import CallbackRelay, HostCallbacks

SOURCES = str(Path(regrow.__file__).parents[1])


class Rig:
    """The head's and the worker's end of host callbacks, in this process, with a real socket."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        self.freed = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(options,))
        self._ready = threading.Event()
        self._thread.start()
        assert self._ready.wait(10)
        self.relay = CallbackRelay(self._send, self._freed, answer_timeout_s=20)

    def host(self) -> CallbackHost:
        """A client's end whose session has begun."""
        host = CallbackHost(Settings.of(self.path))
        self.do(self.head.open, host.nonce)
        return host

    def callbacks(self, host: CallbackHost, *functions: Callable[..., Any]) -> HostCallbacks:
        """What a worker makes of a program that has these host callbacks."""
        token = host.register([lambda *a, f=f: (f(*a),) for f in functions])
        self.do(self.head.hold, host.nonce, token, "worker")
        return HostCallbacks(self.relay, rgcb.ProgramCallbacks(host.nonce, token, len(functions)))

    def do(self, function: Callable[..., None], *arguments: Any) -> None:
        """Runs a function on the head's loop, and waits for it."""
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (function(*arguments), done.set()))
        assert done.wait(10)

    def close(self) -> None:
        self.relay.close("the worker is ending")
        reporter = self.relay._reporter
        if reporter is not None:
            reporter.join(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _send(self, call: int, nonce: str, token: int, index: int, payload: bytes) -> None:
        def done(answer: Any) -> None:
            self.relay.answered(call, answer)

        self._loop.call_soon_threadsafe(self.head.call, nonce, token, index, payload, done)

    def _freed(self, nonce: str, token: int) -> None:
        self.freed += 1
        self._loop.call_soon_threadsafe(self.head.release, nonce, token, "worker")

    def _run(self, options: dict[str, Any]) -> None:
        loop = self._loop
        loop.run_until_complete(self._begin(options))
        accepting = loop.create_task(self._accept())
        loop.call_soon(self._ready.set)
        loop.run_forever()
        loop.run_until_complete(asyncio.sleep(0))  # A connection that was just accepted is taken.
        accepting.cancel()
        loop.run_until_complete(asyncio.gather(accepting, return_exceptions=True))
        for nonce in list(self.head._pools):
            self.head.close(nonce)
        self._listener.close()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    async def _begin(self, options: dict[str, Any]) -> None:
        self.head = Callbacks(**options)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._listener.setblocking(False)

    async def _accept(self) -> None:
        while True:
            sock, _ = await self._loop.sock_accept(self._listener)
            try:
                first = await self._loop.sock_recv(sock, rgcb.PREFACE_BYTES)
                nonce = first[8:].decode("ascii")
            except BaseException:
                sock.close()
                raise
            self.head.adopt(sock, nonce)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "head.sock")
    yield made
    made.close()


@pytest.fixture
def hasty_rig(tmp_path: Path) -> Iterator[Rig]:
    """A rig with short deadlines."""
    made = Rig(tmp_path / "head.sock", connect_timeout_s=0.3, answer_timeout_s=0.3)
    yield made
    made.close()


@pytest.fixture
def knocking(tmp_path: Path) -> Iterator[Path]:
    """The socket of a rig that lets in who has the token "sesame"."""

    def refusal(sock: socket.socket, token: str) -> str | None:
        return None if token == "sesame" else f"no {token or 'token'}"

    made = Rig(tmp_path / "head.sock", refusal=refusal)
    yield made.path
    made.close()


def run_python(
    arguments: Sequence[str],
    directory: Path,
    variables: Mapping[str, str] | None = None,
    timeout_s: float = 60,
) -> subprocess.CompletedProcess[str]:
    """Runs this Python in that directory, with an environment that names no cluster."""
    kept = ("REGROW_HOME", "REGROW_TEST_RUN")
    ours = ("REGROW_", "JAX_", "IFRT_")
    env = {k: v for k, v in os.environ.items() if k in kept or not k.startswith(ours)}
    env["PYTHONPATH"] = SOURCES
    env.update(variables or {})
    env["PYTHONUNBUFFERED"] = "1"
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python in an empty directory."""

    def run(
        *arguments: str, variables: Mapping[str, str] | None = None, timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        return run_python(arguments, tmp_path, variables, timeout_s)

    return run
