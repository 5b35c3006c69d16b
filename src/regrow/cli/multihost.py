"""`regrow multihost`: one program on every host of slices."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from regrow.cli.multihost_job import add_job_commands
from regrow.cli.report import count, say
from regrow.cli.tpu_options import at_place, ended_by_sigterm
from regrow.cli.tpu_remote import let_in, shell_of, ssh_options
from regrow.cloud.names import Place
from regrow.errors import UsageError
from regrow.home import Home

if TYPE_CHECKING:
    from regrow.cli.multihost_screen import RunScreen
    from regrow.cloud.client import CloudClient
    from regrow.cloud.remote.fanout import Result
    from regrow.multihost.package import Package
    from regrow.multihost.runner import Run

_TAIL_LINES: Final = 10


@click.group("multihost")
def command() -> None:
    """One program on every host of slices: run for experiments, job for long ones."""


@command.command("run")
@click.option(
    "--prefix",
    required=True,
    metavar="NAME",
    help="A queued resource, a slice, or what the names of slices begin with (NAME-0, NAME-1, …).",
)
@click.option("--command", "text", required=True, help="What runs on every host, by bash.")
@click.option(
    "--script-dir",
    type=click.Path(path_type=Path),
    default=Path(),
    show_default="this directory",
    help="The folder that is copied to the hosts, and in which the command runs.",
)
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave these files out.")
@click.option("--run-name", metavar="RUN", help="Name of the folder there.  [default: the time]")
@click.option(
    "--use-existing-folder", is_flag=True, help="Copy nothing: the folder RUN is there already."
)
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep all output here, in RUN/TIME.  [default: multihost in REGROW_HOME]",
)
@ssh_options
@at_place
def run(
    prefix: str,
    client: CloudClient,
    place: Place,
    text: str,
    script_dir: Path,
    exclude: tuple[str, ...],
    run_name: str | None,
    use_existing_folder: bool,
    log_dir: Path | None,
    plain: bool,
    **values: Any,
) -> int:
    """Run a command on all hosts of slices that are there, for experiments.

    The folder is copied, what the last run left on the devices is ended, and the output of slice 0
    worker 0 is shown; that of all hosts is kept. The first failure ends the command everywhere, and
    is the exit status.
    """
    from contextlib import nullcontext

    from regrow.multihost.package import packed
    from regrow.multihost.runner import Run, check_run_name, now_name
    from regrow.multihost.targets import hosts_of_prefix, refuse_workers

    if use_existing_folder and run_name is None:
        raise UsageError("--use-existing-folder: give the --run-name whose folder is to be used")
    if not prefix:
        raise UsageError("--prefix is empty: give the name of a queued resource or slice")
    if not text.strip():
        raise UsageError("--command is empty: give what is to run on every host")
    name = check_run_name(run_name or now_name())
    hosts = hosts_of_prefix(client, place, prefix)
    refuse_workers(hosts)
    shell = shell_of(client, "", values)
    logs = (log_dir or Home().path / "multihost").absolute() / name / now_name()
    with nullcontext() if use_existing_folder else packed(script_dir, exclude) as package:
        if package is not None:
            _tell_package(package, script_dir)
        if not plain:
            let_in(client, place, hosts, shell)
        return _run(Run(hosts, shell, name, text, package, logs))


def _tell_package(package: Package, folder: Path) -> None:
    say(f"{folder.absolute()}: {count(package.files, 'file')}, {package.size / 1e6:.1f} MB packed")


def _run(run: Run) -> int:
    from regrow.cli.multihost_screen import RunScreen
    from regrow.cloud.remote.fanout import exit_status

    _have_enough_descriptors(len(run.hosts))
    screen = RunScreen(run.hosts[0], (sys.stdout.buffer, sys.stderr.buffer))
    with ended_by_sigterm(), screen.shown():
        results = run.prepare(screen)
        if not exit_status(results):
            results = run.execute(screen)
            say(f"logs: {run.logs}")
            screen.print_summary()
            _tell_failure(run, results)
            if exit_status(results):
                _sweep(run, screen)
    return exit_status(results)


def _sweep(run: Run, screen: RunScreen) -> None:
    left = [one.host.label for one in run.sweep(screen) if one.status]
    if left:
        say(f"it may still run on {', '.join(left)}; the next run there ends it")


def _tell_failure(run: Run, results: Sequence[Result]) -> None:
    """The end of the first failure's output, unless it has been shown."""
    from regrow.multihost.runner import log_name
    from regrow.processes import tail

    failed = next((one for one in results if one.status and not one.stopped), None)
    if failed is None or failed.host == run.hosts[0]:
        return
    path = run.logs / log_name(failed.host)
    if path.exists():
        for line in tail(path, lines=_TAIL_LINES):
            say(f"[{failed.host.label}] {line}")


def _have_enough_descriptors(hosts: int) -> None:
    """Each host takes some; the usual limit of 1024 is meant for other programs."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 256 + 8 * hosts
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


add_job_commands(command)
