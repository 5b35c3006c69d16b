"""`regrow multihost job`, `status`, `logs` and `resume`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from regrow.cli.report import count, say
from regrow.cli.tpu_options import at_place, duration, node_options, take_node
from regrow.cloud.bodies import QueuedRequest
from regrow.cloud.defaults import Defaults
from regrow.cloud.local import ENDPOINT_VARIABLE, connect
from regrow.cloud.names import Place
from regrow.cloud.server.state_dir import StateDir
from regrow.errors import NoClusterError, UsageError

if TYPE_CHECKING:
    from regrow.cloud.client import CloudClient
    from regrow.multihost.job import Job, JobStatus, LogReader
    from regrow.multihost.onhost import Store

_LEADER: Final = "slice-0-worker-0"
_FIRST_POLL_S: Final = 0.2
_LONGEST_POLL_S: Final = 5.0
_DELETED_WITHIN_S: Final = 600.0
_BLIND_S: Final = 900.0


@click.command("job")
@click.option("--command", "text", required=True, help="What runs on every host, by bash.")
@click.option("--num-slices", type=click.IntRange(1), required=True, metavar="N")
@click.option(
    "--bucket",
    required=True,
    metavar="URL",
    help="Where code, logs and status go: gs://…, s3://…, or a directory that all hosts see.",
)
@click.option("--run-name", metavar="RUN", help="Of the job, and of its queued resource.")
@click.option(
    "--script-dir",
    type=click.Path(path_type=Path),
    default=Path(),
    show_default="this directory",
    help="The folder that is uploaded, and in which the command runs.",
)
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave these files out.")
@click.option("--runtime-version", default="tpu-ubuntu2204-base", show_default=True)
@node_options
@click.option("--spot", is_flag=True, help="Slices that may be preempted.")
@click.option("--reserved", is_flag=True, help="Slices of a reservation.")
@click.option("--reservation", metavar="ID", help="Which.  [default: any]")
@click.option(
    "--grace",
    "grace_s",
    type=duration,
    default="120s",
    show_default=True,
    help="How long after a failure slices may turn out to be under repair, which begins all anew.",
)
@click.option(
    "--report-every",
    "report_s",
    type=duration,
    default="5s",
    show_default=True,
    help="To the bucket.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="N",
    help="Begin again so often when the command has failed, not counting repairs.",
)
@click.option("--keep", is_flag=True, help="Leave the slices when the job has ended.")
@click.option("--wait", "wait", is_flag=True, help="Show its output; exit as it does.")
@at_place
def job(
    client: CloudClient,
    place: Place,
    text: str,
    num_slices: int,
    bucket: str,
    run_name: str | None,
    script_dir: Path,
    exclude: tuple[str, ...],
    grace_s: float,
    report_s: float,
    max_restarts: int,
    keep: bool,
    wait: bool,
    **values: Any,
) -> int:
    """Run a command on slices made for it, for hours or days.

    The startup script of the slices begins it, and begins it again after every repair: the command
    has to go on from its last checkpoint. When it has ended everywhere, or failed, the slices are
    deleted; status and output stay in the bucket.
    """
    from regrow.multihost.job import Job, absolute, submit
    from regrow.multihost.known import KnownJobs
    from regrow.multihost.package import packed
    from regrow.multihost.runner import check_run_name, now_name

    if not text.strip():
        raise UsageError("--command is empty: give what is to run on every host")
    name = check_run_name(run_name or f"job-{now_name()}")
    url = absolute(bucket)
    one = Job(name, url, text, place, client.endpoint, grace_s, report_s, keep, max_restarts)
    request = _request(one, num_slices, values)
    with packed(script_dir, exclude) as package:
        submit(client, one, package, request)
    KnownJobs().remember(place, name, url)
    slices = count(num_slices, "slice")
    say(f"the job {name} waits for {slices}; code, logs and status: {url}/{name}")
    if wait:
        return _wait(client, place, name, url, keep=keep)
    say(f"see: regrow multihost status {name}; regrow multihost logs {name} --follow")
    return 0


def _request(one: Job, slices: int, values: dict[str, Any]) -> dict[str, Any]:
    from regrow.multihost.known import BUCKET_KEY

    node = take_node(values)
    if node.is_alpha:
        raise UsageError(
            "--autocheckpoint-enabled and --boot-disk need v2alpha1, which jobs do not use"
        )
    if "startup-script" in node.metadata:
        raise UsageError("--metadata: the startup-script of a job is its own")
    metadata = {**node.metadata, "startup-script": one.startup_script(), BUCKET_KEY: one.bucket}
    ids: dict[str, Any] = {"node_id": f"{one.run}-0"}
    if slices > 1:
        ids = {"node_count": slices, "node_prefix": one.run}
    request = QueuedRequest(node=dataclasses.replace(node, metadata=metadata), **ids, **values)
    return request.body(one.place)


# --- how it stands ---


class _Known:
    """A job that is found.

    Attributes:
        run: Its name.
        client: Of the API that has its slices.
        place: Where they are.
        store: Its files.
    """

    def __init__(self, run: str, client: CloudClient, place: Place, store: Store) -> None:
        self.run, self.client, self.place, self.store = run, client, place, store


def _of_job(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds RUN and what finds it; the command is given `job` for that."""

    @functools.wraps(function)
    def command(
        run: str,
        bucket: str | None,
        project: str | None,
        zone: str | None,
        endpoint: str | None,
        **values: Any,
    ) -> Any:
        with contextlib.ExitStack() as stack:
            job = _found(stack, run, bucket, project, zone, endpoint)
            return function(job=job, **values)

    options = [
        click.argument("run", metavar="RUN"),
        click.option(
            "--bucket",
            metavar="URL",
            help="Of the job.  [default: as known here, or to its slices]",
        ),
        click.option("--project", metavar="ID", help="Where its slices are."),
        click.option("--zone", metavar="ZONE"),
        click.option("--endpoint", metavar="URL", help="The API.  [default: that of the job]"),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _found(
    stack: contextlib.ExitStack,
    run: str,
    bucket: str | None,
    project: str | None,
    zone: str | None,
    endpoint: str | None,
) -> _Known:
    """A job, by its bucket or by its slices; what its bucket tells is what counts."""
    from regrow.multihost.job import job_of, open_store
    from regrow.multihost.known import KnownJobs, bucket_of_slices

    url = bucket or KnownJobs().bucket(run, project, zone)
    if url is None:
        defaults = Defaults()
        place = Place(defaults.require("project", project), defaults.require("zone", zone))
        client = stack.enter_context(contextlib.closing(connect(endpoint)))
        url = bucket_of_slices(client, place, run)
        return _Known(run, client, place, open_store(url, run))
    store = open_store(url, run)
    doc = job_of(store, run)
    client = _client(endpoint or os.environ.get(ENDPOINT_VARIABLE), doc["endpoint"])
    stack.enter_context(contextlib.closing(client))
    return _Known(run, client, Place(doc["project"], doc["zone"]), store)


def _client(given: str | None, known: str) -> CloudClient:
    """The API of a job; a local server may listen elsewhere by now, and is not started for this."""
    if not given and not known.startswith("https:"):
        with contextlib.suppress(NoClusterError):
            StateDir().server()
            return connect()
    return connect(given or known)


@click.command("status")
@_of_job
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option("--wait", "wait", is_flag=True, help="Return when it has ended.")
def status(job: _Known, as_json: bool, wait: bool) -> int:
    """Show how a job stands; the exit status is not 0 if it has failed."""
    from regrow.multihost.job import look

    one = (job.client, job.place, job.store, job.run)
    now = _until_end(*one) if wait else look(*one)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(now), indent=2))
    else:
        _print(job.run, now)
    return _exit_status(now)


