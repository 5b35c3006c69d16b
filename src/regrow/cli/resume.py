"""`regrow resume`: suspended slices come back."""

from __future__ import annotations

import click

from regrow.cli.job_suspend import Job, find, resume_job
from regrow.cli.options import cluster_choice
from regrow.cli.report import count, say
from regrow.cluster import SUSPEND_DEADLINE_S
from regrow.control import request
from regrow.home import Home


@click.command("resume")
@click.option(
    "--slice", "slices", type=click.IntRange(min=0), multiple=True, help="Which; may be repeated."
)
@cluster_choice
def command(slices: tuple[int, ...], name: str | None) -> None:
    """Bring suspended slices back, by default all.

    Returns when their state is there again. Clients go on once no slice is suspended any longer.
    """
    state = find(Home(), name)
    if isinstance(state, Job):
        resume_job(state, slices)
        return
    back = request(
        state.control_socket,
        "resume",
        timeout_s=SUSPEND_DEADLINE_S,
        slices=list(slices) or None,
    )
    say(f"{count(len(back['slices']), 'slice')} of {state.name} resumed in {back['took_s']:.2f} s")
