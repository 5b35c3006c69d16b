"""Slices whose hosts join from other machines, by `regrow worker`.

A host that joins proves that it knows the cluster's token, and says which host of which slice it is.
From then on the head asks it to start the worker process, and to signal it. Workers connect to the
head by themselves, over TCP, with the same proof.

Only who they are is proved: what goes over the connections afterwards is neither hidden nor signed,
as fits a network that is closed to others.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, final

from regrow.channel.handshake import LENGTH, HeadHandshake, Hello, body_bytes
from regrow.control import MAX_LINE_BYTES
from regrow.control_aio import LineClient
from regrow.errors import (
    ChannelError,
    ClusterStartError,
    HandshakeError,
    LaunchError,
    RegrowError,
)
from regrow.launchers.base import HostSpec
from regrow.launchers.leased import RemoteProcess, pack_spec
from regrow.launchers.local import LocalLauncher, LocalProcess

log = logging.getLogger(__name__)

EVERY_ADDRESS: Final = "0.0.0.0"  # noqa: S104 - hosts of other machines are to reach it
_HANDSHAKE_S: Final = 5.0
_START_S: Final = 70.0
_LOOK_EVERY_S: Final = 0.1


def worker_secret(token: str | None) -> bytes:
    """What hosts prove to know: the cluster's token, or nothing where there is none."""
    return hashlib.sha256(b"regrow workers\0" + (token or "").encode()).digest()


@final
class _Joined:
    """A host that has joined."""

    def __init__(self, slot: tuple[int, int]) -> None:
        self.slot = slot
        self.line: LineClient | None = None
        self.running: dict[int, RemoteProcess] = {}
        self.early: dict[int, str] = {}

    def on_event(self, event: dict[str, Any]) -> None:
        """One of its processes has ended."""
        number, cause = int(event["number"]), str(event["cause"])
        process = self.running.pop(number, None)
        if process is None:
            # It ended before the answer that it was started has been looked at.
            self.early[number] = cause
        else:
            process.ended(cause)

    def gone(self) -> None:
        """Its connection has ended."""
        running, self.running = self.running, {}
        for process in running.values():
            process.ended("the connection of its machine has ended")


@final
class JoinedLauncher:
    """Starts hosts on the machines that have joined; other processes here.

    Attributes:
        secret: What hosts prove to know.
        port: Where they join; 0 until `open`.
        channel_port: Where their workers connect to.
    """

    def __init__(
        self,
        local: LocalLauncher,
        port: int,
        secret: bytes,
        *,
        slots: Collection[tuple[int, int]],
        wait_s: float,
    ) -> None:
        """Readies it.

        Args:
            local: Starts processes that are no hosts.
            port: Where hosts join; 0: any.
            secret: What they prove to know.
            slots: Slice and host of each that may.
            wait_s: How long a start waits for its host to join.
        """
        self.secret = secret
        self.port = port
        self.channel_port: int | None = 0
        self._local = local
        self._slots = frozenset(slots)
        self._wait_s = wait_s
        self._hosts: dict[tuple[int, int], _Joined] = {}
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def open(self) -> None:
        """Listens for hosts.

        Raises:
            ClusterStartError: The port is in use.
        """
        try:
            self._server = await asyncio.start_server(
                self._welcome, EVERY_ADDRESS, self.port, limit=MAX_LINE_BYTES
            )
        except OSError as error:
            raise ClusterStartError(
                f"cannot listen for hosts on port {self.port}: {error.strerror or error}"
            ) from None
        self.port = self._server.sockets[0].getsockname()[1]

    async def start(self, spec: HostSpec) -> RemoteProcess:
        """Starts one host, when it has joined.

        Raises:
            LaunchError: If it has not joined in time, or could not start it.
        """
        host = await self._joined((spec.slice_index, spec.host_index), spec.wanted)
        assert host.line is not None
        told = {
            name: value
            for name, value in spec.for_worker().items()
            # It knows both, and neither is to be said over the network.
            if name not in ("secret", "endpoint")
        }
        try:
            answer = await host.line.call(
                "start", timeout_s=_START_S, spec=pack_spec(told), port=self.channel_port
            )
        except RegrowError as error:
            raise LaunchError(f"{spec.label}: {error}") from None
        process = RemoteProcess(answer["number"], answer["pid"], host.line)
        early = host.early.pop(process.number, None)
        if early is not None or self._hosts.get(host.slot) is not host:
            process.ended(early or "the connection of its machine has ended")
        else:
            host.running[process.number] = process
        return process

    async def start_entry(
        self, entry: str, spec: Mapping[str, Any], label: str, name: str
    ) -> LocalProcess:
        """Starts a process that is no host, on this machine.

        Raises:
            LaunchError: If it could not be started.
        """
        return await self._local.start_entry(entry, spec, label, name)

    def regroup(self, hosts_per_slice: int) -> None:
        """Other hosts may join from now on, and are waited for when they are to be started."""
        slices = {index for index, _ in self._slots}
        self._slots = frozenset(
            (index, host) for index in slices for host in range(hosts_per_slice)
        )

    async def close(self) -> None:
        """Ends every process that was started, and lets the hosts go."""
        if self._server is not None:
            self._server.close()
        for host in list(self._hosts.values()):
            if host.line is not None:
                # What a host has started ends with its connection.
                host.line.close()
            host.gone()
        self._hosts.clear()
        for task in list(self._tasks):
            task.cancel()
        await self._local.close()

    async def _joined(self, slot: tuple[int, int], wanted: Callable[[], bool]) -> _Joined:
        index, number = slot
        try:
            async with asyncio.timeout(self._wait_s):
                while wanted() and slot not in self._hosts:
                    # Nobody tells when it is wanted no longer.
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), _LOOK_EVERY_S)
        except TimeoutError:
            raise LaunchError(
                f"waited {self._wait_s:g} s for host {number} of slice {index} to join (regrow worker)"
            ) from None
        if not wanted():
            raise LaunchError(f"host {number} of slice {index} is not wanted any longer")
        return self._hosts[slot]

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                hello = await self._shake_hands(reader, writer)
        except (ChannelError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            log.info("a host is not let in: %s", error)
            writer.close()
            return
        identity = hello.identity
        self._take_in((identity.slice_index, identity.host_index), reader, writer)

    def _take_in(
        self, slot: tuple[int, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        former = self._hosts.pop(slot, None)
        if former is not None and former.line is not None:
            # A host that joins again has given up its last connection, or is another machine.
            former.line.close()
            former.gone()
        host = _Joined(slot)

        def ended() -> None:
            host.gone()
            if self._hosts.get(slot) is host:
                del self._hosts[slot]
                log.info("host %d of slice %d has left", slot[1], slot[0])

        host.line = LineClient(reader, writer, host.on_event, ended)
        self._hosts[slot] = host
        log.info("host %d of slice %d has joined", slot[1], slot[0])
        self._changed.set()
        self._changed = asyncio.Event()

    async def _shake_hands(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Hello:
        handshake = HeadHandshake(self.secret)
        writer.write(handshake.challenge())
        try:
            size = body_bytes(await reader.readexactly(LENGTH.size))
            hello = handshake.verify(await reader.readexactly(size))
            slot = (hello.identity.slice_index, hello.identity.host_index)
            if hello.identity.role != "worker" or slot not in self._slots:
                raise HandshakeError(f"the cluster has no host {slot[1]} of slice {slot[0]}")
        except HandshakeError as error:
            writer.write(handshake.refusal(str(error)))
            raise
        writer.write(handshake.welcome(0))
        return hello
