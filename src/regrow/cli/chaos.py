"""`regrow chaos`: a script on a cluster of its own, with faults drawn by lot."""

from __future__ import annotations

import secrets
from typing import Any

import click

from regrow.chaos.draw import DRAWN, draw_schedule
from regrow.chaos.schedule import format_schedule
from regrow.cli.arguments import Task, TaskCommand
from regrow.cli.options import cluster_options, run_options, seconds, to_cluster_options
from regrow.cli.report import say
from regrow.cli.run import run_task


@click.command("chaos", cls=TaskCommand, options_metavar="[OPTIONS]")
@cluster_options
@click.option("--seed", type=int, help="Draws the same faults again.  [default: a random one]")
@click.option(
    "--faults",
    metavar="FAULT,...",
    default=",".join(DRAWN),
    help=f"Which faults.  [default: {','.join(DRAWN)}]",
)
@click.option(
    "--rate",
    "rate_per_min",
    type=float,
    default=6.0,
    show_default=True,
    metavar="PER_MINUTE",
    help="How many faults a minute on average.",
)
@click.option(
    "--duration",
    "duration_s",
    type=seconds,
    default="60",
    metavar="SECONDS",
    help="For how long after the client connected.  [default: 60]",
)
@run_options
def command(
    task: Task,
    seed: int | None,
    faults: str,
    rate_per_min: float,
    duration_s: float,
    **values: Any,
) -> int:
    """Run a script as `regrow run` does, with faults drawn by lot.

    The schedule is printed first, as a SPEC that `regrow run --chaos` takes.
    """
    seed = secrets.randbelow(1 << 31) if seed is None else seed
    slices = to_cluster_options(values).slices
    names = [name.strip() for name in faults.split(",")]
    drawn = draw_schedule(
        seed, slices, faults=names, rate_per_min=rate_per_min, duration_s=duration_s
    )

    def told() -> None:
        spec = format_schedule(drawn)
        say(f"chaos of seed {seed}: {'--chaos ' + spec if spec else 'no fault falls in this time'}")

    return run_task(task, drawn, begins=told, **values)
