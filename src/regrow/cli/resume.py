"""`regrow resume`: suspended slices come back."""

from __future__ import annotations

import click

from regrow.cli.job_suspend import Job, find, resume_job
from regrow.cli.options import cluster_choice
from regrow.cli.report import count, goes_on, say
from regrow.cluster import SUSPEND_DEADLINE_S
from regrow.control import request
from regrow.home import Home


@click.command("resume")
@click.option(
    "--slice", "slices", type=click.IntRange(min=0), multiple=True, help="Which; may be repeated."
)
@click.option(
    "--hosts-per-slice",
    type=click.IntRange(min=1),
    metavar="N",
    help="With how many host processes each; another number is for all slices.  [default: as before]",
)
@cluster_choice
def command(slices: tuple[int, ...], hosts_per_slice: int | None, name: str | None) -> None:
    """Bring suspended slices back, by default all.

    Returns when their state is there again. Clients go on once no slice is suspended any longer.
    Until then `regrow suspend` takes the resumption back.
    """
    state = find(Home(), name)
    if isinstance(state, Job):
        if hosts_per_slice is not None:
            raise click.UsageError(
                f"{state.name} is a job of a shared cluster: its slices have the hosts that they are "
                "leased with"
            )
        with goes_on(f"the resumption of {state.name}", state.name):
            resume_job(state, slices)
        return
    with goes_on(f"the resumption of {state.name}", state.name):
        back = request(
            state.control_socket,
            "resume",
            timeout_s=SUSPEND_DEADLINE_S,
            slices=list(slices) or None,
            hosts_per_slice=hosts_per_slice,
        )
    say(f"{count(len(back['slices']), 'slice')} of {state.name} resumed in {back['took_s']:.2f} s")