def _exit_status(now: JobStatus) -> int:
    """That of the command that decided, or 1; 0 for what has succeeded or goes on."""
    if now.state in ("failed", "preempted", "lost"):
        return (now.status or 1) % 256 or 1
    return 0


def _print(run: str, now: JobStatus) -> None:
    queued = "gone" if now.queued is None else now.queued
    click.echo(f"{run}: {now.state}{f', {now.reason}' if now.reason else ''}")
    click.echo(f"queued resource: {queued}")
    if now.state == "preempted":
        click.echo(f"go on with: regrow multihost resume {run}")
    if not now.hosts:
        return
    rows = [["SLICE", "WORKER", "NODE", "STATE", "STATUS", "ATTEMPT", "HEARD"]]
    for host in now.hosts:
        ago = f"{max(0.0, time.time() - host['heard_at']):.0f} s ago"
        state = "-" if host["status"] is None else host["status"]
        cells = [host["slice"], host["worker"], host["node"], host["state"], state, host["attempt"]]
        rows.append([*map(str, cells), ago])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        click.echo("  ".join(cells).rstrip())
    missing = int(now.hosts[0]["hosts"]) - len(now.hosts)
    if missing > 0:
        say(f"nothing heard yet of {count(missing, 'host')}")


def _until_end(
    client: CloudClient,
    place: Place,
    store: Store,
    run: str,
    look_on: Callable[[], bool] = lambda: False,
) -> JobStatus:
    """Waits for the end of a job, however long it takes; tells each state.

    Args:
        client: Whom to ask.
        place: Where it is.
        store: Its files.
        run: Its name.
        look_on: Is called meanwhile; returns whether there was anything new.
    """
    from regrow.multihost.job import ENDED, look

    told, pause_s, seen_at = "", _FIRST_POLL_S, time.monotonic()
    while True:
        now = look(client, place, store, run)
        if now.state != "unknown":
            seen_at = time.monotonic()
        elif time.monotonic() > seen_at + _BLIND_S:
            # A job of days is not given up for an API that is away for minutes.
            raise NoClusterError(now.reason)
        text = f"{now.state}{f', {now.reason}' if now.reason else ''}"
        if text != told:
            say(f"[{run}] {text}")
        is_news = look_on() or text != told
        told = text
        if now.state in ENDED:
            return now
        pause_s = _FIRST_POLL_S if is_news else min(2 * pause_s, _LONGEST_POLL_S)
        time.sleep(pause_s)


