"""Jobs that outlive whoever has started them: a queued resource whose startup script runs a command.

What they are and how they stand is in their bucket; see `onhost`.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from regrow.cloud.client import CloudClient, api_error
from regrow.cloud.names import Place
from regrow.cloud.resources import QueuedState
from regrow.errors import CloudApiError, Code, NoClusterError, UnsupportedError, UsageError
from regrow.multihost import onhost
from regrow.multihost.package import Package

ENDED: Final = ("succeeded", "failed", "preempted", "lost")
"""States of a job that does not go on by itself."""

_DELETE_S: Final = 600.0
_END_OF_FILE: Final = "REGROW_END_OF_FILE"
_PACKAGES: Final = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs"}
_SCRIPT: Final = """#!/bin/bash
# Regrow's job %(run)s: runs and resumes its command at every start of this host.
export HOME="${HOME:-/root}"
mkdir -p "$HOME/.regrow-job" && cd "$HOME/.regrow-job" || exit 1
cat >host.py <<'%(end)s'
%(program)s
%(end)s
cat >job.json <<'%(end)s'
%(job)s
%(end)s
%(install)sexec python3 host.py job.json
"""
_INSTALL: Final = """export PYTHONPATH="$PWD/site:$PYTHONPATH"
until python3 -c 'import fsspec, %(package)s'; do
  python3 -m pip install --quiet --target site fsspec %(package)s || sleep 10
done
"""


@final
@dataclass(frozen=True, slots=True)
class Job:
    """What is to be run.

    Attributes:
        run: Its name, and that of its queued resource.
        bucket: The URL of a directory: file, gs, s3 or whatever fsspec knows.
        command: For bash.
        place: Where its slices are.
        endpoint: The API that makes them.
        grace_s: How long a failure may be that of a slice that is about to be repaired.
        report_s: How often its hosts write down what is new.
        keep: Whether the slices stay when it has ended.
        max_restarts: How often all is begun again because the command has failed.
    """

    run: str
    bucket: str
    command: str
    place: Place
    endpoint: str
    grace_s: float
    report_s: float
    keep: bool
    max_restarts: int = 0

    def doc(self) -> dict[str, Any]:
        """As its hosts read it."""
        return {
            "run": self.run,
            "bucket": self.bucket,
            "command": self.command,
            "project": self.place.project,
            "zone": self.place.zone,
            "endpoint": self.endpoint,
            "grace_s": self.grace_s,
            "report_s": self.report_s,
            "keep": self.keep,
            "max_restarts": self.max_restarts,
        }

    def startup_script(self) -> str:
        """The script that its hosts run at every start."""
        package = _PACKAGES.get(self.bucket.partition("://")[0])
        return _SCRIPT % {
            "run": self.run,
            "end": _END_OF_FILE,
            "program": Path(onhost.__file__).read_text(encoding="utf-8").rstrip(),
            "job": json.dumps(self.doc(), indent=1),
            "install": _INSTALL % {"package": package} if package else "",
        }


def open_store(bucket: str, run: str) -> onhost.Store:
    """The files of a job.

    Raises:
        UsageError: If the URL is of a kind that fsspec does not know.
        UnsupportedError: If the package for it is missing.
    """
    try:
        return onhost.Store(f"{absolute(bucket)}/{run}")
    except ImportError as error:
        package = _PACKAGES.get(bucket.partition("://")[0], "")
        hint = f": pip install fsspec {package}" if package else ""
        raise UnsupportedError(f"{bucket} cannot be opened: {error}{hint}") from None
    except ValueError as error:
        raise UsageError(f"--bucket={bucket}: {error}") from None


def absolute(bucket: str) -> str:
    """The URL of a bucket, the same wherever it is read: a path becomes file://PATH."""
    if "://" in bucket:
        return bucket.rstrip("/")
    return f"file://{Path(bucket).expanduser().resolve()}"


def submit(
    client: CloudClient, job: Job, package: Package, request: dict[str, Any]
) -> dict[str, Any]:
    """Uploads the code and asks for the slices.

    Args:
        client: Whom to ask.
        job: It.
        package: Its code.
        request: Its queued resource, with the startup script.

    Returns:
        The operation.

    Raises:
        UsageError: If there is a run of that name in the bucket, or it cannot be written.
        CloudApiError: If the API refuses; nothing is left in the bucket then.
    """
    store = open_store(job.bucket, job.run)
    with _reached(job.bucket):
        known = store.read("job.json")
    if known is not None:
        raise UsageError(
            f"there is a job {job.run} in {job.bucket} already; choose another --run-name, or go on "
            f"with that one: regrow multihost resume {job.run}"
        )
    doc = job.doc() | {"request": request, "created_at": time.time()}
    with package.reader() as reader, open(reader, "rb", closefd=False) as file:
        code = file.read()
    with _reached(job.bucket):
        store.write("code.tar.gz", code)
        store.write_json("job.json", doc)
    try:
        return client.create_queued(job.place, job.run, request)
    except BaseException:
        for name in ("job.json", "code.tar.gz"):
            store.remove(name)
        raise


