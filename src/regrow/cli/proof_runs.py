"""The runs of `regrow prove`: one script, each time on a cluster of its own."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM
from typing import Final, Literal, TypeAlias, final

from regrow.chaos.committed import Committed
from regrow.chaos.printed import steps_in
from regrow.chaos.schedule import FaultEvent
from regrow.cli.arguments import Task
from regrow.cli.report import say
from regrow.cli.runner import Runner
from regrow.cli.tee import Tee
from regrow.client.settings import head_deadline_from
from regrow.config import ClusterOptions
from regrow.elastic.journal import HASH_EVERY_VARIABLE, JOURNAL_VARIABLE, read_journal
from regrow.elastic.planned import PLAN_VARIABLE, Plan
from regrow.errors import RegrowError, UsageError
from regrow.home import Home
from regrow.processes import RUN_MARK, telling_line
from regrow.start import client_environ, start_cluster

RunName: TypeAlias = Literal["faulted", "reference", "undisturbed"]
PLACE: Final = "{run}"
"""In the arguments of a script: the name of the run, so that runs do not share files."""

# Whoever sends these to us, through us sends them to the script.
_INTERRUPTED: Final = [128 + signum for signum in (SIGINT, SIGTERM, SIGHUP, SIGQUIT)]
_LONGEST: Final = 3.0
_LEAST_LIMIT_S: Final = 60.0
_DESCRIPTIONS: Final[Mapping[RunName, str]] = {
    "faulted": "with faults",
    "reference": "on the same slices, without faults",
    "undisturbed": "on all slices, without faults",
}


class ScriptFailed(RegrowError):
    """The script of a proof ended with an error."""


@final
@dataclass(frozen=True, slots=True)
class Done:
    """A run that has ended well.

    Attributes:
        committed: Its steps that count.
        happened: The faults that were made.
        disturbed: Whether one of them was before the last step.
        lost: The slices that were lost, by which fault whatever.
    """

    committed: Committed
    happened: tuple[FaultEvent, ...]
    disturbed: bool
    lost: tuple[int, ...]


@final
class ProofRuns:
    """Runs a script for a proof."""

    def __init__(
        self,
        task: Task,
        options: ClusterOptions,
        directory: Path,
        *,
        name: str | None,
        start_timeout_s: float,
        limit_s: float | None,
        quiet: bool,
        losses: re.Pattern[str],
        hash_every: int = 1,
    ) -> None:
        """Readies it.

        Args:
            task: What is run.
            options: What each cluster is like.
            directory: For journals and outputs.
            name: Of the clusters; None: one is made up.
            start_timeout_s: How long a cluster may take to be up, in seconds.
            limit_s: How long a run may take, in seconds; None: those without faults some times as
                long as the one with.
            quiet: Whether standard output is left free of what the script prints.
            losses: How a script that records nothing prints a step and its loss.
            hash_every: The state is hashed at steps that are multiples of this.
        """
        self._task = task
        self._options = options
        self._directory = directory
        self._name = name
        self._start_timeout_s = start_timeout_s
        self._limit_s = limit_s
        self._quiet = quiet
        self._losses = losses
        self._hash_every = hash_every

    def run(
        self, name: RunName, *, faults: Sequence[FaultEvent] = (), plan: Plan | None = None
    ) -> Done:
        """Runs it once, to its end.

        The output of runs without faults goes to a file.

        Args:
            name: Which run it is.
            faults: What is to happen in it.
            plan: The slices that it is to use; None: all.

        Raises:
            ScriptFailed: It ended with another exit status than 0, or took too long.
            UsageError: It recorded nothing.
        """
        say(f"prove: the run {_DESCRIPTIONS[name]}")
        journal = self._directory / f"{name}.jsonl"
        journal.unlink(missing_ok=True)
        began_at, limit_s = time.monotonic(), self._limit_s
        runner, status, printed = self._run(name, faults, self._variables(journal, plan))
        if runner.out_of_time:
            raise ScriptFailed(self._failure(name, f"took longer than {limit_s:g} s"))
        if status in _INTERRUPTED:
            sys.exit(status)
        if status != 0:
            raise ScriptFailed(self._failure(name, f"exit status {status}"))
        if limit_s is None:
            self._limit_s = round(_LONGEST * (time.monotonic() - began_at) + _LEAST_LIMIT_S)
        committed = Committed.of(read_journal(journal) or steps_in(printed, self._losses))
        if not committed.steps:
            raise UsageError(
                f"{self._task} recorded no step, and printed none with its loss, so there is nothing "
                "to compare: call regrow.elastic.record(step, loss, state, ids) after each step, or "
                "say by --losses how they are printed"
            )
        at = runner.disturbed_at
        disturbed = at is not None and at < committed.steps[-1].at
        return Done(committed, tuple(runner.happened), disturbed, tuple(runner.lost))

    def _variables(self, journal: Path, plan: Plan | None) -> dict[str, str]:
        planned = {} if plan is None else {PLAN_VARIABLE: plan.to_json()}
        recorded = {JOURNAL_VARIABLE: str(journal), HASH_EVERY_VARIABLE: str(self._hash_every)}
        return recorded | planned

    def _run(
        self, name: RunName, faults: Sequence[FaultEvent], variables: dict[str, str]
    ) -> tuple[Runner, int, list[tuple[float, str]]]:
        home = Home()
        arguments = tuple(word.replace(PLACE, name) for word in self._task.arguments)
        argv = replace(self._task, arguments=arguments).argv()
        purpose = f"regrow prove {self._task}"
        with (
            start_cluster(
                self._options, home=home, name=self._name, stem="prove", purpose=purpose
            ) as supervisor,
            self._output_path(name).open("wb") as output,
            contextlib.ExitStack() as tees,
        ):
            supervisor.wait_healthy(self._start_timeout_s, tell=say)
            environ = os.environ | client_environ(supervisor.state, home) | variables
            environ[RUN_MARK] = supervisor.state.run_id
            environ.setdefault("PYTHONUNBUFFERED", "1")  # It writes to a pipe.
            own = self._own_outputs() if name == "faulted" else ()
            both = tuple(tees.enter_context(Tee(to)) for to in own)
            runner = Runner(
                supervisor,
                faults,
                output=(both[0].fd, both[1].fd) if both else (output.fileno(), output.fileno()),
                tees=both,
                limit_s=self._limit_s,
                head_deadline_s=head_deadline_from(os.environ),
            )
            status = runner.run(argv, environ)
            tees.close()
        return runner, status, [line for tee in both for line in tee.lines] or self._lines(name)

    def _own_outputs(self) -> tuple[int, int]:
        error = sys.stderr.fileno()
        return error if self._quiet else sys.stdout.fileno(), error

    def _lines(self, name: RunName) -> list[tuple[float, str]]:
        text = self._output_path(name).read_text(errors="replace")
        return [(0.0, line) for line in text.splitlines()]

    def _output_path(self, name: RunName) -> Path:
        return self._directory / f"{name}.log"

    def _failure(self, name: RunName, how: str) -> str:
        text = f"the script failed in the run {_DESCRIPTIONS[name]}: {how}"
        line = telling_line(self._output_path(name))
        return f"{text}: {line}" if line else text
