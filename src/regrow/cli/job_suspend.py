"""`regrow suspend` and `resume` for a job of a shared cluster: its resource manager is asked.

The head could do it alone, but then the slices would stay leased to a job that has no use for them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from regrow.cli.manager_requests import ask_manager
from regrow.cli.report import say
from regrow.cluster import SUSPEND_DEADLINE_S
from regrow.config import HeadConfig
from regrow.control import request
from regrow.errors import ControlError, NoClusterError, UsageError, WaitTimeout
from regrow.home import ClusterState, Home
from regrow.jobs.service import SOCKET_NAME

_LOOK_EVERY_S: Final = 0.2


@final
@dataclass(frozen=True, slots=True)
class Job:
    """A job of a shared cluster.

    Attributes:
        name: Its name.
        manager: The socket of the manager that leases it its slices.
        head: The control socket of its head; None: it waits for slices, and has none.
    """

    name: str
    manager: str
    head: str | None


def find(home: Home, name: str | None) -> ClusterState | Job:
    """The cluster or the job of that name (see `Home.find`).

    Raises:
        UsageError: It is a shared cluster, and no job.
        NoClusterError: There is neither.
    """
    try:
        state = home.find(name)
    except NoClusterError:
        for shared in (one for one in home.clusters() if one.shared):
            if name in _jobs(shared):
                return Job(str(name), shared.control_socket, None)
        raise
    if state.shared:
        raise UsageError(
            f"cluster {state.name} is shared: its jobs are suspended and resumed one by one, "
            f"by --cluster JOB; there is: {', '.join(_jobs(state)) or 'none now'}"
        )
    machines = HeadConfig.load(f"{state.dir}/config.json").machines_socket
    if machines is None:
        return state
    return Job(state.name, str(Path(machines).with_name(SOCKET_NAME)), state.control_socket)


def _jobs(shared: ClusterState) -> list[str]:
    return [job["name"] for job in ask_manager(shared.control_socket, "status")["jobs"]]


def suspend_job(job: Job, slices: Sequence[int], url: str | None) -> None:
    """Has the manager suspend a job until it is resumed; returns when its slices are given back.

    Raises:
        UsageError: Only a part of it is meant, or another place.
        ControlError: It cannot be suspended, and goes on.
        WaitTimeout: It takes too long.
    """
    name, manager = job.name, job.manager
    if slices or url is not None:
        raise UsageError(
            f"{name} is a job of a shared cluster: all of it is suspended, to where its own "
            "--gcs_scratch_location says; say --all, without --url"
        )
    began = time.monotonic()
    ask_manager(manager, "suspend", name=name)
    while True:
        told = _told(manager, name)
        if not told["held"]:
            raise ControlError(f"job {name} is not suspended: {_why_not(manager, name)}")
        if told["phase"] in ("suspended", "queued"):
            break
        _wait(began, f"job {name}, which is {told['phase']}, to be suspended")
    say(
        f"job {name} {told['phase']} after {time.monotonic() - began:.2f} s, and has no slices until: "
        f"regrow resume --cluster {name}"
    )


def resume_job(job: Job, slices: Sequence[int]) -> None:
    """Has the manager let a job go on; returns when it has slices and its state is back.

    Raises:
        UsageError: Only a part of it is meant.
        ControlError: It is not suspended.
        WaitTimeout: There are no slices for it in time; it goes on to wait for them.
    """
    name, manager = job.name, job.manager
    if slices:
        raise UsageError(
            f"{name} is a job of a shared cluster: all of it is resumed, without --slice"
        )
    began = time.monotonic()
    told = _told(manager, name)
    if told["phase"] == "running" and not _stored(job):
        raise ControlError(f"job {name} is not suspended: running: {told['reason']}")
    ask_manager(manager, "resume", name=name)
    said = ""
    while told["phase"] != "running" or _stored(job):
        _wait(began, f"job {name} to go on ({told['phase']}: {told['reason']})")
        told = _told(manager, name)
        if told["reason"].startswith("waits") and not said:
            said = told["reason"]
            say(f"job {name} {said}")
    say(f"job {name} resumed in {time.monotonic() - began:.2f} s")


def _told(manager: str, name: str) -> dict[str, Any]:
    for job in ask_manager(manager, "status")["jobs"]:
        if job["name"] == name:
            found: dict[str, Any] = job
            return found
    raise ControlError(f"job {name} is over: the resource manager does not know it any more")


def _why_not(manager: str, name: str) -> str:
    """What became last of the wish to suspend a job."""
    changes = ask_manager(manager, "status")["changes"]
    texts = [str(one["text"]) for one in changes if one["job"] == name]
    return next((text for text in reversed(texts) if "cannot be suspended" in text), texts[-1])


def _stored(job: Job) -> bool:
    """Whether slices of the job are suspended."""
    if job.head is None:
        return False
    return bool(request(job.head, "status")["suspended"]["slices"])


def _wait(began: float, what: str) -> None:
    if time.monotonic() - began > SUSPEND_DEADLINE_S:
        raise WaitTimeout(what, SUSPEND_DEADLINE_S)
    time.sleep(_LOOK_EVERY_S)
