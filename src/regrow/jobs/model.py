"""What goes into and out of the resource manager: jobs, events, instructions.

Everything here is a plain frozen value of JSON types. The machine that eats events and returns
instructions is in `regrow.jobs.manager`; times are seconds since 1970 that the caller passes in.

Each lease carries the incarnation of its slice: a slice gets a new one with each lease, and whatever
comes with an old one changes nothing and is fenced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from regrow.errors import UsageError
from regrow.jobs.priorities import check_object_name

Restart: TypeAlias = Literal["never", "on-failure"]
Phase: TypeAlias = Literal["queued", "running", "suspending", "suspended", "stopping"]
SliceState: TypeAlias = Literal["idle", "leased", "asked", "fencing", "failed"]


@final
@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """What makes one slice as good as another.

    Attributes:
        platform: Kind of its devices, such as "cpu" or "tpu-v5p-slice:2x2x2".
        hosts: Its host processes.
        devices: Its devices, over all hosts.
    """

    platform: str = "cpu"
    hosts: int = 1
    devices: int = 1

    def __post_init__(self) -> None:
        for what in ("hosts", "devices"):
            value = getattr(self, what)
            if type(value) is not int or value < 1:
                raise UsageError(f"{what} of a slice are {value!r}; it must be a number from 1 up")

    def __str__(self) -> str:
        return f"{self.platform}, {self.hosts} hosts, {self.devices} devices"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What a job asks for; fixed for its life.

    Attributes:
        name: Its name, unique among the jobs that have not ended.
        slices: How many slices it wants.
        shape: Of which shape.
        priority: Its priority; a greater one goes first.
        priority_class: The name that the priority came by.
        preempts: Whether it may take slices from jobs of lower priority.
        min_slices: The fewest slices that it can run on; None: it is not elastic.
        suspendable: Whether its state can be saved and loaded without its doing.
        restart: Whether it is started anew when it has failed or its slices were taken.
        max_restarts: How often after a failure of its own. A preemption costs none.
    """

    name: str
    slices: int
    shape: Shape = Shape()
    priority: int = 0
    priority_class: str | None = None
    preempts: bool = True
    min_slices: int | None = None
    suspendable: bool = False
    restart: Restart = "never"
    max_restarts: int = 0

    def __post_init__(self) -> None:
        check_object_name(self.name, "a job")
        if type(self.slices) is not int or self.slices < 1:
            raise UsageError(
                f"job {self.name!r} wants {self.slices!r} slices; it must be 1 or more"
            )
        least = self.min_slices
        if least is not None and (type(least) is not int or not 1 <= least <= self.slices):
            raise UsageError(
                f"job {self.name!r}: min_slices is {least!r}; it must be from 1 to {self.slices}"
            )
        if self.restart not in ("never", "on-failure"):
            raise UsageError(f"job {self.name!r}: restart is {self.restart!r}; never or on-failure")
        if type(self.max_restarts) is not int or self.max_restarts < 0:
            raise UsageError(
                f"job {self.name!r}: max_restarts is {self.max_restarts!r}; it must be 0 or more"
            )