def _wait(client: CloudClient, place: Place, run: str, bucket: str, *, keep: bool) -> int:
    """Shows a job's output until its end, and sees that its slices are deleted."""
    from regrow.multihost.job import LogReader, open_store

    store = open_store(bucket, run)
    reader = LogReader(store, _LEADER)
    try:
        now = _until_end(client, place, store, run, lambda: _copy(reader))
    except BaseException:
        say(f"the job goes on; see: regrow multihost status {run}")
        raise
    _copy(reader)
    # Its own hosts delete it; if they cannot, this does.
    if not keep and now.state in ("succeeded", "failed"):
        operation = client.delete_queued(place, run, force=True)
        if operation is not None:
            client.wait(operation, _DELETED_WITHIN_S)
    return _exit_status(now)


def _copy(reader: LogReader) -> bool:
    data = reader.more()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
    return bool(data)


@click.command("logs")
@_of_job
@click.option("--slice", "slice_index", type=click.IntRange(0), default=0, show_default=True)
@click.option("--worker", type=click.IntRange(0), default=0, show_default=True)
@click.option("--follow", "-f", is_flag=True, help="Go on until the job has ended.")
def logs(job: _Known, slice_index: int, worker: int, follow: bool) -> None:
    """Print what a host of a job has printed, over all attempts."""
    from regrow.multihost.job import LogReader

    host = f"slice-{slice_index}-worker-{worker}"
    reader = LogReader(job.store, host)
    known = job.store.names("logs")
    if known and host not in known:
        raise UsageError(f"{job.run} has no logs of {host}; there are: {', '.join(known)}")
    if follow:
        _until_end(job.client, job.place, job.store, job.run, lambda: _copy(reader))
    _copy(reader)


@click.command("resume")
@_of_job
def resume(job: _Known) -> None:
    """Ask for slices again for a job that was preempted, lost its slices, or failed."""
    from regrow.multihost.job import resume as resume_job

    resume_job(job.client, job.store, job.run)
    say(f"the job {job.run} waits for its slices again")


def add_job_commands(group: click.Group) -> None:
    """Adds them to a group."""
    for one in (job, status, logs, resume):
        group.add_command(one)
