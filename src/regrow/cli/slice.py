"""`regrow slice`: faults by hand."""

from __future__ import annotations

from typing import Final

import click

from regrow.cli.options import cluster_choice
from regrow.cli.report import say
from regrow.control import Method, request
from regrow.home import Home

_DEADLINE_S: Final = 30.0
_DONE: Final = {
    "kill": "is killed",
    "stop": "is stopped",
    "cont": "goes on",
    "restore": "is being restored",
}


@click.command("slice")
@click.argument("action", type=click.Choice(list(_DONE)), metavar="kill|stop|cont|restore")
@click.argument("index", type=click.IntRange(min=0), metavar="INDEX")
@cluster_choice
def command(action: Method, index: int, name: str | None) -> None:
    """Kill (SIGKILL), stop (SIGSTOP), continue (SIGCONT) or restore a slice."""
    state = Home().find(name)
    request(state.slices_socket, action, timeout_s=_DEADLINE_S, index=index)
    say(f"slice {index} of {state.name} {_DONE[action]}")
