"""`regrow prove`: whether a run with faults equals one without."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click

from regrow.chaos.ability import check_possible
from regrow.chaos.committed import Committed, schedule_of
from regrow.chaos.printed import DEFAULT, pattern_of
from regrow.chaos.schedule import FaultEvent, parse_schedule
from regrow.chaos.verdict import (
    BIT_EQUAL,
    NOTHING,
    WITHIN,
    beside_reference,
    judge,
    unproved,
)
from regrow.cli import complain
from regrow.cli.arguments import Task, TaskCommand
from regrow.cli.options import cluster_options, seconds, to_cluster_options
from regrow.cli.proof_report import Proof, to_json, told
from regrow.cli.proof_runs import Done, ProofRuns, ScriptFailed
from regrow.cli.signals import unwind_on_signals
from regrow.config import ClusterOptions
from regrow.elastic.planned import Plan
from regrow.errors import UsageError
from regrow.processes import adopted_reaped
from regrow.scratch import scratch

DIVERGED_STATUS: Final = 1
SCRIPT_STATUS: Final = 6


@click.command("prove", cls=TaskCommand, options_metavar="--chaos SPEC [OPTIONS]")
@click.option("--chaos", metavar="SPEC", required=True, help="The faults, as in regrow run.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict for programs.")
@click.option(
    "--skip-undisturbed",
    "skip",
    is_flag=True,
    help="Leave out the run on all slices, where the faulted one had fewer.",
)
@click.option(
    "--keep",
    metavar="DIR",
    type=click.Path(file_okay=False, resolve_path=True, path_type=Path),
    help="Keep the journals and what the runs without faults printed here.",
)
@click.option(
    "--hash-every",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="STEPS",
    help="Hash the state at steps that are multiples of this; losses and records are compared at each.",
)
@click.option(
    "--losses",
    metavar="REGEX",
    default=DEFAULT,
    help="How a script that records nothing prints a step and its loss, with groups named step and "
    "loss.  [default: as 'step 12 loss 0.5']",
)
@click.option(
    "--limit",
    "limit_s",
    type=seconds,
    metavar="SECONDS",
    help="How long a run may take.  [default: without faults three times as long as with, and 60 s]",
)
@cluster_options
def command(
    task: Task,
    chaos: str,
    as_json: bool,
    skip: bool,
    keep: Path | None,
    hash_every: int,
    losses: str,
    limit_s: float | None,
    **values: Any,
) -> int:
    """Prove that a script which loses slices computes what it computes without losing them.

    Runs the script with the faults, then without faults on the same slices in each step: every bit of
    what it records (regrow.elastic.record) must be equal. If it has used fewer slices, it is also
    run on all of them: there the losses must be equal within what the order of additions explains.
    {run} in the script's arguments is the name of the run: faulted, reference or undisturbed.

    The exit status is 0 if they are equal, 1 if they diverged or nothing is proved (no fault happened
    before the last step, say: then nothing else is run), 2 for wrong usage, 3 when a cluster could not
    start, 6 when the script failed.
    """
    options = to_cluster_options(values)
    faults = parse_schedule(chaos, options.slices)
    check_possible(faults, ray=options.ray is not None)
    task.argv()
    pattern = pattern_of(losses)
    if limit_s is not None and not limit_s > 0:
        raise UsageError(f"--limit is {limit_s:g} s; it must be more than 0")
    unwind_on_signals()
    with adopted_reaped(), _directory(keep) as directory:
        runs = ProofRuns(
            task,
            options,
            directory,
            name=values["name"],
            start_timeout_s=values["start_timeout_s"],
            limit_s=limit_s,
            quiet=as_json,
            losses=pattern,
            hash_every=hash_every,
        )
        try:
            proof = prove(runs, faults, options, skip_undisturbed=skip)
        except ScriptFailed as error:
            return complain(str(error), SCRIPT_STATUS)
    click.echo(json.dumps(to_json(proof), indent=1) if as_json else told(proof))
    return 0 if proof.verdict.outcome in (BIT_EQUAL, WITHIN) else DIVERGED_STATUS


def prove(
    runs: ProofRuns,
    faults: Sequence[FaultEvent],
    options: ClusterOptions,
    *,
    skip_undisturbed: bool,
) -> Proof:
    """Makes the runs, and judges them; one that no fault has disturbed is compared with none."""
    run = runs.run("faulted", faults=faults)
    if not run.disturbed:
        return Proof(tuple(faults), run, unproved(run.committed))
    everyone = frozenset(range(options.slices))
    plan = schedule_of(run.committed, everyone)
    reference, undisturbed = None, None
    if plan is None:
        undisturbed = runs.run("undisturbed").committed
    elif plan == Plan(everyone):
        reference = runs.run("undisturbed").committed
    else:
        reference = _reference(runs, run, plan)
        undisturbed = None if skip_undisturbed else runs.run("undisturbed").committed
    verdict = judge(
        run.committed,
        reference,
        undisturbed,
        slices=options.slices,
        faulted=_faulted(run) or everyone,
    )
    return Proof(tuple(faults), run, verdict)


def _faulted(run: Done) -> frozenset[int]:
    """The slices that faults were done to; empty: all, because the head was frozen along with one."""
    if any(fault.fault == "clockjump" for fault in run.happened):
        return frozenset()
    return frozenset(fault.slice_index for fault in run.happened) | frozenset(run.lost)


def _reference(runs: ProofRuns, run: Done, plan: Plan) -> Committed:
    """The run on the same slices. It depends on which snapshot was ready when, so there are two tries."""
    reference = runs.run("reference", plan=plan).committed
    if beside_reference(run.committed, reference).outcome == NOTHING:
        reference = runs.run("reference", plan=replace(plan, patient=True)).committed
    return reference


@contextlib.contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        try:
            keep.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--keep {keep} cannot be made: {error.strerror}") from None
        yield keep
        return
    with scratch("prove") as path:
        yield path
