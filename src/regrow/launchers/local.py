"""Slices that are processes on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

from regrow.errors import LaunchError
from regrow.launchers.base import HostSpec
from regrow.launchers.forks import ForkServer
from regrow.launchers.handles import ProcessHandle, kill_all
from regrow.launchers.logs import HostLog
from regrow.processes import Child, become_subreaper

logger = logging.getLogger(__name__)

WORKER_ENTRY: Final = "regrow.worker.main:run"
WORKER_MODULES: Final = (
    "jax",
    "regrow.worker.main",
    "regrow.worker.host",
    "regrow.worker.compiler",
)
_HOUSEKEEPING_S: Final = 1.0
_END_DEADLINE_S: Final = 5.0

# What a user sets for the client must not reach the workers: the head alone says what they are.
_FOREIGN_PREFIXES: Final = ("JAX_", "IFRT_PROXY_", "MEGASCALE_", "SLURM_", "OMPI_", "GRPC_")
_WATCHED_S: Final = 0.05
_FOREIGN_XLA_FLAGS: Final = ("--xla_force_host_platform_device_count",)


def worker_environ(base: Mapping[str, str], *, log_level: int = 3) -> dict[str, str]:
    """The environment of workers and compilers, from that of the head."""
    environ = {
        name: value for name, value in base.items() if not name.startswith(_FOREIGN_PREFIXES)
    }
    flags = [
        flag
        for flag in environ.get("XLA_FLAGS", "").split()
        if not flag.startswith(_FOREIGN_XLA_FLAGS)
    ]
    if not any(flag.startswith("--xla_cpu_collective_timeout_seconds") for flag in flags):
        flags.append("--xla_cpu_collective_timeout_seconds=60")
    environ |= {
        "JAX_PLATFORMS": "cpu",
        "OPENBLAS_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": str(log_level),
        "XLA_FLAGS": " ".join(flags),
    }
    return environ


@final
class LocalProcess(ProcessHandle):
    """A process that the template forked for us."""

    def __init__(self, pid: int, log: HostLog, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(pid, loop)
        self._child = Child(pid)
        self._log = log
        loop.add_reader(self._child.fd, self._ended)

    @property
    def log(self) -> Path:
        """The file that it writes its output to."""
        return self._log.path

    def send(self, signum: signal.Signals) -> None:
        """Sends it, and nothing that it has started, a signal."""
        self._child.send(signum)

    def obey(self, signum: signal.Signals) -> None:
        """Sends it a signal; what is to end, stop or continue it goes to its group as well."""
        if signum in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT):
            self._send_group(signum)
        else:
            self.send(signum)

    def bound_log(self) -> None:
        """Keeps its log from growing without end."""
        self._log.bound()

    def abandon(self) -> None:
        """Stops watching it."""
        if self._cause is None:
            self._loop.remove_reader(self._child.fd)

    def _send_group(self, signum: signal.Signals) -> None:
        if self._cause is None:
            # First the process itself: until it has made a group of its own there is no group.
            self._child.send(signum)
            self._to_group(signum)

    def _to_group(self, signum: signal.Signals) -> None:
        # Its number is its own, and so is that of its group, until it has been reaped.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signum)

    def _ended(self) -> None:
        self._loop.remove_reader(self._child.fd)
        self._to_group(signal.SIGKILL)
        cause = self._child.poll()
        if cause is None:  # A debugger that watches it hears of its end first.
            self._loop.call_later(_WATCHED_S, self._ended)
            return
        self._is_over(cause)


@final
class LocalLauncher:
    """Starts hosts as processes on this machine, children of this process.

    The constructor needs no event loop; call it early, since it starts the import of JAX.
    """

    def __init__(
        self,
        log_dir: Path,
        *,
        environ: Mapping[str, str] | None = None,
        modules: tuple[str, ...] = WORKER_MODULES,
        entry: str = WORKER_ENTRY,
        log_level: int = 3,
    ) -> None:
        """Spawns the template process.

        Args:
            log_dir: Directory for the logs of all processes.
            environ: Environment to make theirs from; that of this process by default.
            modules: What the template imports.
            entry: "module:function" that is a worker.
            log_level: TF_CPP_MIN_LOG_LEVEL of the workers.
        """
        self.channel_port: int | None = None
        become_subreaper()
        log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log_dir = log_dir
        self._entry = entry
        self._logs: dict[str, HostLog] = {}
        self._lasting_logs = [HostLog(log_dir, name) for name in ("head", "template")]
        self._running: set[LocalProcess] = set()
        self._groups: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._forks = ForkServer(
            modules,
            worker_environ(os.environ if environ is None else environ, log_level=log_level),
            log_dir / "template.log",
            known=self._known,
        )

    @property
    def template_pid(self) -> int:
        """Process id of the template."""
        return self._forks.pid

    def _known(self) -> set[int]:
        return {process.pid for process in self._running}

    async def start(self, spec: HostSpec) -> LocalProcess:
        """Starts one host.

        Raises:
            LaunchError: If it could not be started.
        """
        name = f"rg-s{spec.slice_index}h{spec.host_index}"
        return await self.start_entry(self._entry, spec.for_worker(), spec.label, name)

    async def start_entry(
        self, entry: str, spec: Mapping[str, Any], label: str, name: str
    ) -> LocalProcess:
        """Starts a process that calls `entry` ("module:function") with `spec`.

        Args:
            entry: What it runs.
            spec: What it is told.
            label: Name of its log; a second process of that label begins a new log.
            name: What `ps` shows.

        Raises:
            LaunchError: If it could not be started.
        """
        log = self._logs.setdefault(label, HostLog(self._log_dir, label))
        try:
            path = log.begin()
        except OSError as error:
            raise LaunchError(f"{label} has no log: {error}") from None
        pid = await self._forks.fork(entry, spec, log=path, name=name)
        try:
            process = LocalProcess(pid, log, asyncio.get_running_loop())
        except ProcessLookupError:
            raise LaunchError(f"{label} (pid {pid}) was gone before it could be watched") from None
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            self._groups.add(pid)
            raise LaunchError(f"{label} (pid {pid}) cannot be watched: {error}") from None
        self._running.add(process)
        process.on_exit(lambda _: self._forget(process))
        if self._timer is None:
            self._schedule()
        return process

    def _forget(self, process: LocalProcess) -> None:
        self._running.discard(process)
        self._groups.add(process.pid)
        self._reap_groups()

    def _reap_groups(self) -> None:
        """Reaps what a dead host had started, which has become our child."""
        for group in list(self._groups):
            try:
                while os.waitid(os.P_PGID, group, os.WEXITED | os.WNOHANG) is not None:
                    pass
            except ChildProcessError:
                self._groups.discard(group)

    def _schedule(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_HOUSEKEEPING_S, self._housekeeping)

    def _housekeeping(self) -> None:
        self._reap_groups()
        for process in self._running:
            process.bound_log()
        for log in self._lasting_logs:
            log.bound()
        self._timer = None
        if self._running or self._groups:
            self._schedule()

    def regroup(self, hosts_per_slice: int) -> None:
        """Does nothing: hosts are processes, and any number of them is as good."""

    async def close(self) -> None:
        """Ends every process that was started, and the template."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._forks.close()
        await kill_all(self._running, _END_DEADLINE_S)
        for process in list(self._running):
            logger.error("pid %d did not end within %g s", process.pid, _END_DEADLINE_S)
            process.abandon()
        self._reap_groups()
