"""One attempt at a job with a rank on every host: how it goes, as a state machine without I/O.

All ranks succeed, or the attempt is over with the first that does not. A rank that fails because a
peer's host has died fails as the peer does: so a failure is held for a moment, to see whether a host
is found dead that would explain it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final

JobState: TypeAlias = Literal["PENDING", "RUNNING", "SUCCEEDED", "FAILED", "STOPPED"]
Kind: TypeAlias = Literal["succeeded", "preempted", "failed", "setup", "leftover", "stopped"]

SETTLE_S: Final = 3.0
"""How long a failure waits for a host's death to explain it, in seconds."""
FENCED_STATUS: Final = 76
"""Exit status of a rank that was ended because its attempt is over (EX_PROTOCOL)."""
ORPHANED_STATUS: Final = 75
"""Exit status of a rank that lost its raylet or its Ray cluster (EX_TEMPFAIL)."""

_LOST_WORDS: Final = (
    "Job supervisor actor died",
    "actor died",
    "node died",
    "owner has died",
    "Driver agent",
    "The node was terminated",
)
_SETUP_WORDS: Final = ("runtime_env setup failed", "Failed to set up runtime environment")
# Ray leaves a half-made one there when it is killed, or told to stop; having failed so it removes it.
_LEFTOVER: Final = re.compile(r"error: dest dir '[^']*' exists")


@final
@dataclass(frozen=True, slots=True)
class RankView:
    """A rank's job as Ray shows it.

    Attributes:
        state: Its state.
        node: The node that it runs on; None: not yet placed.
        message: What Ray says of it.
        exit_code: Of its program; None if unknown.
    """

    state: JobState
    node: str | None = None
    message: str = ""
    exit_code: int | None = None


_UNSEEN: Final = RankView("PENDING")


@final
@dataclass(frozen=True, slots=True)
class Verdict:
    """How an attempt has ended.

    Attributes:
        kind: "preempted": a host was lost; "setup": the runtime environment cannot be made, and
            could not the next time; "leftover": a half-made one of an earlier attempt was in its
            way, and is not any more; "stopped": somebody stopped a rank.
        rank: The rank that told; -1 if all did.
        cause: What Ray said of it.
        exit_code: Of its program; None if unknown.
    """

    kind: Kind
    rank: int = -1
    cause: str = ""
    exit_code: int | None = None


@final
class Attempt:
    """Judges the ranks of one attempt."""

    def __init__(
        self,
        ranks: int,
        *,
        homes: Mapping[int, str] | None = None,
        settle_s: float = SETTLE_S,
    ) -> None:
        """Has seen nothing yet.

        Args:
            ranks: How many there are.
            homes: The nodes that they are to run on, by rank, as far as that is known.
            settle_s: How long a failure waits for a host's death to explain it, in seconds.
        """
        self._ranks = ranks
        self._homes = homes or {}
        self._settle_s = settle_s
        self._failed_at: float | None = None
        self._first: Verdict | None = None

    def judge(
        self, views: Mapping[int, RankView], alive: frozenset[str], now: float
    ) -> Verdict | None:
        """How the attempt has ended; None while it goes on.

        Args:
            views: The ranks that Ray knows of.
            alive: The nodes that are alive.
            now: The time by the monotonic clock.
        """
        for rank in range(self._ranks):
            # Before Ray has noticed what this means for the job; of one that is queued it never does.
            view = views.get(rank, _UNSEEN)
            node = view.node or self._homes.get(rank)
            if view.state != "SUCCEEDED" and node is not None and node not in alive:
                ran = "ran" if view.node else "was to run"
                return Verdict("preempted", rank, f"rank {rank} {ran} on a node that has died")
        if all(rank in views and views[rank].state == "SUCCEEDED" for rank in range(self._ranks)):
            return Verdict("succeeded", exit_code=0)
        failures = [
            _judge_rank(rank, view)
            for rank, view in sorted(views.items())
            if view.state in ("FAILED", "STOPPED")
        ]
        if not failures:
            return None
        for failure in failures:
            if failure.kind in ("preempted", "setup", "leftover"):
                return failure
        return self._held(failures[0], now)

    def _held(self, failure: Verdict, now: float) -> Verdict | None:
        if self._failed_at is None or self._first is None:
            # The first that failed is the cause; those after it may only have lost it.
            self._failed_at, self._first = now, failure
        return self._first if now - self._failed_at >= self._settle_s else None


def _judge_rank(rank: int, view: RankView) -> Verdict:
    kind: Kind = "failed"
    if view.exit_code == ORPHANED_STATUS or any(word in view.message for word in _LOST_WORDS):
        kind = "preempted"
    elif any(word in view.message for word in _SETUP_WORDS):
        kind = "leftover" if _LEFTOVER.search(view.message) else "setup"
    elif view.state == "STOPPED" or view.exit_code == FENCED_STATUS:
        kind = "stopped"
    return Verdict(kind, rank, view.message, view.exit_code)


def told(views: Mapping[int, RankView]) -> str:
    """The states of all ranks, counted: "2 RUNNING, 1 PENDING"."""
    counted = Counter(view.state for view in views.values())
    return ", ".join(f"{number} {state}" for state, number in counted.most_common())
