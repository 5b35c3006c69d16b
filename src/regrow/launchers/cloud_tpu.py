"""Slices that are those of queued resources of the Cloud TPU on this machine: a launcher of the head.

Workers share memory with the head and reach it by Unix sockets, so that the slices have to be local
ones. They run under their host's agent, which ends them when the head is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final
from urllib.parse import urlsplit

from regrow.cloud.local import connect
from regrow.cloud.names import Place
from regrow.cloud.remote.sessions import LOST_STATUS, LocalShell, Session
from regrow.cloud.remote.targets import Host, hosts_of_queued
from regrow.config import TpuConfig
from regrow.errors import ControlError, LaunchError, RegrowError, UnsupportedError
from regrow.launchers.base import HostSpec
from regrow.launchers.handles import PidfdHandle, kill_all
from regrow.launchers.local import WORKER_ENTRY, LocalLauncher, LocalProcess, worker_environ
from regrow.launchers.logs import HostLog
from regrow.launchers.template import pack, unpack
from regrow.processes import RUN_MARK, python_argv

log = logging.getLogger(__name__)

_WORKER: Final = "regrow.launchers.cloud_worker"
# The head gives up after its own deadline, which is told less well.
_PATIENCE: Final = 0.8
_POLL_S: Final = 0.2
_END_DEADLINE_S: Final = 5.0


@final
class CloudProcess(PidfdHandle):
    """A worker on a host of a slice, the child of the host's agent, which tells how it ended."""

    def __init__(
        self, pid: int, session: Session, host: Host, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(pid, loop)
        self._session = session
        self._host = host
        loop.add_reader(session.fileno(), self._ended)

    def _ended(self) -> None:
        self._loop.remove_reader(self._session.fileno())
        self._is_over(_describe(self._session.finish(), self._host))


def _describe(status: int | None, host: Host) -> str:
    where = f"on {host.node} worker {host.worker}"
    if status is None or status == LOST_STATUS:
        return f"its host was lost ({where})"
    if status > 128:
        with contextlib.suppress(ValueError):
            number = signal.Signals(status - 128)
            return f"{number.name} (signal {number.value}) {where}"
    return f"exit status {status} {where}"


@final
class CloudTpuLauncher:
    """Starts hosts on those of queued resources; what is no host is a process of this machine.

    A slice that is lost with its host is started again once the Cloud TPU has repaired it. A repair
    resets the other slices of the same queued resource, so that slices which are to be lost one by
    one need a queued resource each.
    """

    def __init__(self, config: TpuConfig, log_dir: Path, *, start_deadline_s: float) -> None:
        """Begins the imports of what is no host; call it early.

        Args:
            config: The queued resources.
            log_dir: Directory for the logs of all processes.
            start_deadline_s: How long a host may take to be up.

        Raises:
            UnsupportedError: If they are not on this machine.
        """
        if urlsplit(config.endpoint).scheme == "https":
            raise UnsupportedError(
                f"the slices of {config.endpoint} are on other machines: a cluster takes only those "
                "of the local Cloud TPU; see regrow multihost for programs on real ones"
            )
        self.channel_port: int | None = None
        self._local = LocalLauncher(log_dir)
        self._config = config
        self._client = connect(config.endpoint)
        self._place = Place(config.project, config.zone)
        self._log_dir = log_dir
        self._patience_s = start_deadline_s * _PATIENCE
        self._logs: dict[str, HostLog] = {}
        self._running: set[CloudProcess] = set()
        environ = worker_environ(os.environ)
        # The mark of the host stays, by which it finds all that runs on it.
        self._environ = {name: value for name, value in environ.items() if name != RUN_MARK}

    # --- what the head asks for ---

    async def start(self, spec: HostSpec) -> CloudProcess:
        """Starts one host, as soon as its slice is READY.

        Raises:
            LaunchError: If it could not be started.
        """
        path = self._logs.setdefault(spec.label, HostLog(self._log_dir, spec.label)).begin()
        try:
            process = await asyncio.wait_for(self._start(spec, path), self._patience_s)
        except TimeoutError:
            raise LaunchError(f"{spec.label} did not begin in {self._patience_s:g} s") from None
        except OSError as error:
            raise LaunchError(f"{spec.label} could not be started: {error}") from None
        self._running.add(process)
        process.on_exit(lambda _: self._running.discard(process))
        return process

    async def _start(self, spec: HostSpec, path: Path) -> CloudProcess:
        host = await self._ready(spec)
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours:
            with theirs, path.open("ab") as output:
                streams = [theirs.fileno(), output.fileno(), output.fileno()]
                session = LocalShell().start(host, self._command(), streams)
            try:
                pid = await _pid(ours)
                told = {
                    "entry": WORKER_ENTRY,
                    "spec": spec.for_worker(),
                    "name": f"rg-s{spec.slice_index}h{spec.host_index}",
                }
                process = CloudProcess(pid, session, host, loop)
                await loop.sock_sendall(ours, pack(told))
            except BaseException:
                session.end()
                raise
        return process

    async def _ready(self, spec: HostSpec) -> Host:
        """The host that is to run it, once its slice is there."""
        queued_id, node = self._config.slice(spec.slice_index)
        deadline = time.monotonic() + self._patience_s - _POLL_S
        while True:
            try:
                (host,) = await asyncio.to_thread(
                    hosts_of_queued,
                    self._client,
                    self._place,
                    queued_id,
                    str(node),
                    str(spec.host_index),
                )
            except RegrowError as error:
                if time.monotonic() > deadline or not spec.wanted():
                    raise LaunchError(f"{spec.label}: {error}") from None
                await asyncio.sleep(_POLL_S)
            else:
                return host

    def _command(self) -> str:
        words = [*(f"{name}={value}" for name, value in self._environ.items())]
        command = shlex.join([*words, *python_argv(_WORKER)])
        return f'exec env -i {RUN_MARK}="${RUN_MARK}" {command}'

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
        raise ControlError("slices of queued resources have the hosts of their TPUs")

    async def close(self) -> None:
        """Ends every process that was started; the slices stay."""
        await kill_all(self._running, _END_DEADLINE_S)
        self._client.close()
        await self._local.close()


async def _pid(connection: socket.socket) -> int:
    """What a worker tells first."""
    buffer = bytearray()
    loop = asyncio.get_running_loop()
    while chunk := await loop.sock_recv(connection, 1 << 12):
        buffer += chunk
        for message in unpack(buffer):
            return int(message["pid"])
    raise LaunchError("the worker has ended before it began; see its log")
