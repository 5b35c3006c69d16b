"""`regrow run --cluster`: a script as a job of a shared cluster.

The job is submitted to the cluster's resource manager, and waits there for its slices. Each attempt has
a head of its own, whose slices are those that were leased to the job. See docs/jobs.md.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from regrow.chaos.schedule import FaultEvent
from regrow.cli.accounts import Accounts
from regrow.cli.arguments import Task
from regrow.cli.job_options import FINAL, JobOptions
from regrow.cli.report import count, say
from regrow.cli.runner import Runner
from regrow.cli.signals import unwind_on_signals
from regrow.config import ClusterOptions
from regrow.errors import (
    ClusterError,
    ClusterStartError,
    UsageError,
    WaitTimeout,
)
from regrow.home import Home
from regrow.jobs.lease_link import LeaseLink
from regrow.jobs.machines import SOCKET_NAME as MACHINES_SOCKET
from regrow.jobs.tenant import Tenant, place_of
from regrow.processes import RUN_MARK, adopted_reaped
from regrow.start import client_environ, start_cluster
from regrow.supervise import Supervisor

PREEMPTED_STATUS: Final = 6
_LOOK_S: Final = 1.0
_VERDICT_S: Final = 60.0
_STEM: Final = "job"
_NAMES: Final = 1000


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What each attempt does.

    Attributes:
        task: What is to be run.
        argv: Its command line.
        faults: The faults that are to happen meanwhile.
        accounts: What is made of the timeline.
        options: What the head is like.
        start_timeout_s: How long the slices may take to be up.
        head_deadline_s: How long the head may be silent; None: for ever.
        verbose: Whether to say more.
    """

    task: Task
    argv: Sequence[str]
    faults: Sequence[FaultEvent]
    accounts: Accounts
    options: Callable[[dict[str, Any], str], ClusterOptions]
    start_timeout_s: float
    head_deadline_s: float | None
    verbose: bool


def run_job(options: JobOptions, work: Work) -> int:
    """Runs a job to its end; returns the exit status.

    Raises:
        UsageError: If the cluster cannot run such a job, or has no such priority class.
        NoClusterError: If there is no such cluster.
        WaitTimeout: If it was not given its slices in time.
    """
    home = Home()
    directory = _directory(home, options.cluster)
    unwind_on_signals()
    with adopted_reaped(), Tenant(directory) as tenant:
        shape = _shape(options, tenant.slices(), tenant.spares())
        _submit(home, tenant, options, shape)
        return _Job(home, directory, tenant, options, shape, work).run()


def _directory(home: Home, cluster: str) -> Path:
    place = place_of(cluster)
    if place is not None:
        return place
    state = home.find(cluster)
    if not state.shared:
        raise UsageError(
            f"cluster {cluster!r} has a head of its own, and no slices to lease; a shared one is "
            "started with: regrow up --spares N"
        )
    return Path(state.socket_dir)


def _shape(options: JobOptions, shapes: Sequence[dict[str, Any]], spares: int) -> dict[str, Any]:
    """The shape of slices that the job asks for.

    Raises:
        UsageError: If the cluster has too few such slices.
    """
    wanted = {"hosts": options.hosts, "devices": options.devices}
    fitting = [
        shape
        for shape in shapes
        if all(value is None or shape[name] == value for name, value in wanted.items())
    ]
    have = ", ".join(sorted({_shape_text(one, shapes.count(one)) for one in shapes}) or ["none"])
    if not fitting:
        asked = ", ".join(count(value, name[:-1]) for name, value in wanted.items() if value)
        raise UsageError(f"the cluster has no slices of {asked}; it has {have}")
    shape = max(fitting, key=fitting.count)
    if fitting.count(shape) < options.slices:
        raise UsageError(f"the job wants {count(options.slices, 'slice')}; the cluster has {have}")
    if fitting.count(shape) - spares < options.least:
        raise UsageError(
            f"the job needs {count(options.least, 'slice')}; the cluster has {have}, and keeps "
            f"{spares} of each shape as spares"
        )
    return shape


def _shape_text(shape: dict[str, Any], number: int) -> str:
    hosts = f" on {count(shape['hosts'], 'host')}" if shape["hosts"] > 1 else ""
    return f"{count(number, 'slice')} of {count(shape['devices'], 'device')}{hosts}"


def _submit(home: Home, tenant: Tenant, options: JobOptions, shape: dict[str, Any]) -> None:
    if options.name is not None:
        tenant.submit(options.spec(options.name, shape))
        return
    entered = {entry.name for entry in home.entries()}
    for number in range(1, _NAMES):
        name = f"{_STEM}-{number}"
        if name in entered or name in tenant.names():
            continue
        try:
            tenant.submit(options.spec(name, shape))
        except UsageError:
            # Another job can have taken the name at the same moment.
            if name not in tenant.names():
                raise
        else:
            return
    raise UsageError("there are too many jobs without a name of their own: give --name")


