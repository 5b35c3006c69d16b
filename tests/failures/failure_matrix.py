"""The failure matrix: every fault in every phase, and what must hold in each cell."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from signal import SIGKILL, SIGSTOP, SIGTERM

import failure_rig as rigs
from failure_rig import Rig, alive, wait_until

VICTIM = 1
FIRST_VICTIM = 2
PHASES = (
    "idle",
    "compiling",
    "to_device",
    "to_host",
    "one_slice",
    "collective",
    "resharding",
    "snapshot",
    "training",
)
"""What the client does meanwhile; in `training` a former fault is being handled."""


@dataclass(frozen=True)
class Fault:
    """One way to fail.

    Attributes:
        strike: Does it to a slice.
        cause: What errors must tell of it; None: no slice is lost.
        mend: Undoes what would keep the slice from returning.
        lasts_s: How long it takes at the least until it is seen.
    """

    strike: Callable[[Rig, int], None]
    cause: str | None
    mend: Callable[[Rig, int], None] = lambda rig, index: None
    lasts_s: float = 0.0


def _kill(rig: Rig, index: int) -> None:
    rig.signal(index, SIGKILL)


def _stop(rig: Rig, index: int) -> None:
    rig.signal(index, SIGSTOP)


def _exit(rig: Rig, index: int) -> None:
    rig.signal(index, SIGTERM)


def _abort(rig: Rig, index: int) -> None:
    rig.client.do("abort", victim=index)


def _break_shortly(rig: Rig, index: int) -> None:
    rig.close_door()
    rig.cut_channel(index)
    time.sleep(rigs.SHORT_BREAK_S)
    rig.open_door()


def _break(rig: Rig, index: int) -> None:
    rig.close_door()
    rig.cut_channel(index)


def _open_door(rig: Rig, _: int) -> None:
    rig.open_door()


def _cut_collectives(rig: Rig, index: int) -> None:
    # None are there for a moment where another slice has just been lost.
    assert rig.cut_collectives(index) or len(rig.lost())


FAULTS: Mapping[str, Fault] = {
    "SIGKILL": Fault(_kill, "SIGKILL"),
    "SIGSTOP": Fault(_stop, "no heartbeat", lasts_s=rigs.HANG_AFTER_S),
    "exit": Fault(_exit, "SIGTERM"),
    "XLA abort": Fault(_abort, "SIGSEGV|SIGABRT"),
    "short break": Fault(_break_shortly, None),
    "long break": Fault(_break, "no connection", _open_door, rigs.RECONNECT_S),
    "cut collective": Fault(_cut_collectives, None),
}

CELLS = [(fault, phase) for fault in FAULTS for phase in PHASES]


def sample(count: int, seed: int) -> list[tuple[str, str]]:
    """So many cells, in which every fault and every phase occurs if they can."""
    generator = random.Random(seed)
    cells = CELLS.copy()
    generator.shuffle(cells)
    chosen: list[tuple[str, str]] = []
    for wanted in range(len(cells)):
        # Those first whose fault and phase have been taken least.
        cells.sort(
            key=lambda cell: (
                sum(cell[0] == c[0] for c in chosen) + sum(cell[1] == c[1] for c in chosen)
            )
        )
        if wanted == count:
            break
        chosen.append(cells.pop(0))
    return chosen


def run_cell(rig: Rig, fault_name: str, phase: str, delay_s: float) -> dict[str, float]:
    """Runs one cell.

    Returns:
        Seconds from the fault to the client's error, where there is one.
    """
    cell = Cell(rig, FAULTS[fault_name], phase)
    took = cell.strike(delay_s)
    cell.check_survivors()
    if cell.lost:
        cell.check_lost()
        cell.bring_back()
    cell.check_all()
    return took


class Cell:
    """One fault in one phase."""

    def __init__(self, rig: Rig, fault: Fault, phase: str) -> None:
        self.rig = rig
        self.fault = fault
        self.phase = phase
        self.lost = [VICTIM] if fault.cause else []
        if phase == "training":
            self.lost.append(FIRST_VICTIM)
        self.live = [index for index in rig.all if index not in self.lost]
        self.before = rig.all_pids()
        self.processes = rig.processes()
        rig.client.do("arm")
        rig.client.do("begin", phase=phase, victim=VICTIM)

    def strike(self, delay_s: float) -> dict[str, float]:
        """Does it, and waits until the client has seen it."""
        rig = self.rig
        time.sleep(delay_s)
        if self.phase == "training":
            rig.signal(FIRST_VICTIM, SIGKILL)
        at = time.monotonic()
        self.fault.strike(rig, VICTIM)
        losing = bool(self.fault.cause)
        # A cut link may fail the programs in flight, which ends the activity, or hit none.
        ended = rig.client.do("end", more=None if losing else 2)
        self._check_error(ended["error"])
        return {"error": ended["ended_at"] - at} if losing else {}

    def _check_error(self, error: str | None) -> None:
        cause = self.fault.cause
        if cause is not None:
            assert error is not None, "nothing was raised"
            self._check_text(error, VICTIM if self.phase != "training" else None)
        elif self.fault is FAULTS["cut collective"]:
            # Where no program was in flight it is the next one that meets the cut link.
            self._check_links(error or self.rig.client.do("together", live=self.live))
        else:
            assert error is None, error

    def _check_links(self, error: str) -> None:
        links = r"slice \d+ lost its collective links to slices .*; all of them live"
        if error != "nothing was raised":
            assert re.match(f"JaxRuntimeError: DATA_LOSS: {links}", error), error

    def _check_text(self, error: str, index: int | None) -> None:
        found = re.match(r"JaxRuntimeError: DATA_LOSS: slice (\d+) was lost: ", error)
        assert found, error
        lost = int(found[1])
        assert lost in ([index] if index is not None else self.lost), error
        cause = "SIGKILL" if lost == FIRST_VICTIM else self.fault.cause
        assert cause is not None
        assert re.search(cause, error), error

    def check_survivors(self) -> None:
        """Living slices keep their processes and arrays, and work."""
        self.rig.client.do("survive", live=self.live)
        for one in self.rig.cluster.slices:
            if one.index in self.live:
                assert one.state in ("up", "suspect"), one
                assert tuple(one.pids) == self.before[one.index], one

    def check_lost(self) -> None:
        """Lost arrays say so, and no old process is left."""
        errors = self.rig.client.do("lost", slices=self.lost)
        count = len(errors) // len(self.lost)
        for number, error in enumerate(errors):
            self._check_text(error, self.lost[number // count])
        pids = [pid for index in self.lost for pid in self.before[index]]
        wait_until(lambda: not any(alive(pid) for pid in pids), 3)

    def bring_back(self) -> None:
        """The slices return; what was lost stays lost."""
        rig = self.rig
        self.fault.mend(rig, VICTIM)
        for index in self.lost:
            rig.cluster.restore(index)
        rig.cluster.wait_healthy(30)
        self.check_lost()

    def check_all(self) -> None:
        """All slices work, with functions that were jitted before, and nothing is left over."""
        self.rig.client.do("returned", slices=self.lost)
        self.rig.client.do("survive", live=self.live)
        wait_until(lambda: self.rig.processes() == self.processes, 3)
