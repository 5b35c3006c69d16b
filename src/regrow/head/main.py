"""The head: its parts put together, and what can be asked of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, Final, Protocol, final

from regrow.channel.handshake import new_secret
from regrow.config import HeadConfig
from regrow.errors import (
    ClusterError,
    Code,
    ControlError,
    StatusError,
    UsageError,
    WaitTimeout,
)
from regrow.head.aides import Aide, EntryLauncher
from regrow.head.attention import Attention
from regrow.head.control import ControlServer, make_event
from regrow.head.coordination_calls import serve_coordination
from regrow.head.fleet import Fleet
from regrow.head.gateway import PROTOCOL_MAX, PROTOCOL_MIN, Gateway
from regrow.head.guard import Guard
from regrow.head.leases import Leases
from regrow.head.metrics import MetricsServer
from regrow.head.runtime import Runtime
from regrow.head.suspension import Suspension
from regrow.head.topology import Topology
from regrow.launchers.base import Launcher
from regrow.launchers.joined import EVERY_ADDRESS, JoinedLauncher
from regrow.launchers.leased import Lease, LeasedLauncher
from regrow.observe import Report, event_lines
from regrow.slices import Progressed
from regrow.suspend.points import set_trap_from
from regrow.wire.schema import jaxlib_version
from regrow.wire.service import Server, serve
from regrow.wire.sockets import listen_tcp

log = logging.getLogger(__name__)

_SHARE_OF_MEMORY: Final = 0.4
_CLOSE_DEADLINE_S: Final = 15.0
_TRAP: Final = "headtrap:"
# The tables of sessions are many small objects in no cycles: what has lasted is seldom looked at. What
# is new is soon: asyncio's connections end as cycles, and until they are found their memory grows.
_COLLECT_AFTER: Final = (2_000, 20, 100)


class HeadLauncher(Launcher, EntryLauncher, Protocol):
    """Starts all processes of a cluster."""


@final
class Head:
    """All of a head; what `regrow.head.control` calls Controlled."""

    def __init__(self, config: HeadConfig, launcher: HeadLauncher) -> None:
        self._config = config
        self._launcher = launcher
        topology = Topology(config.slices, config.hosts_per_slice, config.devices_per_slice)
        self._compiler = Aide("compiler", "regrow.worker.main:run_compiler")
        self._runtime = Runtime(
            config, topology, _arena_bytes(), self._compiler, self._changed, self._ended
        )
        self._compiler.on_up = self._runtime.compiler.compiler_up
        self._compiler.on_call = self._runtime.call_client
        self._joined = launcher if isinstance(launcher, JoinedLauncher) else None
        self._secret = new_secret() if self._joined is None else self._joined.secret
        self._fleet = Fleet(config, topology, launcher, self._secret, self._runtime)
        self._leases = (
            Leases(launcher, self._fleet) if isinstance(launcher, LeasedLauncher) else None
        )
        self._gateway = Gateway(self._runtime, self._on_clients)
        self._suspension = Suspension(
            config, self._runtime, self._fleet, self._gateway.tables, self._changed
        )
        self._control = ControlServer(self, config.control_socket)
        self._attention = Attention(
            self._runtime.observer.run,
            self._runtime.callbacks,
            lambda: self._gateway.nonces,
            self._heard,
            self._long_wait,
        )
        self._metrics: MetricsServer | None = None
        self._server: Server | None = None
        self._meeting: Server | None = None
        self._stop = asyncio.Event()
        self._guard = Guard(lambda _: self._stop.set())
        self._client = asyncio.Event()
        self._clients = 0
        self._job_ends = False
        self._started = time.monotonic()
        self._up_since: dict[int, float] = {}

    async def run(self) -> None:
        """Serves until the end is asked for.

        Raises:
            ClusterError: It could not start, or it failed.
        """
        self._watch_supervisor()
        asyncio.get_running_loop().set_exception_handler(self._guard)
        try:
            await self._open()
            await self._stop.wait()
        finally:
            async with asyncio.timeout(_CLOSE_DEADLINE_S):
                await self._close()
        if self._guard.failure is not None:
            raise ClusterError(self._guard.failure)

    async def _open(self) -> None:
        tcp = self._config.tcp
        self._server = await serve(
            self._gateway,
            unix_path=self._config.client_socket,
            tcp=None if tcp is None else (tcp.host, tcp.port),
        )
        await self._control.start()
        self._meeting = serve_coordination(self._runtime.coordination, self._config.epoch_socket)
        if self._joined is not None:
            await self._joined.open()
        if self._launcher.channel_port is not None:
            # Whoever joins knows the host by which it reaches this one.
            self._meeting.listen(listen_tcp(EVERY_ADDRESS, 0), None)
            self._runtime.coordination.address = f":{self._meeting.port}"
        if self._config.metrics_port is not None:
            self._metrics = MetricsServer(self._config.metrics_port, self.status)
        await self._fleet.open()
        self._attention.begin()
        spec = {
            "devices": list(range(self._runtime.topology.devices)),
            "endpoint": self._config.worker_socket,
            "secret": self._secret,
            "log_level": self._config.log_level,
        }
        await self._compiler.start(self._launcher, spec, self._fleet.add_process)

    async def _close(self) -> None:
        self._attention.close()
        await self._suspension.close()
        if self._metrics is not None:
            self._metrics.close()
        self._compiler.close()
        cause = self._guard.failure or "the cluster was shut down"
        self._runtime.end(StatusError.user(Code.UNAVAILABLE, cause))
        await asyncio.sleep(0)  # What that has to say leaves with the next turn of the loop.
        if self._server is not None:
            await self._server.close()
        await self._fleet.close()
        if self._meeting is not None:
            # Not before the hosts have ended: XLA aborts a process that loses this connection.
            await self._meeting.close()
        await self._control.close()
        self._runtime.close()

    def _watch_supervisor(self) -> None:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(signum, self._stop.set)

    # --- events ---

    def _changed(self, kind: Any, slice_index: int, incarnation: int, text: str) -> None:
        if kind == "slice_lost" and self._leases is not None:
            told = self._leases.lost(slice_index, incarnation, text)
            if told is not None:
                self._control.publish(told)
        if kind == "slice_suspended" and self._leases is not None:
            self._leases.left(slice_index, incarnation)
        now = time.monotonic()
        took_s = None
        if kind in ("slice_up", "slice_resumed"):
            took_s = now - self._started
            self._up_since[slice_index] = now
        elif kind in ("slice_lost", "slice_suspended") and slice_index in self._up_since:
            took_s = now - self._up_since.pop(slice_index)
        self._control.publish(
            make_event(
                kind,
                slice_index=slice_index if slice_index >= 0 else None,
                incarnation=incarnation or None,
                text=text,
                took_s=took_s,
            )
        )

    def _ended(self, report: Report) -> None:
        """An elastic event has ended."""
        lines = event_lines(report.to_json())
        log.info("%s", "\n".join(lines))
        self._control.publish(
            make_event(
                "elastic_event",
                slice_index=report.slices[0],
                text="\n".join(lines),
                took_s=report.wall_s,
            )
        )

    def _long_wait(self, text: str, waited_s: float) -> None:
        """A wait lasts longer than it usually does."""
        if self._runtime.gate.closed:  # And everybody knows why.
            return
        log.info("%s", text)
        self._control.publish(make_event("long_wait", text=text, took_s=waited_s))

    def _heard(self, slices: Sequence[int]) -> str:
        """When slices were last heard."""
        now = time.monotonic()
        infos = [self._fleet.membership.info(index) for index in slices]
        silent = [
            (now - host.heard_at, info.index)
            for info in infos
            for host in info.hosts
            if host.heard_at is not None
        ]
        if not silent:
            return "never heard"
        silent_s, index = max(silent)
        return f"slice {index} was last heard {silent_s:.1f} s ago, the others later"

    def _on_clients(self, clients: int) -> None:
        more = clients > self._clients
        self._clients = clients
        self._runtime.observer.run.clients(clients, time.monotonic())
        if more:
            self._client.set()
        elif not clients:
            self.progress(None, None)
        self._control.publish(make_event("client_connected" if more else "client_gone"))

    # --- what can be asked of a head ---

    def ping(self) -> None:
        """Does nothing: that it answers is the answer."""

    def status(self) -> dict[str, Any]:
        """All there is to know, as JSON values."""
        spares = self._runtime.spare_snapshots
        status: dict[str, Any] = dict(self._fleet.membership.status(time.monotonic()))
        status |= {
            "name": self._config.name,
            "pid": os.getpid(),
            "target": self._config.target,
            "metrics_port": None if self._metrics is None else self._metrics.port,
            "worker_port": None if self._joined is None else self._joined.port,
            "tcp_port": None if self._server is None else self._server.port,
            "devices": self._runtime.topology.devices,
            "clients": self._clients,
            "uptime_s": time.monotonic() - self._started,
            "ended": self._runtime.ended,
            "compiled": self._runtime.compiler.compiled,
            "compiled_from_disk": self._runtime.compiler.from_disk,
            "compiled_from_memory": self._runtime.compiler.from_memory,
            "jaxlib": jaxlib_version(),
            "protocol": [PROTOCOL_MIN, PROTOCOL_MAX],
            "sessions": self._gateway.describe(),
            "suspended": self._suspension.describe(),
            "spare_snapshots": None if spares is None else spares.describe(),
            "timeline": self.timeline(),
        }
        return status

    async def kill(self, index: int) -> None:
        """Ends a slice's processes with SIGKILL; returns when it has been declared lost."""
        await self._fleet.kill(index)

    def stop(self, index: int) -> None:
        """Stops a slice's processes (SIGSTOP)."""
        self._fleet.stop(index)

    def cont(self, index: int) -> None:
        """Lets a slice's processes go on; refuses one that was declared lost meanwhile."""
        self._fleet.cont(index)

    def restore(self, index: int) -> None:
        """Begins to relaunch a lost slice."""
        self._fleet.restore(index)

    async def suspend(
        self, slices: Sequence[int] | None, why: str, url: str | None
    ) -> dict[str, Any]:
        """Has slices leave with their state saved."""
        return await self._suspension.suspend(slices, why, url=url)

    def suspend_job(self) -> None:
        """Lets clients know that the whole job is to end.

        Raises:
            ControlError: Slices are suspended, so that no client can do anything.
        """
        if self._suspension.stored:
            raise ControlError(
                "slices are suspended, and clients can save nothing; resume them first"
            )
        self._job_ends = True

    def suspend_requested(self) -> bool:
        """Whether that was asked for."""
        return self._job_ends

    async def resume(
        self, slices: Sequence[int] | None, timeout_s: float | None, hosts_per_slice: int | None
    ) -> dict[str, Any]:
        """Brings suspended slices back."""
        return await self._suspension.resumption.resume(slices, timeout_s, hosts_per_slice)

    async def wait_healthy(self, timeout_s: float | None) -> None:
        """Returns when every slice is up; raises `WaitTimeout` at the deadline."""
        wanted = None if self._leases is None else self._leases.ranks
        await self._fleet.wait_healthy(timeout_s, wanted)

    async def wait_client(self, timeout_s: float | None) -> None:
        """Returns when a client has connected; raises `WaitTimeout` at the deadline."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._client.wait()
        except TimeoutError:
            raise WaitTimeout("a client to connect", timeout_s or 0) from None

    def progress(self, step: int | None, phase: str | None) -> None:
        """Takes what a client says that it is doing, for the texts of losses."""
        self._fleet.handle(Progressed(step, phase))
        self._runtime.observer.told(step, phase)

    def traced(self, began: float, ended: float) -> None:
        """Takes from when until when a client has traced programs, by the monotonic clock."""
        self._runtime.observer.run.spent("trace", began, ended, time.monotonic())

    def timeline(self) -> dict[str, Any]:
        """Elastic events and goodput, as JSON values."""
        return self._runtime.observer.run.status(time.monotonic())

    async def wait_step(self, step: int) -> None:
        """Returns when a client says that it begins this step, or a later one."""
        await self._runtime.observer.watch.step(step)

    async def wait_phase(self, phase: str, index: int) -> None:
        """Returns when a phase of a client's work next begins that concerns this slice."""
        await self._runtime.observer.watch.phase(phase, index)

    def fault(self, index: int, fault: str) -> None:
        """Does a fault to a slice (see `regrow.head.inflict`); "headtrap:…" sets one in the head."""
        if fault.startswith(_TRAP):
            set_trap_from(fault.removeprefix(_TRAP))
            return
        self._fleet.inflict(index, fault)

    def lease(self, rank: int, lease: Lease) -> None:
        """Takes a lease for a slice."""
        self._leased().grant(rank, lease)

    def withdraw(self, lease: Lease, cause: str) -> None:
        """A lease is over."""
        self._leased().withdraw(lease, cause)

    async def give_back(self, lease: Lease, cause: str) -> None:
        """Goes on without a lease; returns when no process is left on it."""
        await self._leased().give_back(lease, cause)

    def _leased(self) -> Leases:
        if self._leases is None:
            raise UsageError("the slices of this cluster are its own, and not leased")
        return self._leases

    def shutdown(self) -> None:
        """Begins to end the cluster."""
        self._stop.set()


def _arena_bytes() -> int:
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return int(pages * page * _SHARE_OF_MEMORY)


def serve_head(config: HeadConfig, launcher: HeadLauncher) -> None:
    """Serves until the end is asked for.

    Raises:
        RegrowError: The cluster could not start, or the head failed.
    """
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)

    async def run() -> None:
        await Head(config, launcher).run()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())
