"""The actor that holds a host's place on a Ray cluster, and runs our worker there.

It is an async actor: its loop's thread, which starts the worker, lives as long as the actor does, and
with it the worker (PR_SET_PDEATHSIG). So a raylet that dies takes actor and worker along.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, Final, final

import msgpack

from regrow.launchers.local import worker_environ
from regrow.processes import Child, boot_id, python_argv, spawn

_WORKER: Final = "regrow.ray.worker_process"
_ALIKE: Final = ("jax", "jaxlib")
_REAPED_S: Final = 5.0


@final
class HostActor:
    """One host of a slice, on the node that Ray has chosen."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self._pipe: BinaryIO | None = None

    async def prepare(self, worker: Mapping[str, Any]) -> str:
        """Starts a worker that imports what it needs, and waits for what it is to be.

        Args:
            worker: argv and environ of it, the boot of the head's machine, the versions there, and
                whether hosts may be far from it.

        Returns:
            Why it was not started; empty if it was.
        """
        # Until it is told its log, what it says is in that of this actor.
        return _refused(worker) or self._spawn(worker, os.dup(1))

    async def start(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Starts the worker, or tells the one that waits what it is.

        Args:
            told: worker (see `prepare`), log, entry, spec and name of it, and where the head listens:
                head and port.

        Returns:
            Its process id, or why it was not started.
        """
        worker, spec = told["worker"], dict(told["spec"])
        log = told["log"] if worker["boot"] == boot_id() else ""
        if worker["far"]:
            spec |= {"endpoint": [told["head"], told["port"]], "hostname": node_address()}
        if self._pipe is None:
            error = _refused(worker) or self._spawn(worker, _opened(log))
            if error:
                return {"error": error}
        assert self._child is not None
        assert self._pipe is not None
        with self._pipe as pipe, contextlib.suppress(BrokenPipeError):
            text = {"entry": told["entry"], "name": told["name"], "spec": spec, "log": log}
            pipe.write(msgpack.packb(text | {"parent": os.getpid()}))
        return {"pid": self._child.pid}

    def _spawn(self, worker: Mapping[str, Any], output: int) -> str:
        """Starts the worker's process with its output there, which is closed here."""
        argv, environ = worker["argv"], self._environ(worker["environ"])
        if worker["far"]:
            argv, environ = _own_argv(argv), self._environ(_own_environ())
        reader, writer = os.pipe()
        try:
            pid = spawn(argv, environ, stdin=reader, output=output)
        except OSError as error:
            os.close(writer)
            return f"node {node_address()} cannot start a worker: {error}"
        finally:
            os.close(reader)
            os.close(output)
        self._child, self._pipe = Child(pid), os.fdopen(writer, "wb")
        return ""

    async def answer(self) -> None:
        """Answers, as long as its node lives."""

    async def signal(self, number: int, group: bool) -> None:
        """Sends the worker a signal, or its whole group."""
        child = self._child
        if child is None or child.poll() is not None:
            return
        child.send(number)
        if group:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, number)

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


def versions() -> dict[str, str]:
    """What has to be alike where a host and where its head is; Ray sees to itself and to Python."""
    found = {}
    for name in _ALIKE:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def node_address() -> str:
    """The address of this process's node."""
    import ray

    return str(ray.util.get_node_ip_address())


def _refused(worker: Mapping[str, Any]) -> str:
    """Why no host of this head can be here; empty if one can."""
    if not worker["far"] and worker["boot"] != boot_id():
        return (
            f"node {node_address()} is another machine than the head's, whose sockets and memory its "
            "hosts use: start the cluster with --other-machines"
        )
    here, there = versions(), worker["versions"]
    differing = sorted(name for name in there if here.get(name) != there[name])
    if not differing:
        return ""
    ours = ", ".join(f"{name} {here.get(name, 'not at all')}" for name in differing)
    theirs = ", ".join(f"{name} {there[name]}" for name in differing)
    return f"node {node_address()} has {ours}, the head {theirs}: install the same on both"


def _own_argv(argv: Sequence[str]) -> list[str]:
    """A command with the Python of this machine."""
    start = argv.index(_WORKER)
    return python_argv(_WORKER, *argv[start + 1 :])


def _own_environ() -> dict[str, str]:
    """The environment of a worker on a machine that need not be like the head's."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return worker_environ(os.environ) | {"PYTHONPATH": paths}


def _opened(log: str) -> int:
    """The file for its output: the head's if that is on this machine, else this actor's own."""
    if not log:
        return os.dup(1)
    return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
