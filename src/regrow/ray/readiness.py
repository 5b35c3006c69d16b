"""Until all hosts of a TPU have joined Ray: what is to be done next, as a state machine without I/O.

    absent ──► Create ──► coming ──► ready, hosts join ──► Done
                 ▲                    │ ▲  │ too slow, or the script has failed
                 │            Rejoin ◄┘─┘  │
                 └──────── Delete ◄────────┴──── dead (preempted, failed, suspended)

Hosts that are there and have lost Ray (a raylet was killed, the head was started anew) join again as they
are. Every recreation waits twice as long for the hosts to join; after the last one it gives up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final

from regrow.errors import UsageError

Condition: TypeAlias = Literal["absent", "coming", "ready", "dead"]


VERSION_MISMATCH: Final = "Version mismatch"
"""Ray's word for nodes whose Ray or Python is another one than the head's."""
_LAPSED_S: Final = 1.0
_REJOINS: Final = 2


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JoinPolicy:
    """How patient it is.

    Attributes:
        join_s: How long the hosts of a READY TPU may take to join, in seconds.
        recreations: How often it may be made anew.
        poll_s: The longest time between two looks, in seconds.
    """

    join_s: float = 150.0
    recreations: int = 3
    poll_s: float = 5.0

    def __post_init__(self) -> None:
        if self.join_s <= 0 or self.poll_s <= 0 or self.recreations < 0:
            raise UsageError("join_s and poll_s must be more than 0 s, recreations 0 or more")


@final
@dataclass(frozen=True, slots=True)
class Sight:
    """What one look has shown.

    Attributes:
        condition: Of the TPU.
        state: The API's own word for that.
        joined: Hosts in the Ray cluster.
        expected: Hosts that there are to be.
        script_error: What a startup script said that has failed; empty if none has.
        lapsed: Whether the scripts of all missing hosts have ended, well or for want of a head: nothing
            is under way.
        lost: Whether all hosts had joined before: those that are missing have lost Ray.
    """

    condition: Condition
    state: str
    joined: int
    expected: int
    script_error: str = ""
    lapsed: bool = False
    lost: bool = False


@final
@dataclass(frozen=True, slots=True)
class Create:
    """Make the TPU."""


@final
@dataclass(frozen=True, slots=True)
class Delete:
    """Delete it, to make it anew."""

    reason: str


@final
@dataclass(frozen=True, slots=True)
class Rejoin:
    """Have the missing hosts join again as they are."""


@final
@dataclass(frozen=True, slots=True)
class Wait:
    """Look again after a while; `text` is what is waited for, empty if it has been told."""

    pause_s: float
    text: str = ""


@final
@dataclass(frozen=True, slots=True)
class Done:
    """All hosts have joined."""


@final
@dataclass(frozen=True, slots=True)
class GiveUp:
    """It has been made anew often enough."""

    reason: str


Action: TypeAlias = Create | Delete | Rejoin | Wait | Done | GiveUp


@final
class Readiness:
    """Decides what is next, from what is seen."""

    def __init__(self, tpu: str, policy: JoinPolicy) -> None:
        """Has seen nothing yet.

        Args:
            tpu: Its name, for texts.
            policy: How patient it is.
        """
        self._tpu = tpu
        self._policy = policy
        self._made_anew = 0
        self._ready_since: float | None = None
        self._lapsed_since: float | None = None
        self._rejoins = 0
        self._told: tuple[object, ...] = ()
        self._pause_s = 0.0

    @property
    def join_s(self) -> float:
        """How long the hosts may take to join this time."""
        return float(self._policy.join_s * 2**self._made_anew)

    def next(self, sight: Sight, now: float) -> Action:
        """What is to be done about what is seen at a time by the monotonic clock."""
        match sight.condition:
            case "absent":
                self._ready_since = None
                return Create()
            case "dead":
                return self._again(f"{self._tpu} is {sight.state}")
            case "coming":
                self._ready_since = None
                return self._wait(sight, f"Waiting for {self._tpu}, which is {sight.state}...")
            case "ready":
                return self._joining(sight, now)

    def _joining(self, sight: Sight, now: float) -> Action:
        if self._ready_since is None:
            self._ready_since = now
        if sight.joined >= sight.expected:
            return Done()
        if sight.script_error and not (sight.lapsed and self._rejoins < _REJOINS):
            failed = f"the startup script of {self._tpu} failed: {sight.script_error}"
            # Hosts that are made anew have the same.
            return GiveUp(failed) if VERSION_MISMATCH in failed else self._again(failed)
        if now - self._ready_since >= self.join_s:
            return self._again(
                f"only {sight.joined} of {sight.expected} hosts of {self._tpu} joined the Ray "
                f"cluster within {self.join_s:g} s"
            )
        if self._rejoins < _REJOINS and self._has_lapsed(sight, now):
            self._rejoins += 1
            self._lapsed_since = None
            return Rejoin()
        detected = (
            f"Detected {sight.joined} of {sight.expected} hosts of {self._tpu} in the cluster"
        )
        return self._wait(sight, f"{detected}, waiting for them to join...")

    def _has_lapsed(self, sight: Sight, now: float) -> bool:
        """Whether nothing has been under way for a while: Ray may hear of a new node a bit later."""
        if not sight.lapsed:
            self._lapsed_since = None
            return False
        if sight.lost and not self._rejoins:
            return True
        if self._lapsed_since is None:
            self._lapsed_since = now
        return now - self._lapsed_since >= _LAPSED_S

    def _again(self, reason: str) -> Action:
        self._ready_since = None
        self._rejoins = 0
        if self._made_anew >= self._policy.recreations:
            tries = self._made_anew + 1
            return GiveUp(f"{reason} (tried {tries} times)" if tries > 1 else reason)
        self._made_anew += 1
        return Delete(reason)

    def _wait(self, sight: Sight, text: str) -> Wait:
        """Looks often at first and when something happens."""
        seen = (sight.condition, sight.state, sight.joined)
        is_news, self._told = seen != self._told, seen
        first_s = min(0.25, self._policy.poll_s)
        self._pause_s = first_s if is_news else min(1.5 * self._pause_s, self._policy.poll_s)
        return Wait(self._pause_s, text if is_news else "")
