"""`regrow run`: a script on a cluster of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import click

from regrow.chaos.ability import check_possible
from regrow.chaos.schedule import FaultEvent, parse_schedule
from regrow.cli.accounts import Accounts
from regrow.cli.arguments import Task, TaskCommand
from regrow.cli.job_options import FINAL, JobOptions, job_options, take_job_options
from regrow.cli.options import cluster_options, run_options, to_cluster_options
from regrow.cli.report import healthy_line, say
from regrow.cli.runner import Runner
from regrow.cli.signals import unwind_on_signals
from regrow.client.settings import head_deadline_from
from regrow.config import ClusterOptions
from regrow.home import Home
from regrow.observe import parse_budgets
from regrow.processes import RUN_MARK, adopted_reaped
from regrow.start import client_environ, start_cluster
from regrow.suspend.storage import check_url

RESTARTS_VARIABLE: Final = "REGROW_RESTARTS"


@click.command("run", cls=TaskCommand, options_metavar="[OPTIONS]")
@cluster_options
@click.option(
    "--chaos",
    metavar="SPEC",
    help="Faults, such as kill:1@5s,stop:0@step=120,kill:2@phase=load+20ms,kill:1@recovery=1 "
    "(fault, index of a slice, when; see docs/chaos.md).",
)
@click.option(
    "--restart",
    type=click.Choice(["never", "on-failure"]),
    default="never",
    help="Run everything anew, with a new cluster, when the job has failed.  [default: never]",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=3,
    metavar="N",
    help="How often at most, with --restart.  [default: 3]",
)
@run_options
@job_options
@click.pass_context
def command(
    context: click.Context,
    /,
    task: Task,
    chaos: str | None,
    restart: str,
    max_restarts: int,
    **values: Any,
) -> int:
    """Run a script on a cluster of local slices made for it.

    The script needs no change: plain JAX in it sees the devices of all slices. When it ends, so
    does the cluster, and the exit status is the script's own; 2 for wrong usage, 3 when the cluster
    could not start or its head died, 4 when a slice was lost and --num_elastic_instances does not allow for it,
    5 when the script succeeded but an elastic event broke a --budget.

    With --restart on-failure a job that ends otherwise than with 0, 2 or 5, or by a signal to this command,
    is run anew; the faults of --chaos are for its first run. REGROW_RESTARTS tells the script how often
    it was.
    With --cluster the slices are those of a shared cluster, which may take them back: 6 then, unless
    the job is elastic or is to be restarted.
    """
    job = take_job_options(context, values, restart, max_restarts)
    slices = to_cluster_options(values).slices
    faults = () if chaos is None else parse_schedule(chaos, slices)
    if job is not None:
        return _run_as_job(job, task, faults, **values)
    restarts = 0
    while True:
        status = run_task(task, () if restarts else faults, restarts=restarts, **values)
        if restart == "never" or status in FINAL or restarts >= max_restarts:
            return status
        restarts += 1
        say(f"the job ended with status {status}: restart {restarts} of {max_restarts}")


def _run_as_job(
    job: JobOptions,
    task: Task,
    faults: Sequence[FaultEvent],
    *,
    start_timeout_s: float,
    verbose: bool,
    budget: str | None,
    timeline: Path | None,
    **values: Any,
) -> int:
    # It imports much that a cluster of one's own does not need.
    from regrow.cli.job import Work, run_job

    def options(shape: dict[str, Any], machines: str) -> ClusterOptions:
        sizes = {"devices_per_slice": shape["devices"], "hosts_per_slice": shape["hosts"]}
        leased = {
            "restore_after_s": None,
            "machines_socket": machines,
            "spare_snapshots": job.spare_snapshots,
        }
        return to_cluster_options(values | sizes | leased)

    check_possible(faults)
    scratch = values["gcs_scratch_location"]
    if scratch is not None:  # Not only when there are slices for it.
        check_url(scratch)
    work = Work(
        task=task,
        argv=task.argv(),
        faults=faults,
        accounts=Accounts(budgets=() if budget is None else parse_budgets(budget), path=timeline),
        options=options,
        start_timeout_s=start_timeout_s,
        head_deadline_s=head_deadline_from(os.environ),
        verbose=verbose,
    )
    return run_job(job, work)


def run_task(
    task: Task,
    faults: Sequence[FaultEvent],
    *,
    name: str | None,
    start_timeout_s: float,
    verbose: bool,
    budget: str | None,
    timeline: Path | None,
    begins: Callable[[], None] = lambda: None,
    restarts: int = 0,
    **values: Any,
) -> int:
    """Runs a task on a cluster of its own; returns the exit status.

    Args:
        task: What is to be run.
        faults: The faults that are to happen meanwhile.
        name: Name of the cluster.
        start_timeout_s: How long the slices may take to be up.
        verbose: Whether to say more.
        budget: How long elastic events may take.
        timeline: A file for the timeline of the run.
        begins: Called before anything is started, after everything was checked.
        restarts: How often the job was started before.
        **values: What `cluster_options` gives.
    """
    argv = task.argv()
    head_deadline_s = head_deadline_from(os.environ)
    options = to_cluster_options(values)
    check_possible(faults, ray=options.ray is not None)
    accounts = Accounts(budgets=() if budget is None else parse_budgets(budget), path=timeline)
    begins()
    unwind_on_signals()
    home = Home()
    purpose = f"regrow run {task}"
    with (
        adopted_reaped(),
        start_cluster(options, home=home, name=name, stem="run", purpose=purpose) as supervisor,
    ):
        supervisor.wait_healthy(start_timeout_s, tell=say)
        say(healthy_line(supervisor.config))
        if verbose:
            say(f"logs are in {supervisor.config.log_dir}; running: {' '.join(argv)}")
        environ = os.environ | client_environ(supervisor.state, home)
        environ |= {RUN_MARK: supervisor.state.run_id, RESTARTS_VARIABLE: str(restarts)}
        runner = Runner(
            supervisor, faults, head_deadline_s=head_deadline_s, accounts=accounts, verbose=verbose
        )
        return runner.run(argv, environ)
