"""A run as its head sees it: from what happens to where the time goes. A state machine without I/O.

The head calls a method for each thing that it sees, with the time of any monotonic clock. What is
called for each step of a training does no more than count and compare.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, final

from regrow.observe import goodput
from regrow.observe.goodput import Ledger
from regrow.observe.steps import Program, Resumed, Steps
from regrow.observe.timeline import Activity, ElasticEvent, Kind, Report

_REPORTS: Final = 200
_DATA: Final = "data"
_STEP: Final = "step"
_PHASES: Final[dict[str, Kind]] = {
    "load": "load",
    _DATA: "data",
    "wait": "decide",
    "scale-up": "decide",
    "snapshot": "snapshot",
}
_SHARE: Final = 0.1


@final
class Run:
    """All clients of a head, taken as one training.

    Attributes:
        event: The elastic event that goes on, if one does.
        open: What goes on now.
        reports: The elastic events that have ended, up to 200, the latest last.
        returned: Slices that are back, but have not taken part in a step since.
        steps: The steps.
        ledger: Where the time goes.
        latest: The program that was executed last.
        launched_at: When that was.
        quiet_since: Since when nothing runs and the client asks for nothing, if that is so.
        usual_gap_s: How long that usually takes, in a moving average.
        usual_wait_s: How long the client usually waits, likewise.
        in_loader: Whether the client is known to be in its data loader.
    """

    def __init__(self, now: float, on_report: Callable[[Report], None] = lambda report: None):
        """Begins at `now`; `on_report` is called with each elastic event that has ended."""
        self.event: ElasticEvent | None = None
        self.open: set[Activity] = set()
        self.reports: list[Report] = []
        self.returned: set[int] = set()
        self.steps = Steps()
        self.ledger = Ledger(goodput.INITIALIZATION, now)
        self.latest: Program | None = None
        self.launched_at = now
        self.quiet_since: float | None = None
        self.usual_gap_s = 0.0
        self.usual_wait_s = 0.0
        self.in_loader = False
        self._on_report = on_report
        self._began = now
        self._events = 0
        self._counts: Counter[str] = Counter()
        self._lost_to: dict[int, str] = {}
        self._up = False
        self._clients = 0
        self._left_at: float | None = None
        self._running = False
        self._interrupted = False
        self._in_flight = False
        self._compiling = 0
        self._phase: Activity | None = None
        self._phase_name: str | None = None

    @property
    def running(self) -> bool:
        """Whether a training is known to have begun."""
        return self._running

    # --- slices and clients ---

    def slices_up(self, now: float) -> None:
        """All slices have come up for the first time."""
        self._up = True
        self._settle(now)

    def slice_back(self, index: int) -> None:
        """A slice that was lost has returned."""
        self.returned.add(index)

    def slice_lost(self, index: int, cause: str, evidence: float, now: float) -> None:
        """A slice is declared lost; `evidence` is when the fault first showed."""
        self.returned.discard(index)
        self.steps.slice_lost()
        if not self._clients:
            return
        event = self.event
        if event is not None and event.kind == "loss" and event.rebuilt_since is None:
            event.join(index, cause, now, self.open)
            return
        if event is not None:
            self._close(min(max(evidence, event.began), now), "another loss", now)
        self.event = ElasticEvent("loss", index, cause, evidence, now, self.open)
        self._in_flight = False
        self.ledger.switch_since(goodput.SLICE_DOWN, self.event.began, now)

    def clients(self, count: int, now: float) -> None:
        """So many clients are connected now."""
        gone = self._clients and not count
        self._clients = count
        self._left_at = now if gone else None
        if gone:
            if self.event is not None:
                self._close(now, "client gone", now)
            self._interrupted = self._interrupted or self._running
            self._running = self._in_flight = False
            self.steps.client_gone()
            self.quiet_since = None
            self.open.clear()
            self._compiling = 0
            self._phase = self._phase_name = None
        self._settle(now)

    def told(self, step: int | None, phase: str | None, now: float) -> None:
        """The client says what it is doing."""
        # A new phase is told with the old step; the same of both is a step that is begun again.
        again = phase == self._phase_name == _STEP
        if step is not None and (step != self.steps.told or again):
            self.steps.told = step
            if self.event is not None:
                self.event.told(step, now)
                if self.event.told_two_steps:
                    self._close(now, "recovered", now)
        if phase == self._phase_name:
            return
        self._phase_name = phase
        if self._phase is not None:
            self.end(self._phase, now)
        kind = _PHASES.get(phase or "")
        self._phase = None if kind is None else self.begin(kind, now, phase or "")
        if phase == "scale-up" and self.returned and self.event is None and self._running:
            self._scale_up(now, now)

    def spent(self, kind: Kind, began: float, ended: float, now: float) -> None:
        """The client says what it has been doing for some time."""
        activity = Activity(kind, min(began, now), ended=min(ended, now))
        if self.event is not None:
            self.event.add(activity)

    # --- work ---

    def uses(self, slices: Sequence[int], since: float, now: float) -> None:
        """Work is, since then, asked of several slices, where `returned` is not empty."""
        if self._running and self.event is None and not self.returned.isdisjoint(slices):
            self._scale_up(since, now)

    def program_found(self, source: str) -> None:
        """A program is there that a client has asked for: "compiled", "from memory", "from disk"."""
        if self.event is not None:
            self.event.programs[source] += 1

    def launched(
        self, program: Program, now: float, step: int | None = None, *, expected: bool = False
    ) -> bool:
        """An execution has begun that carries this step; returns whether it is one of the training's.

        `expected`: the step is only what was to be expected, see `Steps.launched`.
        """
        self._in_flight = True
        self.in_loader = False
        self.latest = program
        self.launched_at = now
        if self.quiet_since is not None:
            self.usual_gap_s += _SHARE * (now - self.quiet_since - self.usual_gap_s)
            self.quiet_since = None
        if self._compiling and program is self.steps.main:
            self._compile_beside()
        if self.event is not None and self._running and program is not self.steps.main:
            return False  # What the training's step is, is not decided in a recovery.
        productive_s = self.ledger.spent(goodput.PRODUCTIVE, now)
        is_step = self.steps.launched(program, productive_s, step, expected)
        if is_step and not self._running:
            self._running = True
            self._interrupted = False
        self._settle(now)
        return is_step

    def begin(
        self,
        kind: Kind,
        now: float,
        what: str = "",
        slices: Sequence[int] = (),
        *,
        small: bool = False,
    ) -> Activity:
        """Something begins that will end."""
        activity = Activity(kind, now, what, slices, small)
        self.open.add(activity)
        self.quiet_since = None
        if kind == "compile":
            self._compiling += 1
        if self.event is not None:
            if kind == "step":
                activity.number, activity.step = self.steps.latest
            self.event.add(activity)
        elif kind != "wait":
            self._settle(now)
        return activity

    def end(self, activity: Activity, now: float, *, failed: bool = False) -> None:
        """It ends."""
        activity.ended = now
        activity.failed = failed
        self.open.discard(activity)
        if activity.kind == "compile" and not activity.beside:
            self._compiling -= 1
        if not self.open and not self._in_flight:
            self.quiet_since = now
        event = self.event
        if event is None:
            self._settle(now)
        elif activity.kind == "step" and event.is_ended_by(activity):
            self.returned.difference_update(activity.slices)
            self._close(now, "recovered", now, activity)
        elif event.kind == "loss" and self.ledger.bucket == goodput.SLICE_DOWN:
            since = event.rebuilt_since
            if since is not None:
                self.ledger.switch_since(goodput.REINITIALIZATION, since, now)

    def waited(self, activity: Activity, now: float, *, failed: bool, for_all: bool) -> None:
        """A wait of the client ends; `for_all`: for the latest execution, so nothing runs now."""
        self.usual_wait_s += _SHARE * (now - activity.began - self.usual_wait_s)
        if for_all and not failed:
            self._in_flight = False
        self.end(activity, now, failed=failed)

    def client_in(self, loader: bool, now: float) -> None:
        """Where the client is, that asks for nothing: in a data loader, or elsewhere."""
        self.in_loader = loader
        if loader and self.quiet_since is not None and self.ledger.bucket == goodput.OTHER:
            self.ledger.switch_since(goodput.DATA, self.quiet_since, now)

    # --- what is known ---

    def status(self, now: float) -> dict[str, Any]:
        """All of it, as JSON values; when the clients have gone, up to that moment."""
        now = self._left_at or now
        elapsed = self.ledger.elapsed(now)
        buckets = self.ledger.totals(now)
        reports = [*self.reports]
        if self.event is not None:
            reports.append(self._report(self.event, now, ""))
        main = self.steps.main
        return {
            "elapsed_s": elapsed,
            "goodput": buckets[goodput.PRODUCTIVE] / elapsed if elapsed else 0.0,
            "buckets": buckets,
            "program": None if main is None else main.name,
            "steps": self.steps.taken,
            "steps_lost": self.steps.lost,
            "step": self.steps.told,
            "event_counts": dict(self._counts),
            "events": [report.to_json() for report in reports],
        }

    # --- inside ---

    def _scale_up(self, since: float, now: float) -> None:
        first, *others = sorted(self.returned)
        self.event = ElasticEvent("scale-up", first, "", since, since, self.open)
        self.event.slices += others
        self.ledger.switch_since(goodput.SCALE_UP, since, now)

    def _report(self, event: ElasticEvent, end: float, ended: str) -> Report:
        return event.report(self._events + 1, self._began, end, ended)

    def _close(self, end: float, ended: str, now: float, ending: Activity | None = None) -> None:
        event, self.event = self.event, None
        if event is None or not self._running:
            return  # Nothing has been trained yet that could go on.
        if ended == "client gone" and (event.kind == "scale-up" or not event.noticed):
            self.ledger.switch_since(goodput.OTHER, event.touched, now)
            return  # The client had done what it wanted.
        report = self._report(event, end, ended)
        self._events += 1
        self._counts[event.kind] += 1
        if event.kind == "loss":
            self._lost_to.update(zip(event.slices, event.causes, strict=True))
        if ended == "recovered":
            report = self._with_lost_steps(report, event, ending, now)
            self._lost_to.clear()
            if event.kind == "scale-up":
                self.returned.difference_update(event.slices)
        self.reports.append(report)
        del self.reports[:-_REPORTS]
        self._settle(now)
        self._on_report(report)

    def _with_lost_steps(
        self, report: Report, event: ElasticEvent, ending: Activity | None, now: float
    ) -> Report:
        if ending is None:  # The step has got another name, and the client tells where it is.
            at = Resumed(None, event.resumed if self.steps.tells else None, event.loaded)
        else:
            at = Resumed(ending.number, ending.step, event.loaded)
        lost, lost_s = self.steps.resume(at, self.ledger.spent(goodput.PRODUCTIVE, now))
        if lost is None:
            return report
        self.ledger.move(goodput.PRODUCTIVE, goodput.WASTED, lost_s)
        slices = tuple(self._lost_to) or report.slices
        lost = replace(lost, slices=slices, causes=tuple(self._lost_to.values()))
        return replace(report, lost=lost, lost_s=lost_s)

    def _compile_beside(self) -> None:
        """The training goes on, so what is being compiled is for later."""
        self._compiling = 0
        for activity in self.open:
            activity.beside = activity.beside or activity.kind == "compile"

    def _settle(self, now: float) -> None:
        if self.event is None:
            self.ledger.switch(self._bucket(), now)

    def _bucket(self) -> str:
        if not self._running:
            return self._bucket_before()
        if self._compiling:
            return goodput.STARTUP
        if self._in_flight:
            return goodput.PRODUCTIVE
        kinds = {activity.kind for activity in self.open}
        if "load" in kinds:
            return goodput.RESTORE
        if "snapshot" in kinds:
            return goodput.SAVE
        if self._phase_name == _DATA or self.in_loader:
            return goodput.DATA
        return goodput.OTHER

    def _bucket_before(self) -> str:
        """Where time goes before the first step."""
        if self._interrupted:
            return goodput.RESTART
        if not self._up:
            return goodput.INITIALIZATION
        if self._compiling or self._in_flight:
            return goodput.STARTUP
        return goodput.PREPARATION
