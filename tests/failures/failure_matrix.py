"""The failure matrix: every fault in every phase, and what must hold in each cell."""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from signal import SIGKILL

import failure_rig as rigs
from failure_rig import Rig, wait_until

from regrow.chaos import Anchor, Chaos, FaultEvent, InPhase, InRecovery
from regrow.processes import is_running

VICTIM = 1
FIRST_VICTIM = 2
DUE_S = 20.0
PHASES: Mapping[str, str | None] = {
    "idle": None,
    "compiling": "compile",
    "to_device": "transfer",
    "to_host": "transfer",
    "one_slice": "step",
    "collective": "collective",
    "resharding": "reshard",
    "snapshot": None,
    "saving": "snapshot",
    "loading": "load",
    "scaling_up": "scale-up",
    "training": None,
}
"""What the client does meanwhile, and the phase of `regrow.chaos` that a fault waits for then.

In `snapshot` stock Orbax saves, in `saving` our own snapshotter; in `training` a former fault is being
handled.
"""


@dataclass(frozen=True)
class Fault:
    """One way to fail.

    Attributes:
        chaos: The faults of `regrow.chaos` that make it, each with how many seconds after the first.
        cause: What errors must tell of it; None: no slice is lost.
        strike: Does it to a slice where chaos cannot.
    """

    chaos: Sequence[tuple[str, float]]
    cause: str | None
    strike: Callable[[Rig, int], None] | None = None


def _abort(rig: Rig, index: int) -> None:
    rig.client.do("abort", victim=index)


def _cut_collectives(rig: Rig, index: int) -> None:
    # None are there for a moment where another slice has just been lost.
    assert rig.cut_collectives(index) or len(rig.lost())


FAULTS: Mapping[str, Fault] = {
    "kill": Fault([("kill", 0)], "SIGKILL"),
    "term": Fault([("term", 0)], "SIGTERM"),
    "segv": Fault([("segv", 0)], "SIGSEGV"),
    "exit": Fault([("exit", 0)], "exit status 1"),
    # Most often `new` throws first; but any thread may be the one that gets no memory.
    "oom": Fault([("oom", 0)], "SIGABRT|SIGSEGV|exit status"),
    "XLA abort": Fault([], "SIGSEGV|SIGABRT", _abort),
    "stop": Fault([("stop", 0)], "no heartbeat"),
    "short stop": Fault([("stop", 0), ("cont", rigs.SHORT_STOP_S)], None),
    "clock jump": Fault([("clockjump", 0)], None),
    "disk full": Fault([("diskfull", 0), ("mend", 1)], None),
    "slow link": Fault([("slowlink", 0), ("mend", 1)], None),
    "lost reply": Fault([("lostreply", 0)], None),
    "short break": Fault([("cutlink", 0), ("mend", rigs.SHORT_BREAK_S)], None),
    "long break": Fault([("cutlink", 0)], "no connection"),
    "cut collective": Fault([], None, _cut_collectives),
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
    with contextlib.ExitStack() as lasting:
        cell = Cell(rig, FAULTS[fault_name], phase, lasting)
        took = cell.strike(delay_s)
        cell.check_survivors()
        if cell.lost:
            cell.check_lost()
            cell.bring_back()
        cell.check_all()
    rig.cluster.wait_healthy(30)
    assert rig.all_pids() == cell.after
    return took


class Cell:
    """One fault in one phase."""

    def __init__(self, rig: Rig, fault: Fault, phase: str, lasting: contextlib.ExitStack) -> None:
        self.rig = rig
        self.fault = fault
        self.phase = phase
        self.lasting = lasting
        self.lost = [VICTIM] if fault.cause else []
        if phase == "training":
            self.lost.append(FIRST_VICTIM)
        self.live = [index for index in rig.all if index not in self.lost]
        self.before = self.after = rig.all_pids()
        self.processes = rig.processes()
        rig.client.do("arm")
        rig.client.do("begin", phase=phase, victim=VICTIM)

    def strike(self, delay_s: float) -> dict[str, float]:
        """Does it, and waits until the client has seen it."""
        rig = self.rig
        chaos = self.lasting.enter_context(Chaos(rig.cluster, self._schedule(delay_s)))
        at = time.monotonic()
        if self.phase == "training":
            rig.signal(FIRST_VICTIM, SIGKILL)
        if self.fault.strike is not None:
            time.sleep(delay_s)
            self.fault.strike(rig, VICTIM)
        losing = bool(self.fault.cause)
        if not losing:
            chaos.wait(DUE_S)
        # A cut link may fail the programs in flight, which ends the activity, or hit none.
        ended = rig.client.do("end", more=None if losing else 2)
        chaos.wait(DUE_S)
        assert not chaos.refused, chaos.refused
        self._check_error(ended["error"])
        return {"error": ended["ended_at"] - at} if losing else {}

    def _schedule(self, delay_s: float) -> list[FaultEvent]:
        """The faults, from `delay_s` after the begin of the phase on."""
        phase = PHASES[self.phase]
        anchor: Anchor = None if phase is None else InPhase(phase)
        if self.phase == "training":
            anchor = InRecovery(1)
        return [
            FaultEvent(name, VICTIM, delay_s + later_s, anchor)
            for name, later_s in self.fault.chaos
        ]

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
        wait_until(lambda: not any(is_running(pid) for pid in pids), 3)

    def bring_back(self) -> None:
        """The slices return; what was lost stays lost."""
        rig = self.rig
        for index in self.lost:
            rig.cluster.restore(index)
        rig.cluster.wait_healthy(30)
        self.after = rig.all_pids()
        self.check_lost()

    def check_all(self) -> None:
        """All slices work, with functions that were jitted before, and nothing is left over."""
        self.rig.client.do("returned", slices=self.lost)
        self.rig.client.do("survive", live=self.live)
        wait_until(lambda: self.rig.processes() == self.processes, 3)
