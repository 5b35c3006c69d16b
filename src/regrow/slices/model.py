"""What goes into and out of the membership of slices: events, actions, policy, snapshots.

Everything here is a plain frozen value. The machine that eats events and returns actions is in
`regrow.slices.state`; times are monotonic seconds that the caller passes in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from regrow.errors import UsageError

SliceState: TypeAlias = Literal[
    "down", "starting", "up", "suspect", "lost", "suspended", "stopping"
]
HostState: TypeAlias = Literal[
    "absent", "starting", "running", "connected", "ready", "disconnected", "gone"
]
Severity: TypeAlias = Literal["note", "fatal"]

LIVE: Final[frozenset[SliceState]] = frozenset({"up", "suspect"})
"""States in which a slice owns arrays and takes work."""

HELD: Final[frozenset[SliceState]] = frozenset({"starting", "up", "suspect"})
"""States in which the current incarnation has processes that are wanted."""

TRANSITIONS: Final[dict[SliceState, frozenset[SliceState]]] = {
    "down": frozenset({"starting", "stopping"}),
    "starting": frozenset({"up", "lost", "suspended", "stopping"}),
    "up": frozenset({"suspect", "lost", "suspended", "stopping"}),
    "suspect": frozenset({"up", "lost", "suspended", "stopping"}),
    "lost": frozenset({"starting", "suspended", "stopping"}),
    "suspended": frozenset({"starting", "stopping"}),
    "stopping": frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How long the membership waits for what, and how much loss it bears.

    Attributes:
        hang_after_s: A connected host that sends nothing for this long is lost. It counts from the
            first heartbeat (or readiness) of a host; before that only `start_s` does.
        reconnect_s: A break of a host's connection shorter than this is no loss.
        start_s: A slice that is not up this long after its start has failed to start.
        fence_s: How long a new incarnation waits for the old one's processes to be seen to end.
        restore_after_s: A lost slice is started again this long after its loss; None: when asked.
        backoff_s: The wait after the first failed start; it doubles with each further one.
        backoff_limit_s: The longest such wait.
        num_elastic_instances: Slices that may be gone at the same time; None: all of them.
        story_lines: How many lines of its story each slice keeps.
        leased: Each start needs a lease of somebody else's: a slice starts when asked, and only then.
    """

    hang_after_s: float = 5.0
    reconnect_s: float = 3.0
    start_s: float = 60.0
    fence_s: float = 10.0
    restore_after_s: float | None = None
    backoff_s: float = 0.5
    backoff_limit_s: float = 30.0
    num_elastic_instances: int | None = None
    story_lines: int = 100
    leased: bool = False

    def __post_init__(self) -> None:
        for name in (
            "hang_after_s",
            "reconnect_s",
            "start_s",
            "fence_s",
            "backoff_s",
            "backoff_limit_s",
            "story_lines",
        ):
            value = getattr(self, name)
            if not value > 0:
                raise UsageError(f"{name} is {value}; it must be more than 0")
        if self.restore_after_s is not None and not self.restore_after_s >= 0:
            raise UsageError(f"restore_after_s is {self.restore_after_s}; it must be 0 or more")
        if self.num_elastic_instances is not None and self.num_elastic_instances < 0:
            raise UsageError(
                f"num_elastic_instances is {self.num_elastic_instances}; it must be 0 or more"
            )

    @property
    def suspect_after_s(self) -> float:
        """Silence after which a slice shows as suspect, without further effect."""
        return self.hang_after_s / 2

    def backoff(self, failures: int) -> float:
        """The wait after so many failed starts in a row."""
        # The exponent is bounded because a float overflows after a thousand failures.
        doubled: float = self.backoff_s * 2.0 ** min(failures - 1, 60)
        return min(doubled, self.backoff_limit_s)


# --- events: what happened to a host process ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostStarted:
    """The launcher made the process of a host."""

    index: int
    incarnation: int
    host: int
    pid: int


@dataclass(frozen=True, slots=True)
class HostStartFailed:
    """The launcher could not make the process of a host; there is none."""

    index: int
    incarnation: int
    host: int
    cause: str


@dataclass(frozen=True, slots=True)
class HostConnected:
    """A host's channel is there, for the first time or again.

    `link` tells one connection of a host from another, so that the late end of a replaced one is
    not taken for the end of its successor.
    """

    index: int
    incarnation: int
    host: int
    link: int = 0


@dataclass(frozen=True, slots=True)
class HostReady:
    """A host has its devices and takes commands."""

    index: int
    incarnation: int
    host: int


@dataclass(frozen=True, slots=True)
class HostDisconnected:
    """The connection `link` of a host broke."""

    index: int
    incarnation: int
    host: int
    cause: str = ""
    link: int = 0


