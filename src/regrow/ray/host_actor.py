"""The actor that holds a host's place on a Ray cluster, and runs our worker there.

It is an async actor: its loop's thread, which starts the worker, lives as long as the actor does, and
with it the worker (PR_SET_PDEATHSIG). So a raylet that dies takes actor and worker along.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from typing import Any, Final, final

import msgpack

from regrow.processes import Child, boot_id, spawn

_REAPED_S: Final = 5.0


@final
class HostActor:
    """One host of a slice, on the node that Ray has chosen."""

    def __init__(self) -> None:
        self._child: Child | None = None

    async def start(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Starts the worker.

        Args:
            told: argv, environ, log, entry, spec and name of it, and the boot of the head's machine.

        Returns:
            Its process id, or why it was not started.
        """
        if told["boot"] != boot_id():
            return {
                "error": "this node is another machine than the head's: its hosts reach the head "
                "through sockets of its machine"
            }
        reader, writer = os.pipe()
        log = os.open(told["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            environ = self._environ(told["environ"])
            pid = spawn(told["argv"], environ, stdin=reader, output=log)
        finally:
            os.close(reader)
            os.close(log)
        self._child = Child(pid)
        with os.fdopen(writer, "wb") as pipe, contextlib.suppress(BrokenPipeError):
            text = {name: told[name] for name in ("entry", "spec", "name")}
            pipe.write(msgpack.packb(text | {"parent": os.getpid()}))
        return {"pid": pid}

    @staticmethod
    def _environ(given: Mapping[str, str]) -> dict[str, str]:
        # What Ray has set for the accelerators of this place.
        names = ("TPU_", "CUDA_VISIBLE", "ROCR_VISIBLE", "HIP_VISIBLE")
        own = {name: value for name, value in os.environ.items() if name.startswith(names)}
        return dict(given) | own

    async def wait(self) -> str:
        """Returns when the worker has ended: how."""
        child = self._child
        if child is None:
            return "it was never started"
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        if child.poll() is None:
            descriptor = child.fd
            loop.add_reader(descriptor, ended.set)
            await ended.wait()
            loop.remove_reader(descriptor)
        cause = await asyncio.to_thread(child.wait, _REAPED_S) or "an end that nobody could see"
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        return cause
