"""`regrow suspend`: slices leave with their state saved."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any, Final

import click

from regrow.cli.job_suspend import Job, find, suspend_job
from regrow.cli.options import cluster_choice
from regrow.cli.report import count, goes_on, say
from regrow.cluster import SUSPEND_DEADLINE_S
from regrow.control import ControlConnection, request
from regrow.errors import ControlError, UsageError, WaitTimeout
from regrow.home import ClusterState, Home

_LOOK_EVERY_S: Final = 0.2


@click.command("suspend")
@click.option(
    "--slice", "slices", type=click.IntRange(min=0), multiple=True, help="Which; may be repeated."
)
@click.option("--all", "every", is_flag=True, help="All slices.")
@click.option(
    "--job",
    is_flag=True,
    help="The whole job: the script saves its state itself and ends (see suspend_requested).",
)
@click.option("--url", metavar="URL", help="Where the state goes.  [default: that of the cluster]")
@cluster_choice
def command(
    slices: tuple[int, ...], every: bool, job: bool, url: str | None, name: str | None
) -> None:
    """Have slices leave with their state saved; clients wait until `regrow resume`.

    Returns when the state is committed and the processes of the slices are gone. If it is not
    possible, everything is as it was, and the exit status is 3. A slice that is being resumed is
    suspended again, as it was.

    --job ends the head and the client, too. That needs a script which polls
    regrow.elastic.suspend_requested(), or which is given SIGTERM by others, and saves what it needs.
    """
    if [bool(slices), every, job].count(True) != 1 or (job and url is not None):
        raise click.UsageError("say what: --slice I, --all (both also with --url), or --job")
    if job:
        _end_job(Home().find(name))
        return
    state = find(Home(), name)
    if isinstance(state, Job):
        with goes_on(f"the suspension of {state.name}", state.name):
            suspend_job(state, slices, url)
        return
    if url and "://" not in url:
        url = str(Path(url).absolute())  # The head may have been started elsewhere.
    with goes_on(f"the suspension of {state.name}", state.name):
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


def _wait_for_clients(control: ControlConnection) -> None:
    """Waits until no client is left.

    Raises:
        ControlError: The head has ended.
        WaitTimeout: A client stays.
    """
    deadline = time.monotonic() + SUSPEND_DEADLINE_S
    while control.call("status")["clients"]:
        if time.monotonic() > deadline:
            raise WaitTimeout("the script to end", SUSPEND_DEADLINE_S)
        time.sleep(_LOOK_EVERY_S)


def _wait_for_end(control: ControlConnection) -> None:
    """Waits for a cluster that ends with its script, which may still have something to do.

    Raises:
        ControlError: It has ended.
        WaitTimeout: It has not.
    """
    deadline = time.monotonic() + SUSPEND_DEADLINE_S
    while time.monotonic() < deadline:
        control.call("suspend_requested")
        time.sleep(_LOOK_EVERY_S)
    raise WaitTimeout("the script to end", SUSPEND_DEADLINE_S)


def _end_job(state: ClusterState) -> None:
    """Has the script save and end, waits for that, and ends the cluster."""
    if state.shared:
        raise UsageError(f"cluster {state.name} is shared, and no job: name one with --cluster JOB")
    with ControlConnection(state.control_socket) as control:
        control.call("suspend_job")
        say(f"{state.name}: waiting for the script to save its state and to end")
        ends_with_script = state.purpose.startswith("regrow run")
        try:
            _wait_for_clients(control)
        except ControlError:
            # Between two looks a script can end, and its cluster with it.
            if not ends_with_script:
                raise
        with contextlib.suppress(ControlError):
            if ends_with_script:
                _wait_for_end(control)
            control.call("shutdown")
    say(f"{state.name} is suspended: start the script again to go on")