def name_taken(name: str) -> UsageError:
    """The error for a job whose name another one has."""
    return UsageError(
        f"there is a job {name!r} already; give this one another --name, or end that one first"
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How the manager decides and how long it waits.

    Attributes:
        spares: Idle slices of each shape that only a job that has lost a slice may take.
        grace_s: How long a job may take to suspend, to stop, or to hand a slice back.
        fence_s: A slice whose processes are not seen to end within this counts as failed.
        report_s: How long jobs may take to report to a manager that was restarted.
        changes: How many changes are kept.
    """

    spares: int = 0
    grace_s: float = 30.0
    fence_s: float = 10.0
    report_s: float = 30.0
    changes: int = 200

    def __post_init__(self) -> None:
        if type(self.spares) is not int or self.spares < 0:
            raise UsageError(f"spares is {self.spares!r}; it must be 0 or more")
        for what in ("grace_s", "fence_s", "report_s", "changes"):
            if not getattr(self, what) > 0:
                raise UsageError(f"{what} is {getattr(self, what)!r}; it must be more than 0")


# --- events: what jobs tell ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    """A job wants slices. The same job again changes nothing."""

    spec: JobSpec


@dataclass(frozen=True, slots=True)
class JobSuspended:
    """The state of a job is committed to storage and its workers have left (see `Suspend`)."""

    name: str
    attempt: int


@dataclass(frozen=True, slots=True)
class SuspendRefused:
    """A job cannot be suspended; it runs on."""

    name: str
    attempt: int
    cause: str


@dataclass(frozen=True, slots=True)
class SliceReturned:
    """The answer to `AskBack`: a job goes on without a slice, and has no process on it."""

    name: str
    index: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class JobResized:
    """A job wants another number of slices than before; some are asked back if it has more."""

    name: str
    slices: int


@dataclass(frozen=True, slots=True)
class JobEnded:
    """A job has ended, well or not; or its head is gone.

    `attempt` is the one that ended; None: the job as a whole is withdrawn.
    """

    name: str
    ok: bool
    cause: str = ""
    attempt: int | None = None


@dataclass(frozen=True, slots=True)
class JobReport:
    """A job is connected, again: what it believes to be true.

    Attributes:
        name: The job.
        attempt: The latest attempt that it was started for; 0: none.
        suspended: Whether its state is in storage and it has no workers.
        leases: Index and incarnation of each slice that it uses.
    """

    name: str
    attempt: int
    suspended: bool
    leases: tuple[tuple[int, int], ...]


# --- events: what hosts and operators tell ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SliceFailed:
    """A slice is lost: a host, its processes, or the way to it."""

    index: int
    incarnation: int
    cause: str


@dataclass(frozen=True, slots=True)
class SliceIdle:
    """The hosts of a slice are well, and no process up to this incarnation is left on them."""

    index: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class SliceReport:
    """The hosts of a slice are connected, for the first time or again.

    Attributes:
        index: The slice.
        shape: Its shape.
        running: The incarnations that have processes on them.
    """

    index: int
    shape: Shape
    running: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SuspendRequested:
    """An operator wants a job suspended until `ResumeRequested`."""

    name: str


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    """An operator wants a job that was suspended on request back."""

    name: str


JobEvent: TypeAlias = (
    JobSubmitted
    | JobSuspended
    | SuspendRefused
    | SliceReturned
    | JobResized
    | JobEnded
    | JobReport
    | SuspendRequested
    | ResumeRequested
)
SliceEvent: TypeAlias = SliceFailed | SliceIdle | SliceReport
Event: TypeAlias = JobEvent | SliceEvent


# --- instructions: what the caller must do, in order. Each may come again, and then changes nothing


@dataclass(frozen=True, slots=True)
class Grant:
    """To a job: this slice is its slice number `rank`; one of an older incarnation is not."""

    job: str
    rank: int
    index: int
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Withdraw:
    """To a job: this lease is over."""

    job: str
    index: int
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class AskBack:
    """To a job: go on without this slice and answer `SliceReturned`, or it is taken at `due`."""

    job: str
    rank: int
    index: int
    incarnation: int
    due: float
    reason: str


@dataclass(frozen=True, slots=True)
class Start:
    """To a job: it has the slices to start; `restore`: from the state it was suspended with.

    `attempt` grows with each start. What a job tells of an older attempt changes nothing.
    """

    job: str
    attempt: int
    restore: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Suspend:
    """To a job: save the state until `due`; answer `JobSuspended` or `SuspendRefused`."""

    job: str
    attempt: int
    due: float
    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """To a job: end until `due`; answer `JobEnded`. `again`: it will be started anew."""

    job: str
    attempt: int
    due: float
    again: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Fence:
    """To the hosts of a slice: end every process up to this incarnation; answer `SliceIdle`."""

    index: int
    incarnation: int
    reason: str


JobInstruction: TypeAlias = Grant | Withdraw | AskBack | Start | Suspend | Stop
Instruction: TypeAlias = JobInstruction | Fence


@final
@dataclass(frozen=True, slots=True)
class Change:
    """Something that the manager did or learned, and why.

    Attributes:
        at: When, in seconds since 1970.
        text: What and why.
        job: The job it concerns, if one.
        index: The slice it concerns, if one.
        incarnation: The incarnation of that slice.
    """

    at: float
    text: str
    job: str | None = None
    index: int | None = None
    incarnation: int | None = None
