"""Slices that are placement groups of a Ray cluster: the launcher of the head."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from regrow.config import RayConfig
from regrow.errors import ControlError, LaunchError
from regrow.launchers.base import HostSpec
from regrow.launchers.handles import PidfdHandle, ProcessHandle
from regrow.launchers.local import (
    WORKER_ENTRY,
    WORKER_MODULES,
    LocalLauncher,
    LocalProcess,
    worker_environ,
)
from regrow.launchers.logs import HostLog
from regrow.launchers.template import pack, unpack
from regrow.processes import (
    HOST_MARK,
    RUN_MARK,
    Child,
    boot_id,
    python_argv,
    spawn,
    telling_line,
)
from regrow.ray.host_actor import versions
from regrow.ray.places import describe

log = logging.getLogger(__name__)

_BRIDGE: Final = "regrow.ray.bridge"
_PATIENCE: Final = 0.8
_CAUSE_S: Final = 0.25
_END_S: Final = 5.0
_KILLED: Final = "SIGKILL (signal 9)"
_BACKOFF_S: Final = (0.2, 1.0, 5.0)


@final
class RayProcess(PidfdHandle):
    """A worker that an actor has started on this machine, and tells how it ended."""

    def __init__(self, pid: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(pid, loop)
        self._told: str | None = None
        self._killed = False
        self._timer: asyncio.TimerHandle | None = None
        loop.add_reader(self.fd, self._ended)

    def kill(self) -> None:
        """Ends it and the processes of its group."""
        self._killed = True
        super().kill()

    def told(self, cause: str) -> None:
        """Takes from its actor how it ended."""
        self._told = cause
        if self._timer is not None:
            self._timer.cancel()
            self._finish()

    def _ended(self) -> None:
        self._loop.remove_reader(self.fd)
        if self._told is None:
            self._timer = self._loop.call_later(_CAUSE_S, self._finish)
        else:
            self._finish()

    def _finish(self) -> None:
        self._timer = None
        unknown = _KILLED if self._killed else "it has ended, and its Ray node tells no more"
        self._is_over(self._told or unknown)


@final
class FarProcess(ProcessHandle):
    """A worker on a node that may be another machine: its actor signals it, and tells how it ended."""

    def __init__(
        self,
        pid: int,
        loop: asyncio.AbstractEventLoop,
        signal_it: Callable[[signal.Signals, bool], None],
    ) -> None:
        super().__init__(pid, loop)
        self._signal_it = signal_it

    def send(self, signum: signal.Signals) -> None:
        """Sends it, and nothing that it has started, a signal."""
        if self._cause is None:
            self._signal_it(signum, False)

    def _send_group(self, signum: signal.Signals) -> None:
        if self._cause is None:
            self._signal_it(signum, True)

    def told(self, cause: str) -> None:
        """Takes from its actor how it ended."""
        if self._cause is None:
            self._is_over(cause)


@final
@dataclass(slots=True)
class _Group:
    """An incarnation of a slice: its place is given back when all its hosts have ended."""

    note: Callable[[str], None]
    hosts: set[int] = field(default_factory=set)
    waiting: int = 0


@final
class RayLauncher:
    """Starts hosts as workers of actors; what is no host is a process of this machine.

    The constructor needs no event loop; call it early, since it starts the imports.

    Attributes:
        channel_port: See `base.Launcher`.
    """

    def __init__(
        self,
        config: RayConfig,
        log_dir: Path,
        *,
        hosts_per_slice: int,
        start_deadline_s: float,
        log_level: int = 3,
    ) -> None:
        """Begins to join the Ray cluster.

        Args:
            config: The cluster, and what a host needs of it.
            log_dir: Directory for the logs of all processes.
            hosts_per_slice: Hosts of a slice, which get places together.
            start_deadline_s: How long a host may take to be up.
            log_level: TF_CPP_MIN_LOG_LEVEL of the workers.
        """
        self._config = config
        self.channel_port: int | None = 0 if config.other_machines else None
        self._local = LocalLauncher(log_dir, log_level=log_level)
        self._log_dir = log_dir
        self._hosts_per_slice = hosts_per_slice
        run_id = os.environ.get(RUN_MARK, "")
        environ = worker_environ(os.environ, log_level=log_level)
        self._worker = {
            "argv": python_argv("regrow.ray.worker_process", *WORKER_MODULES),
            "environ": environ | {RUN_MARK: run_id, HOST_MARK: run_id},
            "boot": boot_id(),
            "far": config.other_machines,
            "versions": versions(),
        }
        self._settings = json.dumps(
            {
                "address": config.address,
                "resources": dict(config.resources),
                "strategy": config.strategy,
                "other_machines": config.other_machines,
                "patience_s": start_deadline_s * _PATIENCE,
            }
        )
        needed = describe(config.resources, hosts_per_slice)
        self._asks = f"asks the Ray cluster at {config.address} for {needed}"
        self._spare = {"hosts": hosts_per_slice, "worker": self._worker}
        self._logs: dict[str, HostLog] = {}
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._running: dict[tuple[int, int, int], RayProcess | FarProcess] = {}
        self._groups: dict[tuple[int, int], _Group] = {}
        self._deaths = 0
        self._closed = False
        self._error = ""
        self._reading: asyncio.Task[None] | None = None
        self._ready: asyncio.Event = asyncio.Event()
        self._socket, self._child = self._spawn()

    def _spawn(self) -> tuple[socket.socket, Child]:
        ours, theirs = socket.socketpair()
        with theirs, (self._log_dir / "ray.log").open("ab") as output:
            argv = python_argv(_BRIDGE, str(theirs.fileno()), str(os.getpid()), self._settings)
            environ = {name: one for name, one in os.environ.items() if name != "RAY_ADDRESS"}
            pid = spawn(argv, environ, output=output.fileno(), keep=[theirs.fileno()])
        ours.setblocking(False)
        # Not among its arguments, which everybody on this machine may read.
        ours.send(pack({"op": "spares", "number": self._config.spares, **self._spare}))
        return ours, Child(pid)

    # --- what the head asks for ---

    async def start(self, spec: HostSpec) -> RayProcess | FarProcess:
        """Starts one host where Ray has a place for its slice.

        Raises:
            LaunchError: If it could not be started.
        """
        hostlog = self._logs.setdefault(spec.label, HostLog(self._log_dir, spec.label))
        path = hostlog.begin()
        try:
            return await self._start(spec, path)
        except LaunchError as error:
            with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
                file.write(f"regrow: {error}\n")
            raise

    async def _start(self, spec: HostSpec, path: Path) -> RayProcess | FarProcess:
        key = (spec.slice_index, spec.incarnation)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(spec.note)
            spec.note(self._asks)
        group.waiting += 1
        try:
            answer = await self._ask(
                {
                    "op": "start",
                    "slice": spec.slice_index,
                    "host": spec.host_index,
                    "incarnation": spec.incarnation,
                    "hosts": self._hosts_per_slice,
                    "told": self._told(spec, path),
                }
            )
            if "error" in answer:
                raise LaunchError(f"{spec.label}: {answer['error']}")
            try:
                process = self._watched(spec, answer["pid"])
            except ProcessLookupError:
                raise LaunchError(f"{spec.label} was gone before it could be watched") from None
            group.hosts.add(spec.host_index)
        finally:
            group.waiting -= 1
            self._free_if_over(key)
        self._running[spec.slice_index, spec.host_index, spec.incarnation] = process
        process.on_exit(lambda _: self._forget(spec))
        return process

    def _watched(self, spec: HostSpec, pid: int) -> RayProcess | FarProcess:
        loop = asyncio.get_running_loop()
        if self.channel_port is None:
            return RayProcess(pid, loop)

        def signal_it(signum: signal.Signals, group: bool) -> None:
            request = {"op": "signal", "slice": spec.slice_index, "host": spec.host_index}
            self._say(
                request | {"incarnation": spec.incarnation, "signal": int(signum), "group": group}
            )

        return FarProcess(pid, loop, signal_it)

    def _told(self, spec: HostSpec, path: Path) -> dict[str, Any]:
        return {
            "worker": self._worker,
            "log": str(path.absolute()),
            "entry": WORKER_ENTRY,
            "spec": spec.for_worker(),
            "name": f"rg-s{spec.slice_index}h{spec.host_index}",
            "port": self.channel_port,
        }

    async def start_entry(
        self, entry: str, spec: Mapping[str, Any], label: str, name: str
    ) -> LocalProcess:
        """Starts a process that is no host, on this machine (see `LocalLauncher`)."""
        return await self._local.start_entry(entry, spec, label, name)

    def regroup(self, hosts_per_slice: int) -> None:
        """Refuses.

        Raises:
            ControlError: Always.
        """
        raise ControlError("slices of a Ray cluster have the hosts of their placement groups")

    async def close(self) -> None:
        """Ends every process that was started; the places are given back."""
        self._closed = True
        for process in list(self._running.values()):
            process.kill()
        if self._reading is not None:
            self._reading.cancel()
        self._socket.close()
        self._child.send(signal.SIGKILL)
        await asyncio.to_thread(self._child.wait, _END_S)
        await self._local.close()

    def _forget(self, spec: HostSpec) -> None:
        self._running.pop((spec.slice_index, spec.host_index, spec.incarnation), None)
        key = (spec.slice_index, spec.incarnation)
        group = self._groups.get(key)
        if group is not None:
            group.hosts.discard(spec.host_index)
            self._free_if_over(key)

    def _free_if_over(self, key: tuple[int, int]) -> None:
        group = self._groups.get(key)
        if group is None or group.hosts or group.waiting or self._closed:
            return
        del self._groups[key]
        self._say({"op": "free", "slice": key[0], "incarnation": key[1]})

    # --- the bridge ---

    def _say(self, request: dict[str, Any]) -> None:
        """Asks for what is not answered; a bridge that has ended has done it all."""
        with contextlib.suppress(OSError):
            self._socket.send(pack(request))

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        if self._reading is None or self._reading.done():
            self._reading = loop.create_task(self._read())
        await self._ready.wait()
        if self._error:
            raise LaunchError(self._error)
        number = next(self._ids)
        answer: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._pending[number] = answer
        try:
            await loop.sock_sendall(self._socket, pack(request | {"id": number}))
            return await answer
        except OSError as error:
            raise LaunchError(f"the bridge to Ray is gone: {error}") from None
        finally:
            self._pending.pop(number, None)

    async def _read(self) -> None:
        """Takes what the bridge says; starts it again when it has ended."""
        loop = asyncio.get_running_loop()
        while not self._closed:
            buffer = bytearray()
            with contextlib.suppress(OSError):
                while chunk := await loop.sock_recv(self._socket, 1 << 16):
                    buffer += chunk
                    for message in unpack(buffer):
                        self._take(message)
            await self._again()

    def _take(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self._error, self._deaths = "", 0
            self._ready.set()
        elif "waits" in message:
            group = self._groups.get(tuple(message["waits"]))
            if group is not None:
                group.note(message["text"])
        elif "ended" in message:
            process = self._running.get(tuple(message["ended"]))
            if process is not None:
                process.told(message["cause"])
        elif "id" in message:
            answer = self._pending.get(message["id"])
            if answer is not None and not answer.done():
                answer.set_result(message)
        else:
            self._error = str(message["error"])
            self._ready.set()

    async def _again(self) -> None:
        cause = await asyncio.to_thread(self._child.wait, 5.0)
        why = telling_line(self._log_dir / "ray.log")
        text = f"the bridge to Ray has ended ({cause}){f': {why}' if why else ''}"
        log.warning("%s", text)
        for answer in self._pending.values():
            if not answer.done():
                answer.set_result({"error": self._error or text})
        for process in list(self._running.values()):
            # One that is far away has ended with its actor, and nobody else can tell.
            if isinstance(process, FarProcess):
                process.told(text)
        self._socket.close()
        self._error = self._error or text
        self._ready.set()
        await asyncio.sleep(_BACKOFF_S[min(self._deaths, len(_BACKOFF_S) - 1)])
        self._deaths += 1
        if not self._closed:
            self._ready.clear()
            self._error = ""
            self._socket, self._child = self._spawn()
