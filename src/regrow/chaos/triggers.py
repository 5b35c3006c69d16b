"""When the faults of a schedule are due. A state machine without I/O and without a clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from typing import final

from regrow.chaos.schedule import AtStep, FaultEvent, InPhase, InRecovery, in_order


@final
class Triggers:
    """Takes what happens, with its time, and tells which faults are due.

    Times are seconds of any monotonic clock. An anchor counts once: the fault that waits for a phase
    is due at the first time that it begins.
    """

    def __init__(self, events: Iterable[FaultEvent]) -> None:
        self._waiting = list(in_order(events))
        # Faults of one time are due in the order of the schedule.
        self._numbers = itertools.count()
        self._timed: list[tuple[float, int, FaultEvent]] = []
        self._losses = 0
        self._connected = False

    @property
    def left(self) -> tuple[FaultEvent, ...]:
        """The faults that have not been due yet."""
        return in_order([*self._waiting, *(event for _, _, event in self._timed)])

    @property
    def awaited(self) -> tuple[FaultEvent, ...]:
        """The faults that wait for a step or a phase, of which somebody has to tell."""
        return tuple(e for e in self._waiting if isinstance(e.anchor, AtStep | InPhase))

    @property
    def next_at(self) -> float | None:
        """When the next fault is due, as far as that is known."""
        return self._timed[0][0] if self._timed else None

    def connected(self, now: float) -> None:
        """A client has connected; only the first counts."""
        if not self._connected:
            self._connected = True
            self._anchored([e for e in self._waiting if e.anchor is None], now)

    def lost(self, now: float) -> None:
        """The loss of a slice has been declared, and a recovery begins."""
        self._losses += 1
        number = InRecovery(self._losses)
        self._anchored([e for e in self._waiting if e.anchor == number], now)

    def step(self, step: int, now: float) -> None:
        """The program begins this step."""
        reached = [
            e for e in self._waiting if isinstance(e.anchor, AtStep) and e.anchor.step <= step
        ]
        self._anchored(reached, now)

    def phase(self, phase: str, slice_index: int | None, now: float) -> None:
        """A phase begins that concerns this slice; None: all of them."""
        entered = [
            e
            for e in self._waiting
            if e.anchor == InPhase(phase) and slice_index in (None, e.slice_index)
        ]
        self._anchored(entered, now)

    def due(self, now: float) -> list[FaultEvent]:
        """Takes the faults that are due, in their order."""
        due = []
        while self._timed and self._timed[0][0] <= now:
            due.append(heapq.heappop(self._timed)[2])
        return due

    def _anchored(self, events: list[FaultEvent], now: float) -> None:
        for event in events:
            self._waiting.remove(event)
            heapq.heappush(self._timed, (now + event.at_s, next(self._numbers), event))
