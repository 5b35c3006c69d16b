"""The slices: their processes, their channels, and the membership that judges them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from typing import Any, Final, Protocol, final

from regrow.channel import commands as c
from regrow.channel.handshake import Hello
from regrow.channel.head_end import HeadChannel, WorkerServer, serve_workers
from regrow.config import HeadConfig
from regrow.errors import (
    Code,
    ControlError,
    LaunchError,
    SliceLostError,
    StatusError,
    UsageError,
    WaitTimeout,
)
from regrow.head.guard import Tasks, unexpected
from regrow.head.inflict import NEXT, inflict
from regrow.head.links import Link
from regrow.head.member import Member
from regrow.head.topology import Topology
from regrow.launchers.base import HostSpec, Launcher
from regrow.launchers.joined import EVERY_ADDRESS
from regrow.slices import (
    ContHosts,
    ContRequested,
    EndHost,
    Event,
    Fence,
    Fenced,
    Heartbeat,
    HostConnected,
    HostDisconnected,
    HostExited,
    HostReady,
    HostStarted,
    HostStartFailed,
    JobEnds,
    KillRequested,
    Leave,
    Membership,
    Noted,
    Policy,
    Request,
    RestoreRequested,
    ShutdownRequested,
    SliceLost,
    SliceTaken,
    SliceUp,
    StallGuard,
    StartHost,
    StartRequested,
    StopHosts,
    StopRequested,
)

log = logging.getLogger(__name__)

_BEAT_S: Final = 0.1
_PINGS_PER_DEADLINE: Final = 8
_LOSS_S: Final = 10.0
_LEAVE_S: Final = 5.0
_PATIENCE: Final = 2.0


class Owner(Protocol):
    """What the fleet tells: the runtime of the head."""

    def report(self, link: Link, command: Any) -> None:
        """A host reports something that is not about its membership."""
        ...

    def slice_up(self, slice_index: int, incarnation: int, links: list[Link]) -> None:
        """A slice takes work."""
        ...

    def slice_lost(
        self, error: SliceLostError, cause: str, was_up: bool, since: float | None = None
    ) -> None:
        """A slice is lost, by a fault that first showed at `since`; None: now."""
        ...

    def job_ends(self, text: str) -> None:
        """More slices are gone than the job bears."""
        ...


@final
class Fleet:
    """All slices of the cluster."""

    def __init__(
        self,
        config: HeadConfig,
        topology: Topology,
        launcher: Launcher,
        secret: bytes,
        owner: Owner,
    ) -> None:
        self._config = config
        self._topology = topology
        self._launcher = launcher
        self._secret = secret
        self._owner = owner
        policy = Policy(
            hang_after_s=config.hang_after_s,
            reconnect_s=config.reconnect_s,
            start_s=config.start_deadline_s,
            restore_after_s=config.restore_after_s,
            num_elastic_instances=config.num_elastic_instances,
            leased=config.machines_socket is not None,
        )
        self.membership = Membership([topology.hosts_per_slice] * topology.slices, policy)
        self._members: dict[tuple[int, int, int], Member] = {}
        self._others: dict[str, HeadChannel] = {}
        self._server: WorkerServer | None = None
        self._remote: WorkerServer | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._guard = StallGuard(time.monotonic(), _BEAT_S)
        self._pinged = 0.0
        self._pings = 0
        self._changed: asyncio.Event = asyncio.Event()
        self._tasks = Tasks()
        self._closing = False
        self._for_next: dict[int, str] = {}
        self._unheeded: set[tuple[int, int]] = set()

    # --- life ---

    async def open(self) -> None:
        """Listens for workers, and starts all slices; those that are leased when they are granted."""
        self._server = await serve_workers(
            self._config.worker_socket, self._secret, self._authorize
        )
        if self._launcher.channel_port is not None:
            self._remote = await serve_workers((EVERY_ADDRESS, 0), self._secret, self._authorize)
            self._launcher.channel_port = int(self._remote.endpoint[1])
        self._guard = StallGuard(time.monotonic(), _BEAT_S)
        self._beat()
        if not self.membership.policy.leased:
            self.handle(StartRequested())

    async def close(self) -> None:
        """Ends all slices."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        self.handle(ShutdownRequested())
        for member in self._members.values():
            member.channel.close()
        self._tasks.cancel()
        for server in (self._server, self._remote):
            if server is not None:
                await server.close()
        await self._launcher.close()

    def add_process(self, role: str, channel: HeadChannel) -> None:
        """Admits a process that is no host: the compiler."""
        self._others[role] = channel

    # --- membership ---

    def handle(self, event: Event) -> None:
        """Feeds the membership, and does what follows."""
        now = time.monotonic()
        for action in self.membership.handle(event, now):
            self._act(action)
        self._changed.set()
        self._changed = asyncio.Event()

    def _beat(self) -> None:
        now = time.monotonic()
        gap_s = self._guard.beat(now)
        if gap_s:
            self.membership.clock_jumped(now, gap_s)
        for action in self.membership.tick(now):
            self._act(action)
        if now - self._pinged >= self._config.hang_after_s / _PINGS_PER_DEADLINE:
            self._pinged = now
            self._pings += 1
            for member in self._members.values():
                if member.channel.connected:
                    member.link.send(c.Ping(self._pings))
        self._timer = asyncio.get_running_loop().call_later(_BEAT_S, self._beat)

    def _act(self, action: Any) -> None:
        log.info("%s", action)
        match action:
            case StartHost():
                self._tasks.spawn(self._start(action))
            case SliceUp():
                self._up(action)
            case SliceLost():
                self._lost(action)
            case Fence() | StopHosts() | ContHosts():
                self._signal(action)
            case EndHost():
                self._end(action)
            case Leave():
                self._leave(action)
            case JobEnds():
                self._owner.job_ends(action.text)

    def _of(self, index: int, incarnation: int) -> list[tuple[int, Member]]:
        return [
            (host, member)
            for (a_slice, host, an_incarnation), member in self._members.items()
            if a_slice == index and an_incarnation == incarnation
        ]

    async def _start(self, action: StartHost) -> None:
        index, host, incarnation = action.index, action.host, action.incarnation
        number = index * self._topology.hosts_per_slice + host
        member = self._make_member(index, host, incarnation, number)
        spec = HostSpec(
            slice_index=index,
            host_index=host,
            incarnation=incarnation,
            devices=self._topology.devices_of_host(number),
            endpoint=self._config.worker_socket,
            secret=self._secret,
            options={
                # The head gives up first, for it can tell why.
                "reconnect_s": self._config.reconnect_s * _PATIENCE,
                "log_level": self._config.log_level,
            },
            note=lambda text: self.handle(Noted(index, text)),
            wanted=lambda: self.membership.admits(index, host, incarnation) is None,
        )
        try:
            process = await self._launcher.start(spec)
        except LaunchError as error:
            del self._members[index, host, incarnation]
            self.handle(HostStartFailed(index, incarnation, host, str(error)))
            return
        member.process = process
        process.on_exit(lambda cause: self._exited(index, host, incarnation, cause))
        self.handle(HostStarted(index, incarnation, host, process.pid))

    def _make_member(self, index: int, host: int, incarnation: int, number: int) -> Member:
        link = Link(f"slice {index} host {host}", number, index, incarnation)
        link.shares_memory = self._remote is None

        def broken(cause: str) -> None:
            if not self._closing:
                event = HostDisconnected(index, incarnation, host, cause, member.connections)
                self.handle(event)

        def attached() -> None:
            member.connections += 1
            self.handle(HostConnected(index, incarnation, host, member.connections))

        def payload(data: bytes | memoryview) -> None:
            for command in c.unpack(data):
                try:
                    self._report(member, (index, host, incarnation), command)
                except Exception as error:  # noqa: BLE001 (it ends the head)
                    unexpected(f"{type(command).__name__} of {link.name}", error)

        channel = HeadChannel(link.name, payload, broken, attached)
        member = Member(link, channel)
        link.attach(channel)
        self._members[index, host, incarnation] = member
        return member

    def _report(self, member: Member, key: tuple[int, int, int], command: Any) -> None:
        index, host, incarnation = key
        if isinstance(command, c.Pong):
            self.handle(Heartbeat(index, incarnation, host))
        elif isinstance(command, c.Up):
            if index in self._for_next:
                inflict([member], self._for_next.pop(index))
            self.handle(HostReady(index, incarnation, host))
            return
        elif isinstance(command, c.Noticed) and not self._heeds(index, incarnation):
            member.link.send(c.Go())
            return
        if self.membership.is_live(index, incarnation):
            self._owner.report(member.link, command)

    def _heeds(self, index: int, incarnation: int) -> bool:
        """Whether a notice to a host has its slice suspended; else it ends as it would have."""
        live = self.membership.is_live(index, incarnation)
        return live and (index, incarnation) not in self._unheeded

    def _authorize(self, hello: Hello) -> HeadChannel | str:
        who = hello.identity
        if who.role != "worker":
            return self._others.get(who.role) or f"no {who.role} is expected"
        refusal = self.membership.admits(who.slice_index, who.host_index, who.incarnation)
        if refusal is not None:
            return refusal
        member = self._members.get((who.slice_index, who.host_index, who.incarnation))
        return member.channel if member is not None else "this host was not started by the head"

    def _exited(self, index: int, host: int, incarnation: int, cause: str) -> None:
        self.handle(HostExited(index, incarnation, host, cause))
        member = self._members.pop((index, host, incarnation), None)
        if member is not None:
            member.link.ended()
            if member.link.lost is None:
                gone = StatusError(Code.UNAVAILABLE, f"{member.link.name} has ended: {cause}")
                member.link.lose(gone)
            member.channel.close()
        if not self._of(index, incarnation):
            self.handle(Fenced(index, incarnation))

    def _up(self, action: SliceUp) -> None:
        members = sorted(self._of(action.index, action.incarnation), key=lambda entry: entry[0])
        links = [member.link for _, member in members]
        self._owner.slice_up(action.index, action.incarnation, links)

    def _lost(self, action: SliceLost) -> None:
        text = self.membership.describe_loss(action.index, action.incarnation, time.time())
        error = SliceLostError(action.index, action.incarnation, text)
        since = self.membership.first_sign(action.index, action.incarnation)
        self._owner.slice_lost(error, action.cause, action.was_up, since)
        for _, member in self._of(action.index, action.incarnation):
            member.link.lose(error)

    def _signal(self, action: Fence | StopHosts | ContHosts) -> None:
        members = self._of(action.index, action.incarnation)
        for _, member in members:
            process = member.process
            if process is None:
                continue
            match action:
                case Fence():
                    process.kill()
                case StopHosts():
                    process.stop()
                case ContHosts():
                    process.cont()
        if isinstance(action, Fence) and not members:
            asyncio.get_running_loop().call_soon(
                self.handle, Fenced(action.index, action.incarnation)
            )

    def _leave(self, action: Leave) -> None:
        for _, member in self._of(action.index, action.incarnation):
            member.link.send(c.Exit())
            if member.process is not None:
                asyncio.get_running_loop().call_later(_LEAVE_S, member.process.kill)

    def dismiss(self, index: int) -> None:
        """Has the hosts of a slice end as a notice to them would have ended them."""
        incarnation = self.membership.info(index).incarnation
        for _, member in self._of(index, incarnation):
            member.link.send(c.Go())
            if member.process is not None:
                asyncio.get_running_loop().call_later(_LEAVE_S, member.process.kill)

    def _end(self, action: EndHost) -> None:
        member = self._members.get((action.index, action.host, action.incarnation))
        if member is not None and member.process is not None:
            member.process.kill()

    # --- what an operator asks for ---

    async def kill(self, index: int) -> None:
        """Ends a slice's processes with SIGKILL; returns when it has been declared lost.

        Raises:
            ControlError: The slice is not there to be killed.
            WaitTimeout: It was not declared lost in time.
        """
        self._check(KillRequested(index))
        incarnation = self.membership.info(index).incarnation
        for _, member in self._of(index, incarnation):
            if member.process is not None:
                member.process.kill()
        what = f"slice {index} to be declared lost"

        def lost() -> bool:
            info = self.membership.info(index)
            # What is saved and about to be committed is suspended then, and not lost.
            return info.incarnation != incarnation or info.state in ("lost", "suspended")

        await self._until(lost, what, _LOSS_S)

    def stop(self, index: int) -> None:
        """Stops a slice's processes (SIGSTOP)."""
        self._request(StopRequested(index))

    def cont(self, index: int) -> None:
        """Lets a slice's processes go on; refuses one that was declared lost."""
        self._request(ContRequested(index))

    def restore(self, index: int) -> None:
        """Relaunches a lost slice."""
        self._request(RestoreRequested(index))

    def inflict(self, index: int, fault: str) -> None:
        """Does one of `inflict.FAULTS` to a slice.

        Raises:
            ControlError: The slice has no processes.
        """
        if fault.startswith(NEXT):
            self._for_next[index] = fault.removeprefix(NEXT)
            return
        self._check(KillRequested(index))
        incarnation = self.membership.info(index).incarnation
        members = self._of(index, incarnation)
        if fault == "term":
            self._unheeded.add((index, incarnation))
        inflict([member for _, member in members], fault)

    def _check(self, request: Request) -> None:
        if not 0 <= request.index < self._topology.slices:
            raise UsageError(
                f"there is no slice {request.index}; the cluster has {self._topology.slices}"
            )
        refusal = self.membership.refusal(request)
        if refusal is not None:
            raise ControlError(refusal)

    def _request(self, request: Request) -> None:
        self._check(request)
        self.handle(request)

    async def wait_healthy(
        self, timeout_s: float | None, wanted: Callable[[], Collection[int]] | None = None
    ) -> None:
        """Returns when every slice is up.

        Args:
            timeout_s: The deadline.
            wanted: Tells which slices are waited for; None: all.

        Raises:
            WaitTimeout: They are not at the deadline; says who is missing.
        """

        def up() -> bool:
            return self.membership.live().keys() >= set(wanted() if wanted is not None else ())

        await self._until(self.membership.all_up if wanted is None else up, "", timeout_s)

    def regroup(self, hosts_per_slice: int) -> None:
        """Slices have so many hosts from their next start on.

        Raises:
            ControlError: They cannot, where their hosts come from.
        """
        self._launcher.regroup(hosts_per_slice)

    # --- what leases bring ---

    def grant(self, index: int) -> None:
        """There is a place for a slice, another one than it had: starts it there.

        Raises:
            UsageError: There is no such slice.
        """
        if not 0 <= index < self._topology.slices:
            raise UsageError(f"there is no slice {index}; the cluster has {self._topology.slices}")
        if self.membership.info(index).state == "suspended":
            return  # It is started there when it is resumed.
        # What still runs in the former place is kept out by its number.
        self.handle(SliceTaken(index, "another slice takes its place"))
        self.handle(Fenced(index, self.membership.info(index).incarnation))
        self.handle(RestoreRequested(index))

    def take(self, index: int, cause: str) -> None:
        """Gives a slice up."""
        self.handle(SliceTaken(index, cause))

    async def wait_ended(self, index: int, incarnation: int, timeout_s: float) -> None:
        """Returns when no process of an incarnation is left.

        Raises:
            WaitTimeout: There is one at the deadline.
        """
        what = f"the processes of slice {index} to end"
        await self._until(lambda: not self._of(index, incarnation), what, timeout_s)

    async def _until(self, done: Callable[[], bool], what: str, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not done():
                    await self._changed.wait()
        except TimeoutError:
            waited = what or f"all slices: {self.membership.describe_wait(time.monotonic())}"
            raise WaitTimeout(waited, timeout_s or 0) from None
