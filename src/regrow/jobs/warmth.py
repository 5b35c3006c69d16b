"""Hosts that are there before anybody needs them.

A warm host has its libraries imported and its devices made. It waits on a connection to the machines
for the specification that makes it a host of some head's slice.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass
from typing import Any, Final, final

from regrow.control_aio import Peer
from regrow.errors import LaunchError, UsageError
from regrow.launchers.leased import pack_spec
from regrow.launchers.local import LocalLauncher, LocalProcess

logger = logging.getLogger(__name__)

_ENTRY: Final = "regrow.worker.main:run_warm"
_AGAIN_S: Final = 1.0


@final
@dataclass(eq=False, slots=True)
class _Host:
    """A host that waits, or is about to."""

    slot: tuple[int, int]
    key: str
    process: LocalProcess | None = None
    peer: Peer | None = None
    unwanted: bool = False


@final
class Warmth:
    """The hosts of all slices that wait."""

    def __init__(
        self, launcher: LocalLauncher, socket: str, devices: int, log_level: str, hosts: int
    ) -> None:
        """Readies it.

        Args:
            launcher: Starts them.
            socket: Where they wait.
            devices: Of each.
            log_level: What they log.
            hosts: How many each slice has; 0: there are to be none.
        """
        self._launcher = launcher
        self._spec = {"socket": socket, "devices": devices, "log_level": log_level}
        self._count = hosts
        self._hosts: dict[tuple[int, int], _Host] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def prepare(self, index: int) -> None:
        """Has the hosts of a slice wait, those that do not yet."""
        for number in range(self._count):
            slot = (index, number)
            if slot not in self._hosts and not self._closed:
                host = self._hosts[slot] = _Host(slot, secrets.token_hex(16))
                task = asyncio.get_running_loop().create_task(self._start(host))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def take(self, index: int, number: int, spec: dict[str, Any]) -> LocalProcess | None:
        """Makes a waiting host one of a head's; None: there is none that is ready."""
        host = self._hosts.pop((index, number), None)
        if host is None:
            return None
        if host.peer is None or host.process is None or host.process.cause is not None:
            self._end(host)
            return None
        host.peer.tell(pack_spec(spec))
        return host.process

    def arrived(self, key: str, peer: Peer) -> None:
        """A host is ready.

        Raises:
            UsageError: It is not expected.
        """
        for host in self._hosts.values():
            if host.key == key:
                host.peer = peer
                return
        raise UsageError("no such host is expected to wait")

    def gone(self, peer: Peer) -> None:
        """A connection has ended."""
        for host in self._hosts.values():
            if host.peer is peer:
                host.peer = None

    def close(self) -> None:
        """No more hosts are prepared."""
        self._closed = True
        for task in self._tasks:
            task.cancel()

    def _end(self, host: _Host) -> None:
        """Ends one that is not ready: two hosts in one place would be one too many."""
        host.unwanted = True
        if host.process is not None:
            host.process.kill()

    async def _start(self, host: _Host) -> None:
        index, number = host.slot
        spec = self._spec | {"key": host.key}
        label, name = f"slice{index}-host{number}", f"rg-s{index}h{number}"
        try:
            host.process = await self._launcher.start_entry(_ENTRY, spec, label, name)
        except LaunchError as error:
            logger.warning("%s is not warm: %s", label, error)
            self._ended(host)
            return
        host.process.on_exit(lambda _: self._ended(host))
        if host.unwanted:
            host.process.kill()

    def _ended(self, host: _Host) -> None:
        if self._hosts.get(host.slot) is host:
            del self._hosts[host.slot]
            if not self._closed:
                asyncio.get_running_loop().call_later(_AGAIN_S, self.prepare, host.slot[0])
