"""The membership of slices: who is there, who is lost, who comes back. No I/O and no clock.

The head's loop is all that it takes:

    for action in membership.handle(event, now):
        ...                                  # start, fence, tell the sessions
    timer.set(membership.deadline())         # then: membership.tick(now)

Promises, each of them a test:

* a loss is of an incarnation and for ever; what carries an old incarnation changes nothing;
* a lost incarnation is fenced exactly once, and its successor starts only when its processes have
  ended (or, at the latest, `Policy.fence_s` later: its number keeps it out from then on);
* a slice never has two incarnations that are not lost;
* a head that stood still blames no slice for it (`clock_jumped`, see `StallGuard`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, final

from regrow.errors import UsageError
from regrow.slices.describe import SliceStatus, Status, loss_text, refusal_text, status_of
from regrow.slices.machine import SliceMachine
from regrow.slices.model import (
    HELD,
    LIVE,
    Action,
    ContRequested,
    Event,
    Fenced,
    HostEvent,
    JobEnds,
    KillRequested,
    News,
    Noted,
    Policy,
    Progressed,
    Request,
    RestoreRequested,
    Resumed,
    ResumeFailed,
    ResumeRequested,
    ShutdownRequested,
    SliceEvent,
    SliceInfo,
    SliceLost,
    SliceTaken,
    StartRequested,
    StateSaved,
    StopRequested,
    Suspended,
    SuspendFailed,
)
from regrow.slices.story import StoryLine

__all__ = ["Membership", "SliceStatus", "StallGuard", "Status"]


@final
class Membership:
    """All slices of a cluster.

    Args:
        hosts: How many hosts each slice has; its length is the number of slices.
        policy: Deadlines and budgets.

    Attributes:
        policy: The same.
        ended: Why the job has ended (`JobEnds`), or None.
    """

    def __init__(self, hosts: Sequence[int], policy: Policy | None = None) -> None:
        if not hosts or min(hosts) < 1:
            raise UsageError("a cluster needs at least one slice, and a slice at least one host")
        self.policy: Final = policy or Policy()
        self.ended: str | None = None
        self._slices: Final = tuple(
            SliceMachine(index, count, self.policy) for index, count in enumerate(hosts)
        )

    # --- events and time ---

    def handle(self, event: Event, now: float) -> tuple[Action, ...]:
        """Takes one event; returns what must be done, in order.

        Raises:
            UsageError: The event names a slice or host that does not exist.
        """
        if isinstance(event, StartRequested):
            return self._start_all(now)
        if isinstance(event, Progressed):
            for machine in self._slices:
                machine.during = event
            return ()
        if isinstance(event, ShutdownRequested):
            return tuple(act for machine in self._slices for act in machine.shut_down(now))
        machine = self._machine(event.index)
        if isinstance(event, SliceEvent):
            actions = self._slice_event(machine, event, now)
        else:
            self._check_host(event)
            actions = machine.host_event(event, now)
        return self._settle(machine, actions, now)

    def tick(self, now: float) -> tuple[Action, ...]:
        """Does what is due at `now`."""
        actions: list[Action] = []
        for machine in self._slices:
            actions += self._settle(machine, machine.tick(now), now)
        return tuple(actions)

    def deadline(self) -> float | None:
        """When `tick` must be called next; None: only after a further event."""
        times = (machine.deadline() for machine in self._slices)
        return min((time for time in times if time is not None), default=None)

    def clock_jumped(self, now: float, gap_s: float) -> None:
        """The head itself stood still for the last `gap_s` seconds: all waits begin anew.

        Call it before the `tick` that would otherwise find every slice silent.
        """
        for machine in self._slices:
            machine.clock_jumped(now, gap_s)

    # --- what is known ---

    def __len__(self) -> int:
        return len(self._slices)

    def info(self, index: int) -> SliceInfo:
        """A snapshot of one slice."""
        return self._machine(index).info()

    def infos(self) -> tuple[SliceInfo, ...]:
        """A snapshot of all slices."""
        return tuple(machine.info() for machine in self._slices)

    def live(self) -> dict[int, int]:
        """The incarnation of each slice that takes work, by index."""
        return {one.index: one.incarnation for one in self._slices if one.state in LIVE}

    def is_live(self, index: int, incarnation: int) -> bool:
        """Whether this very incarnation takes work."""
        machine = self._machine(index)
        return machine.state in LIVE and machine.incarnation == incarnation

    def all_up(self) -> bool:
        """Whether every slice takes work."""
        return all(machine.state in LIVE for machine in self._slices)

    def story(self, index: int) -> tuple[StoryLine, ...]:
        """What happened to a slice."""
        return self._machine(index).story.lines

    def admits(self, index: int, host: int, incarnation: int) -> str | None:
        """Why a host that wants to connect must be turned away; None: it is welcome."""
        if not 0 <= index < len(self._slices):
            return f"there is no slice {index}; the cluster has {len(self._slices)}"
        machine = self._slices[index]
        if not 0 <= host < len(machine.hosts):
            return f"slice {index} has no host {host}; it has {len(machine.hosts)}"
        if incarnation == machine.incarnation and machine.state in HELD:
            return None
        now_is = f"it is {machine.state} in incarnation {machine.incarnation}"
        return f"incarnation {incarnation} of slice {index} is not wanted; {now_is}"

    def refusal(self, request: Request) -> str | None:
        """Why a request would do nothing, as a sentence for whoever asks; None: it works."""
        return refusal_text(self._machine(request.index), request, self.ended)

    def describe_loss(self, index: int, incarnation: int, utc_s: float) -> str:
        """The loss of an incarnation, just now (in seconds since 1970), in one line.

        It goes after "slice N ", and is true for ever.
        """
        return loss_text(self._machine(index), incarnation, utc_s)

    def first_sign(self, index: int, incarnation: int) -> float | None:
        """When the fault by which an incarnation was lost first showed; None: it is not known."""
        loss = self._machine(index).losses.get(incarnation)
        return None if loss is None else loss.at if loss.since is None else loss.since

    def describe_wait(self, now: float) -> str:
        """Who is missing, for a wait until all slices are up."""
        late = [machine for machine in self._slices if machine.state not in LIVE]
        texts = [
            f"slice {one.index} ({one.state} in incarnation {one.incarnation}"
            + (f", {one.missing()}" if one.state == "starting" else "")
            + f"; {one.story.told(now, last=3) or 'never started'})"
            for one in late
        ]
        up = len(self._slices) - len(late)
        missing = f"; missing: {', '.join(texts)}" if texts else ""
        return f"{up} of {len(self._slices)} slices are up{missing}"

    def status(self, now: float) -> Status:
        """All there is to know, as JSON values."""
        return status_of(self._slices, self.policy, self.ended, now)

    def validate(self) -> None:
        """Checks what must always hold.

        Raises:
            AssertionError: It does not; with the story of the slice.
        """
        for machine in self._slices:
            for problem in _problems(machine, ended=self.ended is not None):
                story = machine.story.told(self._latest(), last=12)
                raise AssertionError(f"slice {machine.index}: {problem}; story: {story}")

    # --- inside ---

    def _machine(self, index: int) -> SliceMachine:
        if not 0 <= index < len(self._slices):
            raise UsageError(f"there is no slice {index}; the cluster has {len(self._slices)}")
        return self._slices[index]

    def _check_host(self, event: HostEvent) -> None:
        machine = self._slices[event.index]
        hosts = len(machine.hosts)
        # An incarnation that is over may have had more.
        if event.host < 0 or (event.host >= hosts and event.incarnation >= machine.incarnation):
            raise UsageError(f"slice {event.index} has no host {event.host}; it has {hosts}")

    def _start_all(self, now: float) -> tuple[Action, ...]:
        never = [one for one in self._slices if one.state == "down" and one.may_start]
        return tuple(action for machine in never for action in machine.start(now))

    def _slice_event(self, machine: SliceMachine, event: SliceEvent, now: float) -> list[Action]:
        if not isinstance(event, Request):
            return _news(machine, event, now)
        refusal = refusal_text(machine, event, self.ended)
        if refusal is not None:
            machine.story.add(now, machine.incarnation, f"{_asked(event)} was asked for: {refusal}")
            return []
        match event:
            case KillRequested():
                return machine.lose("killed on request", now, asked=True)
            case StopRequested():
                return machine.stop(now)
            case ContRequested():
                return machine.cont(now)
            case RestoreRequested() if machine.state == "down":
                return machine.start(now)
            case RestoreRequested():
                machine.restore(now)
                return []
            case ResumeRequested():
                machine.resume(event.hosts, now)
                return []

    def _settle(
        self, machine: SliceMachine, actions: list[Action], now: float
    ) -> tuple[Action, ...]:
        """Adds what follows for the job, and the start of a successor that is due."""
        for action in tuple(actions):
            if isinstance(action, SliceLost):
                actions += self._spend(action)
        return (*actions, *machine.advance(now))

    def _spend(self, loss: SliceLost) -> list[Action]:
        budget = self.policy.num_elastic_instances
        gone = sum(machine.gone for machine in self._slices)
        if budget is None or gone <= budget or self.ended is not None:
            return []
        are = "slice is" if gone == 1 else "slices are"
        self.ended = (
            f"slice {loss.index} was lost: {loss.cause}. {gone} {are} gone, "
            f"num_elastic_instances allows {budget}"
        )
        for machine in self._slices:
            machine.forbid_start()
        return [JobEnds(self.ended)]

    def _latest(self) -> float:
        return max((one.story.lines[-1].at for one in self._slices if one.story.lines), default=0)


def _news(machine: SliceMachine, event: News, now: float) -> list[Action]:
    """Takes what the head tells of a slice."""
    match event:
        case Fenced():
            machine.fence_done(event.incarnation, now)
        case Noted():
            machine.story.add(now, machine.incarnation, event.text)
        case SliceTaken():
            return machine.take(event.cause, now)
        case Resumed():
            machine.resumed(now)
        case StateSaved() if machine.state in LIVE:
            machine.state_saved(now)
        case SuspendFailed():
            return machine.suspend_failed(now)
        case Suspended() if machine.state in LIVE:
            return machine.suspend(event.why, now)
        case ResumeFailed() if machine.stored and machine.state != "stopping":
            return machine.suspend(event.cause, now)
    return []


def _asked(request: Request) -> str:
    """The operator's word for a request."""
    return type(request).__name__.removesuffix("Requested").lower()


