"""`regrow suspend`: slices leave with their state saved."""

from __future__ import annotations

from typing import Any

import click

from regrow.cli.options import cluster_choice
from regrow.cli.report import count, say
from regrow.cluster import SUSPEND_DEADLINE_S
from regrow.control import request
from regrow.home import Home


@click.command("suspend")
@click.option(
    "--slice", "slices", type=click.IntRange(min=0), multiple=True, help="Which; may be repeated."
)
@click.option("--all", "every", is_flag=True, help="All slices.")
@click.option("--url", metavar="URL", help="Where the state goes.  [default: that of the cluster]")
@cluster_choice
def command(slices: tuple[int, ...], every: bool, url: str | None, name: str | None) -> None:
    """Have slices leave with their state saved; clients wait until `regrow resume`.

    Returns when the state is committed and the processes of the slices are gone. If it is not
    possible, everything is as it was, and the exit status is 3.
    """
    if every == bool(slices):
        raise click.UsageError("say which slices: --slice I, or --all")
    state = Home().find(name)
    saved: dict[str, Any] = request(
        state.control_socket,
        "suspend",
        timeout_s=SUSPEND_DEADLINE_S,
        slices=None if every else list(slices),
        url=url,
        why="regrow suspend",
    )
    say(
        f"{count(len(saved['slices']), 'slice')} of {state.name} suspended in {saved['took_s']:.2f} s: "
        f"{saved['bytes'] / 1e6:.1f} MB, {saved['written'] / 1e6:.1f} MB of them written; snapshot "
        f"{saved['snapshot']} at {saved['url']}"
    )
