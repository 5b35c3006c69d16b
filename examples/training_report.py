"""What `elastic_training.py` shows: progress, elastic events, and at the end a plot and a table."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

_COLORS: Final = {"lost": "tab:red", "back": "tab:green"}
PLAIN_EVERY_S = 1.0  # between lines of progress where there is no terminal


@dataclass(frozen=True)
class Event:
    """Something that happened to the slices, on the clock of the run."""

    at_s: float
    step: int  # the last that had been taken
    text: str
    took_s: float | None = None  # since the loss, or the return, was seen
    mark: Literal["lost", "back"] | None = None  # a line in the plot, where training stands still


class TrainingReport:
    """Shows a training run while it goes on and remembers it for the end.

    The training counts its steps from 0; what a person sees counts them from 1.
    """

    def __init__(self, total_steps: int, all_slices: Set[int]) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._started = time.perf_counter()
        self._total = total_steps
        self._all = sorted(all_slices)
        self._live: frozenset[int] = frozenset()
        self._live_since: list[tuple[float, frozenset[int]]] = []
        self._losses: list[tuple[float, int, float]] = []
        self._events: list[Event] = []
        # When a change of slices was seen, while its first step has not been taken.
        self._pending_since: float | None = None
        self._next_line_s = 0.0
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("slices {task.fields[slices]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=total_steps, loss="-", slices="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def slices(self, live: Set[int]) -> None:
        """The next step runs on these slices."""
        lost = sorted(self._live - set(live))
        self._set_live(frozenset(live))
        if lost:
            self._tell(f"going on without {_named(lost)}", since=self._pending_since)

    def slice_lost(self, error: Exception) -> None:
        """A step, or what came after it, failed because a slice is down."""
        self._pending_since = self._now()
        first_sentence = str(error).partition(". ")[0]
        self._tell(f"a slice was lost: {first_sentence[:240]}", mark="lost")

    def restored(self, step: int) -> None:
        """The state is back from a snapshot; `step` is the next one."""
        self._tell(f"snapshot restored; step {step + 1} is next", since=self._pending_since)

    def slices_back(self, slices: Set[int]) -> None:
        """Slices that were lost are healthy again."""
        self._pending_since = self._now()
        self._tell(f"{_named(slices)} healthy again; the state moves to all that live", mark="back")

    def step(self, step: int, loss: float) -> None:
        """A step is done."""
        now, number = self._now(), step + 1
        self._losses.append((now, number, loss))
        self._progress.update(self._task, completed=number, loss=f"{loss:.3f}")
        if self._pending_since is not None:
            self._tell(f"first step on {_named(self._live)}", since=self._pending_since)
            self._pending_since = None
        last = number == self._total
        if not self._console.is_terminal and (last or now >= self._next_line_s):
            self._next_line_s = now + PLAIN_EVERY_S
            live = " ".join(map(str, sorted(self._live)))
            self._console.print(
                f"{now:6.1f} s  step {number:4d}/{self._total}  loss {loss:.3f}  slices {live}"
            )

    def summarize(self, out: Path) -> None:
        """Draws the run into `out` and prints its table."""
        plot = _draw(out / "training.png", self._all, self._losses, self._live_since, self._events)
        table = Table(title="Elastic training", show_header=False, title_justify="left")
        table.add_column("what", style="bold")
        table.add_column("value")
        distinct = len({step for _, step, _ in self._losses})
        last = statistics.fmean(loss for _, _, loss in self._losses[-10:])
        again = len(self._losses) - distinct
        table.add_row("steps", f"{distinct}, and {again} of them once more after a loss")
        table.add_row("wall time", f"{self._losses[-1][0]:.1f} s, {self._step_ms():.0f} ms a step")
        table.add_row(
            "loss", f"{self._losses[0][2]:.3f} at first, {last:.3f} over the last ten steps"
        )
        for event in self._events:
            took = "" if event.took_s is None else f" (+{event.took_s:.2f} s)"
            table.add_row(f"{event.at_s:.1f} s, after step {event.step}", escape(event.text) + took)
        table.add_row("plot", plot)
        table.add_row("log", str(out / "log.txt"))
        self._console.print(table)

    def _step_ms(self) -> float:
        times = [at for at, _, _ in self._losses]
        gaps = [after - before for before, after in itertools.pairwise(times)]
        return 1e3 * statistics.median(gaps) if gaps else 0.0

    def _set_live(self, live: frozenset[int]) -> None:
        self._live = live
        self._live_since.append((self._now(), live))
        marks = " ".join(
            f"[green]{i}[/]" if i in live else f"[red strike]{i}[/]" for i in self._all
        )
        self._progress.update(self._task, slices=marks)

    def _tell(
        self, text: str, since: float | None = None, mark: Literal["lost", "back"] | None = None
    ) -> None:
        now = self._now()
        step = self._losses[-1][1] if self._losses else 0
        event = Event(now, step, text, None if since is None else now - since, mark)
        self._events.append(event)
        took = "" if event.took_s is None else f" [bold]+{event.took_s:.2f} s[/]"
        self._console.print(f"{now:6.1f} s  [yellow]{escape(text)}[/]{took}")

    def _now(self) -> float:
        return time.perf_counter() - self._started


def _named(slices: Set[int] | list[int]) -> str:
    names = ", ".join(map(str, sorted(slices)))
    return f"slice {names}" if len(slices) == 1 else f"slices {names}"


def _draw(
    path: Path,
    all_slices: list[int],
    losses: list[tuple[float, int, float]],
    live_since: list[tuple[float, frozenset[int]]],
    events: list[Event],
) -> str:
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        return "none, since matplotlib is not installed (pip install 'regrow[plots]')"
    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure, (top, bottom) = pyplot.subplots(
        2, 1, sharex=True, figsize=(9, 5.5), height_ratios=(4, 1), layout="constrained"
    )
    # A line does not go on over the time in which no step was taken.
    points = [(at, loss) for at, _, loss in losses]
    points += [(event.at_s, math.nan) for event in events if event.mark]
    top.plot(*zip(*sorted(points), strict=True), linewidth=1.2, label="loss")
    top.set_ylabel("loss (nats a byte)")
    top.grid(alpha=0.3)
    end = losses[-1][0]
    ends = [at for at, _ in live_since[1:]] + [end]
    for (start, live), stop in zip(live_since, ends, strict=True):
        for index in all_slices:
            color = _COLORS["back" if index in live else "lost"]
            bottom.broken_barh([(start, stop - start)], (index - 0.4, 0.8), color=color, alpha=0.7)
    for event in events:
        if event.mark:
            for axes in (top, bottom):
                axes.axvline(event.at_s, color=_COLORS[event.mark], linestyle="--", linewidth=0.9)
    marks = [Line2D([], [], color=color, linestyle="--") for color in _COLORS.values()]
    top.legend([*top.lines[:1], *marks], ["loss", "a slice is lost", "a slice is back"])
    bars = [Patch(color=color, alpha=0.7) for color in _COLORS.values()]
    figure.legend(bars, ["lost", "takes part"], loc="outside lower right", ncols=2)
    bottom.set_yticks(all_slices, [f"slice {index}" for index in all_slices])
    bottom.invert_yaxis()
    bottom.set_xlabel("seconds")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return str(path)