def _problems(machine: SliceMachine, *, ended: bool) -> Iterable[str]:
    """What is wrong with a slice, if anything."""
    current = machine.incarnation
    if machine.state in HELD and current in machine.losses:
        yield f"{machine.state}, though incarnation {current} is lost"
    if machine.state == "lost" and current not in machine.losses:
        yield f"lost, without a record of incarnation {current}"
    if machine.state != "down" and machine.state != "stopping" and current < 1:
        yield f"{machine.state} in incarnation {current}"
    if any(number > current for number in machine.losses):
        yield "an incarnation is lost that has not begun"
    if machine.state in LIVE and not all(host.ready for host in machine.hosts):
        yield f"{machine.state}, but {machine.missing()}"
    if machine.state == "up" and any(host.link is None for host in machine.hosts):
        yield f"up, but {machine.missing()}"
    gone = any(host.gone for host in machine.hosts)
    if machine.state in HELD and gone and not machine.withholds:
        yield f"{machine.state}, but {machine.missing()}"
    if machine.restore_at is not None and machine.state not in ("lost", "suspended"):
        yield f"{machine.state}, but to be restored"
    if machine.state == "suspended" and not machine.stored:
        yield "suspended, but its state is nowhere"
    if machine.restore_at is not None and ended:
        yield "to be restored, though the job has ended"


@final
class StallGuard:
    """Tells a head that was itself suspended from slices that were silent.

    Call `beat` at the top of the timer callback, at least every `period_s`; a gap that is longer by
    `tolerance_s` means that this process did not run. Give the answer to `Membership.clock_jumped`
    before `tick`.
    """

    __slots__ = ("_last", "_limit")

    def __init__(self, now: float, period_s: float = 0.25, tolerance_s: float = 0.75) -> None:
        self._last = now
        self._limit = period_s + tolerance_s

    def beat(self, now: float) -> float:
        """The length of a standstill that ended just now, in seconds; 0.0: there was none."""
        gap_s = now - self._last
        self._last = now
        return gap_s if gap_s > self._limit else 0.0
