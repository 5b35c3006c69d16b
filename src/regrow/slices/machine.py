"""One slice as a state machine: its hosts, its incarnations, its deadlines.

Only `tick` looks at deadlines. An event is always taken as it comes: a heartbeat that was late in
our own queue is a sign of life all the same, and must not be the moment at which another host,
whose heartbeat lies behind it in the queue, is given up.
"""

from __future__ import annotations

from typing import Final, final

from regrow.slices.hosts import HostRecord
from regrow.slices.model import (
    HELD,
    LIVE,
    TRANSITIONS,
    Action,
    ContHosts,
    EndHost,
    Fence,
    Heartbeat,
    HostConnected,
    HostDisconnected,
    HostEvent,
    HostExited,
    HostInfo,
    HostReady,
    HostReported,
    HostStarted,
    HostStartFailed,
    Leave,
    Loss,
    Policy,
    Progressed,
    SliceInfo,
    SliceLost,
    SliceState,
    SliceUp,
    StartHost,
    StopHosts,
)
from regrow.slices.story import Story, clean, exit_phrase, seconds

_MAX_LOSSES: Final = 512


@final
class SliceMachine:
    """One slice. `Membership` feeds it and adds what concerns all slices together."""

    __slots__ = (
        "_count",
        "_fence_by",
        "_policy",
        "_stale",
        "_withheld",
        "during",
        "ever_up",
        "fenced",
        "hosts",
        "incarnation",
        "index",
        "losses",
        "may_start",
        "restore_at",
        "saved",
        "start_failures",
        "started_at",
        "state",
        "stopped",
        "stored",
        "story",
    )

    def __init__(self, index: int, hosts: int, policy: Policy) -> None:
        self.index = index
        self.incarnation = 0
        self.state: SliceState = "down"
        self.during: Progressed | None = None
        self.hosts = [HostRecord(host) for host in range(hosts)]
        self._count = hosts
        self.ever_up = False
        self.fenced = True
        self.losses: dict[int, Loss] = {}
        self.may_start = True
        self.restore_at: float | None = None
        self.saved = False
        self.start_failures = 0
        self.started_at = 0.0
        self.stopped = False
        self.stored = False
        self.story = Story(policy.story_lines)
        self._fence_by = 0.0
        self._policy = policy
        self._stale: set[tuple[str, int, int]] = set()
        self._withheld: tuple[str, float] | None = None

    # --- what is known ---

    @property
    def gone(self) -> bool:
        """Whether a slice that was there is not there now; one whose state is saved is not gone."""
        return self.ever_up and self.state in ("lost", "starting") and not self.stored

    @property
    def withholds(self) -> bool:
        """Whether it is going to be lost, unless what it has saved is committed."""
        return self._withheld is not None

    @property
    def leased(self) -> bool:
        """Whether each start needs a lease."""
        return self._policy.leased

    def info(self) -> SliceInfo:
        """A snapshot."""
        unstarted = self.state == "down"
        hosts = tuple(
            HostInfo(host.index, "absent" if unstarted else host.state, host.pid, host.heard_at)
            for host in self.hosts
        )
        return SliceInfo(
            self.index, self.incarnation, self.state, hosts, self.start_failures, self.restore_at
        )

    def deadline(self) -> float | None:
        """When `tick` must be called at the latest."""
        if self.withholds:
            return None
        times: list[float | None] = []
        if self.state in HELD:
            times = [host.expires_at(self._policy) for host in self.hosts]
        if self.state == "starting":
            times.append(self.started_at + self._policy.start_s)
        elif self.state == "up":
            times += [host.suspect_at(self._policy) for host in self.hosts]
        elif self.state in ("lost", "suspended"):
            times.append(self.restore_at if self.fenced else self._fence_by)
        return min((time for time in times if time is not None), default=None)

    # --- what happens to hosts ---

    def host_event(self, event: HostEvent, now: float) -> list[Action]:
        """Takes what happened to a host; what concerns no wanted incarnation changes nothing."""
        current = event.incarnation == self.incarnation and self.incarnation > 0
        if not (current and self.state in HELD):
            return self._stale_event(event, current, now)
        host = self.hosts[event.host]
        match event:
            case HostStarted():
                return self._started(host, event.pid, now)
            case HostStartFailed():
                host.gone = True
                return self.lose(f"host {host.index} was not started: {clean(event.cause)}", now)
            case HostConnected():
                return self._connected(host, event.link, now)
            case HostReady():
                return self._ready(host, now)
            case HostDisconnected():
                return self._disconnected(host, event, now)
            case HostExited():
                host.gone = True
                return self.lose(f"{host.name} {exit_phrase(event.cause)}", now)
            case Heartbeat():
                host.heard(now)
                return self._judge(now)
            case HostReported():
                return self._reported(host, event, now)

    def _started(self, host: HostRecord, pid: int, now: float) -> list[Action]:
        host.pid = pid
        self._tell(now, f"{host.name} started")
        # A process that is born after the others were stopped would be the only one to run.
        return [StopHosts(self.index, self.incarnation)] if self.stopped else []

    def _connected(self, host: HostRecord, link: int, now: float) -> list[Action]:
        if host.disconnected_at is not None and host.link is None:
            after = seconds(now - host.disconnected_at)
            self._tell(now, f"{host.name} is connected again after {after}")
        elif host.link is None:
            self._tell(now, f"{host.name} connected")
        host.link = link
        host.disconnected_at = None
        if host.heard_at is not None:
            host.heard(now)
        return self._judge(now)

    def _ready(self, host: HostRecord, now: float) -> list[Action]:
        if not host.ready:
            host.ready = True
            self._tell(now, f"{host.name} is ready")
        host.heard(now)
        return self._judge(now)

    def _disconnected(self, host: HostRecord, event: HostDisconnected, now: float) -> list[Action]:
        if host.link != event.link:
            return []
        host.link = None
        host.disconnected_at = now
        why = f": {clean(event.cause)}" if event.cause else ""
        self._tell(now, f"the connection of {host.name} broke{why}")
        return self._judge(now)

    def _reported(self, host: HostRecord, event: HostReported, now: float) -> list[Action]:
        if event.severity == "fatal":
            return self.lose(f"{host.name} reported: {clean(event.text)}", now)
        self._tell(now, f"{host.name} notes: {event.text}")
        return []

    def _stale_event(self, event: HostEvent, current: bool, now: float) -> list[Action]:
        if current and self.state == "suspended" and not isinstance(event, HostStarted):
            return self._leaves(event, now)
        kind = type(event).__name__
        if (kind, event.incarnation, event.host) not in self._stale:
            self._stale.add((kind, event.incarnation, event.host))
            detail = f" ({event.cause})" if isinstance(event, HostExited) else ""
            text = f"{kind}{detail} of host {event.host} came after incarnation "
            self._tell(now, text + f"{event.incarnation} had ended; nothing follows from it")
        if isinstance(event, HostStarted):
            if current:
                self.hosts[event.host].pid = event.pid
            return [EndHost(self.index, event.incarnation, event.host, event.pid)]
        if current and isinstance(event, HostExited | HostStartFailed):
            self.hosts[event.host].gone = True
            if all(host.gone for host in self.hosts):
                self.fence_done(event.incarnation, now)
        return []

    def _leaves(self, event: HostEvent, now: float) -> list[Action]:
        """Takes the end of a host that was told to leave."""
        if isinstance(event, HostExited | HostStartFailed):
            host = self.hosts[event.host]
            host.gone = True
            if isinstance(event, HostExited) and event.cause != "exit status 0":
                self._tell(now, f"{host.name} left, but {exit_phrase(event.cause)}")
            if all(host.gone for host in self.hosts):
                self.fence_done(event.incarnation, now)
        return []

    def _judge(self, now: float) -> list[Action]:
        """Moves between starting, up and suspect, by what the hosts show."""
        if self.state == "starting":
            if not all(host.ready and host.link is not None for host in self.hosts):
                return []
            self._move("up")
            self.ever_up = True
            self.start_failures = 0
            self._tell(now, f"up after {seconds(now - self.started_at)}")
            return [SliceUp(self.index, self.incarnation)]
        suspect = self._suspect(now)
        if self.state == "up" and suspect is not None:
            self._move("suspect")
            self._tell(now, f"suspect: {self._silence(suspect, now)}")
        elif self.state == "suspect" and suspect is None:
            self._move("up")
            self._tell(now, "up again: all its hosts are heard")
        return []

    def _suspect(self, now: float) -> HostRecord | None:
        for host in self.hosts:
            at = host.suspect_at(self._policy)
            if at is not None and now >= at:
                return host
        return None

    def _silence(self, host: HostRecord, now: float) -> str:
        stopped = ", stopped on request" if self.stopped else ""
        if host.link is None and host.disconnected_at is not None:
            broken = seconds(now - host.disconnected_at)
            return f"{host.name} has had no connection for {broken}{stopped}"
        silent = seconds(now - host.heard_at) if host.heard_at is not None else "ever"
        return f"{host.name} has sent no heartbeat for {silent}{stopped}"

    # --- loss, fencing, return ---

    def lose(
        self, cause: str, now: float, *, asked: bool = False, since: float | None = None
    ) -> list[Action]:
        """Declares the current incarnation lost.

        Args:
            cause: Why.
            now: The time.
            asked: By an operator, so it is no failed start.
            since: When the fault first showed; None: now.
        """
        if self.saved and not asked:
            return self._withhold(cause, now, since)
        self.saved, self._withheld = False, None
        was_up = self.state in LIVE and not self.stored
        self._move("lost")
        heard = [host.heard_at for host in self.hosts if host.heard_at is not None]
        heard_at = min(heard) if len(heard) == len(self.hosts) else None
        self.fenced = all(host.gone for host in self.hosts)
        self._fence_by = now + self._policy.fence_s
        if was_up or asked:
            self._tell(now, f"lost: {cause}")
            after = self._policy.restore_after_s
        else:
            self.start_failures += 1
            after = None if self._policy.leased else self._policy.backoff(self.start_failures)
            again = "" if after is None else f"; next try in {seconds(after)}"
            self._tell(now, f"start failed ({self.start_failures} in a row): {cause}{again}")
        self.restore_at = now + after if after is not None and self.may_start else None
        self.losses[self.incarnation] = Loss(
            self.incarnation, cause, now, was_up, heard_at, self.during, after, since
        )
        while len(self.losses) > _MAX_LOSSES:
            del self.losses[next(iter(self.losses))]
        return [
            SliceLost(self.index, self.incarnation, cause, was_up),
            Fence(self.index, self.incarnation),
        ]

    def _withhold(self, cause: str, now: float, since: float | None) -> list[Action]:
        """Keeps a loss back: there is none if what the slice has saved is committed."""
        if self._withheld is None:
            self._withheld = cause, now if since is None else since
            self._tell(now, f"{cause}; lost unless its state, which is saved, is committed")
        return []

    def take(self, cause: str, now: float) -> list[Action]:
        """Gives the current incarnation up, if there is one."""
        return self.lose(clean(cause), now, asked=True) if self.state in HELD else []

    def fence_done(self, incarnation: int, now: float) -> None:
        """Takes the news that no process of the lost incarnation is left."""
        if self.fenced or incarnation != self.incarnation:
            return
        if self.state in ("lost", "suspended"):
            self.fenced = True
            what = (
                "fenced: its processes have ended"
                if self.state == "lost"
                else "its hosts have left"
            )
            self._tell(now, what)

    def restore(self, now: float) -> None:
        """Brings the return of a lost slice forward to now, or to the end of its fencing."""
        when = "now" if self.fenced else "when its processes have ended"
        self._tell(now, f"restore was asked for: starts {when}")
        self.restore_at = now

    def state_saved(self, now: float) -> None:
        """All that it holds is saved: from now on a loss is kept back."""
        self.saved = True
        self._tell(now, "its state is saved")

    def suspend_failed(self, now: float) -> list[Action]:
        """What was saved is not committed: a loss that was kept back is one."""
        withheld, self._withheld, self.saved = self._withheld, None, False
        if withheld is None or self.state not in HELD:
            return []
        cause, since = withheld
        return self.lose(cause, now, since=since)

    def suspend(self, why: str, now: float) -> list[Action]:
        """The state is saved: the processes leave."""
        held = self.state in HELD
        self.saved, self._withheld = False, None
        if self.state != "suspended":
            self._move("suspended")
        if held:
            self.fenced = all(host.gone for host in self.hosts)
            self._fence_by = now + self._policy.fence_s
        self.stored = True
        self.restore_at = None
        self._tell(now, f"suspended: {why}")
        # The hosts of an incarnation that was lost meanwhile are being ended already.
        return [Leave(self.index, self.incarnation)] if held and not self.fenced else []

    def resume(self, hosts: int | None, now: float) -> None:
        """Has a suspended slice start now, or when its hosts have left; with `hosts`, if not None."""
        self._tell(now, "resume was asked for" + ("" if hosts is None else f" on {hosts} hosts"))
        self._count = self._count if hosts is None else hosts
        self.restore_at = now

    def resumed(self, now: float) -> None:
        """The state is back on the hosts: from now on a loss of them is one."""
        if self.stored and self.state in LIVE:
            self.stored = False
            self._tell(now, "resumed: its state is back")

    def advance(self, now: float) -> list[Action]:
        """Starts the next incarnation if its time has come."""
        if self.state not in ("lost", "suspended") or not self.fenced or self.restore_at is None:
            return []
        return self.start(now) if now >= self.restore_at else []

    def start(self, now: float) -> list[Action]:
        """Starts a new incarnation of a slice that is down, lost or suspended."""
        self._move("starting")
        self.fenced = False
        self.incarnation += 1
        self.hosts = [HostRecord(host) for host in range(self._count)]
        self.started_at = now
        self.restore_at = None
        self.stopped = False
        self._stale.clear()
        self._tell(now, "starting")
        return [StartHost(self.index, self.incarnation, host.index) for host in self.hosts]

    def stop(self, now: float) -> list[Action]:
        """Stops the processes of a slice that has any."""
        self.stopped = True
        self._tell(now, "stopped on request")
        return [StopHosts(self.index, self.incarnation)]

    def cont(self, now: float) -> list[Action]:
        """Lets stopped processes go on."""
        self.stopped = False
        self._tell(now, "goes on on request")
        return [ContHosts(self.index, self.incarnation)]

    def shut_down(self, now: float) -> list[Action]:
        """Ends the slice for good."""
        held = self.state in HELD or (self.state == "suspended" and not self.fenced)
        if self.state != "stopping":
            self._move("stopping")
            self._tell(now, "shut down")
        self.restore_at = None
        return [Fence(self.index, self.incarnation)] if held else []

    def forbid_start(self) -> None:
        """No incarnation comes after this one."""
        self.may_start = False
        self.restore_at = None

    # --- time ---

    def tick(self, now: float) -> list[Action]:
        """Does what is due."""
        if self.state in HELD:
            return self._expire(now)
        waits = self.state in ("lost", "suspended") and not self.fenced
        if waits and now >= self._fence_by:
            self.fenced = True
            waited = seconds(self._policy.fence_s)
            self._tell(now, f"its processes were not seen to end in {waited}; fenced by number")
        return []

    def _expire(self, now: float) -> list[Action]:
        if self.withholds:
            return []
        due = [
            (at, host)
            for host in self.hosts
            if (at := host.expires_at(self._policy)) is not None and now >= at
        ]
        if due:
            _, host = min(due, key=lambda pair: pair[0])
            since = host.heard_at if host.disconnected_at is None else host.disconnected_at
            return self.lose(self._silence(host, now), now, since=since)
        if self.state == "starting" and now >= self.started_at + self._policy.start_s:
            waited = seconds(self._policy.start_s)
            return self.lose(f"not up {waited} after its start: {self.missing()}", now)
        return self._judge(now)

    def missing(self) -> str:
        """Which hosts are not ready, and how far they are."""
        return ", ".join(
            f"{host.name} is {host.state}" for host in self.hosts if host.state != "ready"
        )

    def clock_jumped(self, now: float, gap_s: float) -> None:
        """Gives every wait for a sign of life afresh: for `gap_s` we could not have seen one."""
        for host in self.hosts:
            if host.heard_at is not None:
                host.heard(now)
            if host.disconnected_at is not None:
                host.disconnected_at = now
        self.started_at += gap_s
        self._fence_by += gap_s
        if self.state in HELD:
            self._tell(now, f"the head itself stood still for {seconds(gap_s)}; waits begin anew")
        if self.state in LIVE:
            self._judge(now)

    # --- tools ---

    def _tell(self, now: float, text: str) -> None:
        self.story.add(now, self.incarnation, text)

    def _move(self, to: SliceState) -> None:
        if to not in TRANSITIONS[self.state]:
            lines = " -> ".join(line.text for line in self.story.lines[-8:])
            raise AssertionError(f"slice {self.index}: {self.state} -> {to} after: {lines}")
        self.state = to