@dataclass(frozen=True, slots=True)
class HostExited:
    """The process of a host ended; `cause` as "SIGKILL (signal 9)" or "exit status 1"."""

    index: int
    incarnation: int
    host: int
    cause: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A host showed that it is alive."""

    index: int
    incarnation: int
    host: int


@dataclass(frozen=True, slots=True)
class HostReported:
    """A host, or an agent beside it, reports: a note for the story, or a fatal condition."""

    index: int
    incarnation: int
    host: int
    severity: Severity
    text: str


HostEvent: TypeAlias = (
    HostStarted
    | HostStartFailed
    | HostConnected
    | HostReady
    | HostDisconnected
    | HostExited
    | Heartbeat
    | HostReported
)


# --- events: what concerns a slice, or all of them ----------------------------------------------


@dataclass(frozen=True, slots=True)
class Fenced:
    """The answer to `Fence`: no process of this incarnation is left."""

    index: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class KillRequested:
    """An operator wants the slice ended now."""

    index: int


@dataclass(frozen=True, slots=True)
class RestoreRequested:
    """An operator wants a lost slice back now, without its wait."""

    index: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """An operator wants the processes of a slice stopped (SIGSTOP)."""

    index: int


@dataclass(frozen=True, slots=True)
class ContRequested:
    """An operator wants the stopped processes of a slice to go on (SIGCONT)."""

    index: int


@dataclass(frozen=True, slots=True)
class SliceTaken:
    """A slice is to be given up, for a reason that is not its own; `cause` in words."""

    index: int
    cause: str


@dataclass(frozen=True, slots=True)
class StateSaved:
    """All hosts of a slice have saved their state, which is about to be committed.

    What happens to them is no loss until it is known what becomes of that: `Suspended`, and it has cost
    nothing, or `SuspendFailed`.
    """

    index: int


@dataclass(frozen=True, slots=True)
class SuspendFailed:
    """A suspension was given up: the slice is what it was, or lost if its hosts are gone meanwhile."""

    index: int


@dataclass(frozen=True, slots=True)
class Suspended:
    """The state of a slice is saved: its processes leave, and it is not lost by that."""

    index: int
    why: str


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    """A suspended slice is wanted again, with so many hosts; None: as many as it had."""

    index: int
    hosts: int | None = None


@dataclass(frozen=True, slots=True)
class Resumed:
    """The hosts of a slice that was suspended have its state again."""

    index: int


@dataclass(frozen=True, slots=True)
class ResumeFailed:
    """The state of a slice could not be brought back: it is suspended as before."""

    index: int
    cause: str


@dataclass(frozen=True, slots=True)
class Noted:
    """A line for the story of a slice."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Progressed:
    """The client says what it is doing; both are None where it does not say."""

    step: int | None
    phase: str | None


@dataclass(frozen=True, slots=True)
class StartRequested:
    """Starts every slice that has never been started."""


@dataclass(frozen=True, slots=True)
class ShutdownRequested:
    """Ends every slice for good; no slice is lost by it."""


Request: TypeAlias = (
    KillRequested | RestoreRequested | StopRequested | ContRequested | ResumeRequested
)
News: TypeAlias = (
    Fenced | SliceTaken | Noted | StateSaved | SuspendFailed | Suspended | Resumed | ResumeFailed
)
SliceEvent: TypeAlias = Request | News
Event: TypeAlias = HostEvent | SliceEvent | Progressed | StartRequested | ShutdownRequested


# --- actions: what the caller must do, in order -------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartHost:
    """Make the process of a host; answer `HostStarted` or `HostStartFailed`."""

    index: int
    incarnation: int
    host: int


@dataclass(frozen=True, slots=True)
class SliceUp:
    """All hosts of the slice are connected and ready: it takes work."""

    index: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class SliceLost:
    """This incarnation is lost for ever, and all that lived on it.

    `was_up` is False for a start that failed: nothing lived on it.
    """

    index: int
    incarnation: int
    cause: str
    was_up: bool


@dataclass(frozen=True, slots=True)
class Fence:
    """End all processes of this incarnation, also stopped ones and those being started.

    Answer `Fenced` when none is left. `HostExited` of each of its hosts says the same.
    """

    index: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class EndHost:
    """End one process: it came to life after its incarnation had been fenced."""

    index: int
    incarnation: int
    host: int
    pid: int


@dataclass(frozen=True, slots=True)
class StopHosts:
    """Stop (SIGSTOP) the processes of this incarnation."""

    index: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class ContHosts:
    """Let the processes of this incarnation go on (SIGCONT)."""

    index: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Have the processes of this incarnation end by themselves, in good order; end them if they do not.

    `HostExited` tells of each, as for `Fence`.
    """

    index: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class JobEnds:
    """More slices are gone than the job bears. Comes once; nothing is started after it."""

    text: str


Action: TypeAlias = (
    StartHost | SliceUp | SliceLost | Fence | EndHost | StopHosts | ContHosts | Leave | JobEnds
)


# --- snapshots ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostInfo:
    """One host as it is now."""

    index: int
    state: HostState
    pid: int | None
    heard_at: float | None


@dataclass(frozen=True, slots=True)
class SliceInfo:
    """One slice as it is now."""

    index: int
    incarnation: int
    state: SliceState
    hosts: tuple[HostInfo, ...]
    start_failures: int
    restore_at: float | None


@dataclass(frozen=True, slots=True)
class Loss:
    """How an incarnation ended.

    Attributes:
        incarnation: Which one.
        cause: In words.
        at: When.
        was_up: False for a start that failed.
        heard_at: When all its hosts had last been heard; None if one never was.
        during: What the client was doing, if it had said so.
        restore_after_s: The slice is started again this long after; None: when asked.
        since: When the fault first showed: the last sign of life, or the break of a connection,
            where it was declared for lack of them.
    """

    incarnation: int
    cause: str
    at: float
    was_up: bool
    heard_at: float | None = None
    during: Progressed | None = None
    restore_after_s: float | None = None
    since: float | None = None