@contextlib.contextmanager
def _reached(bucket: str) -> Iterator[None]:
    """Has what goes wrong with a bucket be one line."""
    try:
        yield
    except Exception as error:  # of whatever library the bucket needs
        text = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"--bucket={bucket} cannot be read and written: {text}") from error


def resume(client: CloudClient, store: onhost.Store, run: str) -> dict[str, Any]:
    """Asks for slices again, for a job that has failed or lost them; returns the operation.

    Raises:
        UsageError: If it has succeeded, or goes on still.
        CloudApiError: If the API refuses.
    """
    doc = job_of(store, run)
    place = Place(doc["project"], doc["zone"])
    status = look(client, place, store, run)
    if status.state not in ENDED or status.state == "succeeded":
        raise UsageError(f"the job {run} is {status.state}: there is nothing to resume")
    if status.queued is not None:
        operation = client.delete_queued(place, run, force=True)
        if operation is not None:
            client.wait(operation, _DELETE_S)
    for name in ("outcome.json", "restarts.json"):
        store.remove(name)
    for folder in ("done", "hosts"):
        for name in store.names(folder):
            store.remove(f"{folder}/{name}")
    return client.create_queued(place, run, doc["request"])


def job_of(store: onhost.Store, run: str) -> dict[str, Any]:
    """What a job is.

    Raises:
        UsageError: If there is none of that name.
    """
    doc: dict[str, Any] | None = store.read_json("job.json")
    if doc is None:
        raise UsageError(
            f"there is no job {run} in its bucket; give the --bucket that it was given"
        )
    return doc


@final
@dataclass(frozen=True, slots=True)
class JobStatus:
    """How a job stands.

    Attributes:
        state: "waiting" for slices, "starting", "running", "succeeded", "failed", "preempted" (resume it),
            "lost" (its queued resource is gone) or "unknown" (its API does not answer).
        reason: More about that.
        status: The exit status of the command that decided it; None if none did.
        queued: State of its queued resource, or "not known"; None if it is gone.
        hosts: What each host has last told, by slice and worker.
    """

    state: str
    reason: str = ""
    status: int | None = None
    queued: str | None = None
    hosts: Sequence[dict[str, Any]] = field(default_factory=list)


def look(client: CloudClient, place: Place, store: onhost.Store, run: str) -> JobStatus:
    """How a job stands.

    Raises:
        CloudApiError: If the API refuses to tell.
    """
    hosts = [store.read_json(f"hosts/{name}") for name in store.names("hosts")]
    hosts = sorted((one for one in hosts if one), key=lambda one: (one["slice"], one["worker"]))
    queued, trouble = None, ""
    try:
        queued = _queued(client, place, run)
    except (NoClusterError, CloudApiError) as error:
        if isinstance(error, CloudApiError) and error.code is not Code.UNAVAILABLE:
            raise
        trouble = str(error)
    name = None if queued is None else str(queued.get("state", {}).get("state"))
    name = "not known" if trouble else name
    # Read after the queued resource, which is deleted after it has been written.
    outcome = store.read_json("outcome.json")
    if outcome is not None:
        where = f"on {outcome['host']} with status {outcome['status']}" if outcome["host"] else ""
        return JobStatus(outcome["state"], where, outcome["status"], name, hosts)
    if trouble:
        return JobStatus("unknown", trouble, None, name, hosts)
    if queued is None:
        return JobStatus("lost", "its queued resource was deleted before its end", hosts=hosts)
    state, reason = _state_of(queued, bool(hosts))
    return JobStatus(state, reason, None, name, hosts)


def _state_of(queued: dict[str, Any], has_hosts: bool) -> tuple[str, str]:
    state = queued.get("state", {})
    match state.get("state"):
        case QueuedState.FAILED:
            return "failed", str(api_error(state.get("failedData", {}).get("error", {})))
        case QueuedState.SUSPENDED | QueuedState.SUSPENDING:
            return "preempted", f"by {state.get('stateInitiator', 'the service')}"
        case QueuedState.DELETING:
            return "lost", "its queued resource is being deleted"
        case QueuedState.ACTIVE:
            return ("running" if has_hosts else "starting"), ""
        case other:
            return ("running" if has_hosts else "waiting"), f"its queued resource is {other}"


def _queued(client: CloudClient, place: Place, run: str) -> dict[str, Any] | None:
    try:
        return client.queued(place, run)
    except CloudApiError as error:
        if error.code is Code.NOT_FOUND:
            return None
        raise


@final
class LogReader:
    """Reads what a host has printed, over all attempts, as it comes."""

    def __init__(self, store: onhost.Store, host: str) -> None:
        """Begins at the beginning.

        Args:
            store: The files of the job.
            host: slice-S-worker-W.
        """
        self._store = store
        self._folder = f"logs/{host}"
        self._name = ""
        self._seen = 0

    def more(self) -> bytes:
        """What has come since the last time."""
        told = b""
        for name in self._store.names(self._folder):
            if name < self._name:
                continue
            data = self._store.read(f"{self._folder}/{name}") or b""
            if name != self._name:
                if self._name and name[:4] != self._name[:4]:
                    told += f"--- attempt {int(name[:4])}\n".encode()
                self._name, self._seen = name, 0
            told += data[self._seen :]
            self._seen = len(data)
        return told
