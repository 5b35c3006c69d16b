"""Slices that are leased: their processes run on machines that several jobs share.

The machines' process (`regrow.jobs.machines`) starts them on request, in the place and under the
incarnation of the lease, and ends them when the lease is over or this process is gone.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from regrow.control_aio import LineClient
from regrow.errors import ControlError, LaunchError, NoClusterError, RegrowError
from regrow.launchers.base import HostSpec
from regrow.launchers.handles import ProcessHandle, kill_all

logger = logging.getLogger(__name__)

_START_S: Final = 70.0
_END_DEADLINE_S: Final = 5.0


@final
@dataclass(frozen=True, slots=True, order=True)
class Lease:
    """A place for a slice: a slice of the machines, under an incarnation that only this lease has."""

    index: int
    incarnation: int


def pack_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A process's specification as JSON values; bytes are hexadecimal."""
    return {
        name: {"hex": value.hex()} if isinstance(value, bytes) else value
        for name, value in spec.items()
    }


def unpack_spec(packed: Mapping[str, Any]) -> dict[str, Any]:
    """What `pack_spec` packed."""
    return {
        name: bytes.fromhex(value["hex"]) if isinstance(value, dict) else value
        for name, value in packed.items()
    }


@final
class RemoteProcess(ProcessHandle):
    """A process that the machines run for us, and signal with its group where that is to be."""

    def __init__(self, number: int, pid: int, machines: LineClient) -> None:
        super().__init__(pid, asyncio.get_running_loop())
        self.number = number
        self._machines = machines

    def send(self, signum: signal.Signals) -> None:
        """Sends it a signal."""
        if self._cause is None:
            self._machines.send("signal", number=self.number, signal=int(signum))

    def _send_group(self, signum: signal.Signals) -> None:
        self.send(signum)

    def ended(self, cause: str) -> None:
        """Takes the news of its end."""
        if self._cause is None:
            self._is_over(cause)


@final
class LeasedLauncher:
    """Starts hosts where there is a lease for their slice.

    Attributes:
        leases: The place of each slice that has one.
        placed: The place that each incarnation of a slice was started in.
    """

    def __init__(self, socket: str) -> None:
        """Names the machines' socket; connects when the first process is to be started."""
        self.channel_port: int | None = None
        self.leases: dict[int, Lease] = {}
        self.placed: dict[tuple[int, int], Lease] = {}
        self._socket = socket
        self._machines: LineClient | None = None
        self._connecting = asyncio.Lock()
        self._running: dict[int, RemoteProcess] = {}
        self._early: dict[int, str] = {}

    async def start(self, spec: HostSpec) -> RemoteProcess:
        """Starts one host.

        Raises:
            LaunchError: If there is no lease for its slice, or it could not be started.
        """
        lease = self.leases.get(spec.slice_index)
        if lease is None:
            raise LaunchError(f"slice {spec.slice_index} is not leased")
        self.placed[spec.slice_index, spec.incarnation] = lease
        place = {"index": lease.index, "incarnation": lease.incarnation, "host": spec.host_index}
        return await self._start(
            "regrow.worker.main:run",
            spec.for_worker(),
            f"rg-s{lease.index}h{spec.host_index}",
            place,
        )

    async def start_entry(
        self, entry: str, spec: Mapping[str, Any], label: str, name: str
    ) -> RemoteProcess:
        """Starts a process that is no host.

        Raises:
            LaunchError: If it could not be started.
        """
        return await self._start(entry, spec, name, {"label": label})

    async def _start(
        self, entry: str, spec: Mapping[str, Any], name: str, place: Mapping[str, Any]
    ) -> RemoteProcess:
        try:
            machines = await self._connected()
            told = await machines.call(
                "start", timeout_s=_START_S, entry=entry, spec=pack_spec(spec), name=name, **place
            )
        except (ControlError, NoClusterError) as error:
            raise LaunchError(f"{name}: the machines: {error}") from None
        except RegrowError as error:
            raise LaunchError(f"{name}: {error}") from None
        process = RemoteProcess(told["number"], told["pid"], machines)
        early = self._early.pop(process.number, None)
        if early is not None:
            process.ended(early)
        else:
            self._running[process.number] = process
        return process

    async def _connected(self) -> LineClient:
        async with self._connecting:
            if self._machines is None:
                self._machines = await LineClient.connect(
                    self._socket, self._on_event, self._on_end
                )
            return self._machines

    def _on_event(self, event: dict[str, Any]) -> None:
        number, cause = event["number"], event["cause"]
        process = self._running.pop(number, None)
        if process is None:
            # It ended before the answer that it was started has been looked at.
            self._early[number] = cause
        else:
            process.ended(cause)

    def _on_end(self) -> None:
        logger.warning("the machines are gone")
        self._machines = None
        running, self._running = self._running, {}
        for process in running.values():
            process.ended("the process that runs the machines is gone")

    def regroup(self, hosts_per_slice: int) -> None:
        """Refuses: a lease is for a slice as it is.

        Raises:
            ControlError: Always.
        """
        raise ControlError("slices of a shared cluster have the hosts that they are leased with")

    async def close(self) -> None:
        """Ends every process that was started."""
        if self._machines is None:
            return
        await kill_all(self._running.values(), _END_DEADLINE_S)
        # What is left ends with the connection.
        self._machines.close()
