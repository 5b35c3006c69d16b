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
from regrow.errors import ControlError, ControlLostError, RegrowError, UsageError, WaitTimeout
from regrow.home import ClusterState, Home
from regrow.suspend import Snapshots, open_storage
from regrow.suspend.abandoned import job_place

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
        saved = _suspend(state, None if every else list(slices), url)
    say(
        f"{count(len(saved['slices']), 'slice')} of {state.name} suspended in {saved['took_s']:.2f} s: "
        f"{saved['bytes'] / 1e6:.1f} MB, {saved['written'] / 1e6:.1f} MB of them written; snapshot "
        f"{saved['snapshot']} at {saved['url']}"
    )


def _suspend(state: ClusterState, slices: list[int] | None, url: str | None) -> dict[str, Any]:
    """Has the head suspend slices (None: all).

    Raises:
        ControlError: It refuses, or has ended; says which state is the latest.
    """
    place = _place(state, url)
    before = _latest(place)
    try:
        saved: dict[str, Any] = request(
            state.control_socket,
            "suspend",
            timeout_s=SUSPEND_DEADLINE_S,
            slices=slices,
            url=url,
            why="regrow suspend",
        )
    except ControlLostError as error:
        raise ControlLostError(f"{str(error).rstrip('.')}; {_outcome(place, before)}") from None
    return saved


def _place(state: ClusterState, url: str | None) -> str:
    """Where the head will save to."""
    if url:
        return job_place(url, state.name, state.run_id)
    place: str = request(state.control_socket, "status")["suspended"]["place"]
    return place


def _latest(place: str) -> int | None:
    """The number of the latest snapshot there; 0: there is none, None: that cannot be told."""
    try:
        return max(Snapshots(open_storage(place)).numbers(), default=0)
    except RegrowError:
        return None


def _outcome(place: str, before: int | None) -> str:
    """Which state a head that has ended leaves."""
    latest = _latest(place)
    if latest is None or before is None:
        return f"regrow snapshot show {place} tells whether the state was saved"
    if latest > before:
        return f"the state was saved before that: snapshot {latest} at {place}"
    there = (
        f"snapshot {latest} at {place} is still the latest" if latest else "there is no snapshot"
    )
    return f"the state is not saved; {there}"


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


def _wait_for_script(control: ControlConnection, *, ends_with_script: bool) -> None:
    """Waits until a script has ended, and with it a cluster that was started for it alone.

    Raises:
        ControlError: The head has ended before.
        WaitTimeout: It does not end.
    """
    try:
        _wait_for_clients(control)
    except ControlError:
        # Between two looks a script can end, and its cluster with it.
        if not ends_with_script:
            raise
    if ends_with_script:
        with contextlib.suppress(ControlError):
            _wait_for_end(control)


def _end_job(state: ClusterState) -> None:
    """Has the script save and end, waits for that, and ends the cluster."""
    if state.shared:
        raise UsageError(f"cluster {state.name} is shared, and no job: name one with --cluster JOB")
    with ControlConnection(state.control_socket) as control:
        with goes_on("what the script was asked for, to save its state and to end,", state.name):
            control.call("suspend_job")
            say(f"{state.name}: waiting for the script to save its state and to end")
            _wait_for_script(control, ends_with_script=state.purpose.startswith("regrow run"))
        with contextlib.suppress(ControlError):
            control.call("shutdown")
    say(f"{state.name} is suspended: start the script again to go on")
