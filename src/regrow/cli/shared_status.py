"""A shared cluster for people: its jobs, its slices, and what changed last and why."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, Final

from regrow.cli.report import count, duration

_CHANGES: Final = 12
_STYLES: Final = {
    "idle": "green",
    "leased": "cyan",
    "asked": "yellow",
    "fencing": "yellow",
    "failed": "red",
}


def print_shared(status: dict[str, Any]) -> None:
    """Prints it."""
    # Rich takes long to import, and only this needs it.
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"[bold]{escape(status['name'])}[/]: {escape(_headline(status))}", soft_wrap=True)
    jobs = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("job", "priority", "class", "phase", "slices", "on", "reason"):
        jobs.add_column(title, justify="right" if title == "priority" else "left")
    for job in status["jobs"]:
        jobs.add_row(*map(escape, _job_row(job)))
    if status["jobs"]:
        console.print(jobs)
    slices = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("slice", "state", "incarnation", "job", "reserved for", "reason"):
        slices.add_column(title)
    for one in status["slices"]:
        index, state, *rest = _slice_row(one)
        style = _STYLES.get(one["state"], "default")
        slices.add_row(index, f"[{style}]{state}[/]", *map(escape, rest))
    console.print(slices)
    for change in status["changes"][-_CHANGES:]:
        ago = duration(max(0.0, time.time() - change["at"]))
        console.print(f"[dim]{ago:>6} ago[/]  {escape(change_line(change))}", soft_wrap=True)


def change_line(change: dict[str, Any]) -> str:
    """A change of the resource manager's, in one line."""
    who = [f"job {change['job']}"] if change["job"] is not None else []
    who += [f"slice {change['index']}"] if change["index"] is not None else []
    return f"{', '.join(who)}: {change['text']}" if who else str(change["text"])


def _headline(status: dict[str, Any]) -> str:
    states = Counter(one["state"] for one in status["slices"])
    told = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
    slices, jobs = count(len(status["slices"]), "slice"), count(len(status["jobs"]), "job")
    return f"shared, {slices} ({told}), {count(status['spares'], 'spare')} kept, {jobs}"


def _job_row(job: dict[str, Any]) -> list[str]:
    places = (f"{rank}:{index}" for rank, index, _ in job["leases"])
    return [
        job["name"],
        str(job["priority"]),
        job["priority_class"] or "-",
        f"{job['phase']}, held" if job["held"] else job["phase"],
        f"{len(job['leases'])}/{job['wanted']}",
        " ".join(places) or "-",
        job["reason"],
    ]


def _slice_row(one: dict[str, Any]) -> list[str]:
    return [
        str(one["index"]),
        one["state"],
        str(one["incarnation"]),
        one["job"] or "-",
        one["reserved_for"] or "-",
        one["reason"],
    ]