@final
class _Job:
    """A job that was submitted."""

    def __init__(
        self,
        home: Home,
        directory: Path,
        tenant: Tenant,
        options: JobOptions,
        shape: dict[str, Any],
        work: Work,
    ) -> None:
        self._home = home
        self._tenant = tenant
        self._options = options
        self._work = work
        self._config = work.options(shape, str(directory / MACHINES_SOCKET))
        self._started = 0
        self._link: LeaseLink | None = None
        self._said = ""

    def run(self) -> int:
        """Runs it to its end."""
        while True:
            self._await_start()
            status, cause, ended = self._attempt()
            attempt = None if ended or (status and status in FINAL) else self._lived
            self._started = self._lived
            self._tenant.ended(ok=status == 0, cause=cause, attempt=attempt)
            if self._is_over():
                return status
            self._said = ""

    @property
    def _lived(self) -> int:
        """The attempt that has just ended: the one that was started, or as which it was resumed.

        To the manager, a job that is suspended is in the attempt as which it is to be resumed.
        """
        lived = self._started if self._link is None else max(self._started, self._link.attempt)
        return lived + 1 if self._tenant.tenancy.suspended else lived

    # --- waiting ---

    def _await_start(self) -> None:
        began_at = time.monotonic()
        looked_at = 0.0
        while self._tenant.tenancy.attempt <= self._started:
            now = time.monotonic()
            if now - looked_at >= _LOOK_S:
                looked_at = now
                self._say_why()
            wait_s = self._options.wait_s
            if wait_s is not None and now - began_at > wait_s:
                slices = count(self._options.slices, "slice")
                what = f"job {self._tenant.name} to be given {slices} ({self._said})"
                raise WaitTimeout(what, wait_s)
            select.select([self._tenant], [], [], self._tenant.patience(_LOOK_S))
            for one in self._tenant.step():
                if one["kind"] == "Stop":
                    raise ClusterError(f"job {self._tenant.name} is over: {one['reason']}")
        self._started = self._tenant.tenancy.attempt

    def _say_why(self) -> None:
        """Tells what it waits for, where that is something else than before."""
        told = self._tenant.own_status()
        if told == {}:
            raise ClusterError(f"job {self._tenant.name} is over: the resource manager dropped it")
        if told and told["reason"] and told["reason"] != self._said and told["phase"] != "running":
            self._said = told["reason"]
            say(f"job {self._tenant.name} {told['phase']}: {self._said}")

    def _is_over(self) -> bool:
        """Whether the manager does not start it anew."""
        deadline = time.monotonic() + _VERDICT_S
        while time.monotonic() < deadline:
            self._tenant.step()
            told = self._tenant.own_status()
            if told is not None:
                return not told
            time.sleep(self._tenant.patience(_LOOK_S))
        raise WaitTimeout("the resource manager, to hear whether the job is over", _VERDICT_S)

    # --- one attempt ---

    def _attempt(self) -> tuple[int, str, bool]:
        """One life; its exit status, how it ended, and whether it was ended by an operator."""
        work, tenant = self._work, self._tenant
        try:
            with (
                start_cluster(
                    self._config,
                    home=self._home,
                    name=tenant.name,
                    purpose=f"regrow run {work.task}",
                ) as supervisor,
                supervisor.connect() as control,
            ):
                link = self._link = LeaseLink(tenant, control)
                control.subscribe()
                if not self._wait_up(supervisor, link):
                    return PREEMPTED_STATUS, link.stop_reason, False
                return self._run_script(supervisor, link)
        except ClusterStartError as error:
            if self._options.restart == "never":
                raise
            say(str(error))
            return 3, str(error), False

    def _run_script(self, supervisor: Supervisor, link: LeaseLink) -> tuple[int, str, bool]:
        work = self._work
        environ = os.environ | client_environ(supervisor.state, self._home)
        environ[RUN_MARK] = supervisor.state.run_id
        runner = Runner(
            supervisor,
            work.faults,
            head_deadline_s=work.head_deadline_s,
            accounts=work.accounts,
            verbose=work.verbose,
            leases=link,
        )
        status = runner.run(work.argv, environ)
        if link.stopping and status != 0:
            say(f"job {self._tenant.name} was stopped: {link.stop_reason}")
            return PREEMPTED_STATUS, f"stopped: {link.stop_reason}", False
        taken_down = supervisor.head.poll() == "exit status 0"
        cause = "taken down" if taken_down else f"exit status {status}"
        return status, "" if status == 0 else cause, taken_down

    def _wait_up(self, supervisor: Supervisor, link: LeaseLink) -> bool:
        """Waits until every slice that was leased is up; False: the attempt is to stop first.

        Raises:
            ClusterStartError: If they are not up in time, or the head ended.
        """
        deadline = time.monotonic() + self._work.start_timeout_s
        began_at = time.monotonic()
        link.begin()
        while not link.up:
            if link.stopping:
                return False
            if supervisor.head.poll() is not None:
                raise ClusterStartError(f"the head did not start{supervisor.last_words()}")
            if time.monotonic() > deadline:
                missing = ", ".join(f"slice {rank}" for rank in link.missing)
                raise ClusterStartError(
                    str(WaitTimeout(f"{missing} to be up", self._work.start_timeout_s))
                )
            ready: list[Any] = [link.control, self._tenant, supervisor.head.fd]
            select.select(ready, [], [], self._tenant.patience(_LOOK_S))
            link.step()
        say(
            f"job {self._tenant.name}: {count(len(link.ranks), 'slice')} of "
            f"{count(supervisor.config.devices_per_slice, 'device')} up in {time.monotonic() - began_at:.1f} s "
            f"({', '.join(f'{rank} is {index}' for rank, index in link.ranks.items())})"
        )
        return True
