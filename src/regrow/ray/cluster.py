"""A Ray cluster as it is seen from outside: nodes, jobs and their logs, and its key-value store.

All over the head's addresses, so that this process need not be a part of the cluster.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
import os
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast, final

from regrow.errors import (
    NoClusterError,
    NoRayHeadError,
    RayError,
    RegrowError,
    UnsupportedError,
)
from regrow.ray.attempts import JobState, RankView
from regrow.ray.causes import mismatch, one_line
from regrow.ray.knock import ADDRESS_VARIABLE, checked, knock, no_head, unanswered
from regrow.ray.supervisors import end_supervisor

_OVERRIDING: Final = (ADDRESS_VARIABLE, "RAY_API_SERVER_ADDRESS")
_NAMESPACE: Final = b"regrow"
_DASHBOARD_KEYS: Final = (b"dashboard", b"dashboard")
_TIMEOUT_S: Final = (5.0, 60.0)
_KV_S: Final = 5.0
_PING_S: Final = 10.0
_LONGEST: Final = 150
# What another part of Ray says, which speaks gRPC, too.
_UNIMPLEMENTED: Final = 12
# What a head says to clients of the one that was there before.
_OTHER_HEAD: Final = "WrongClusterID"
# They tell of each upload and each connection on standard error.
_TALKATIVE: Final = (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
)
_environ_lock = threading.Lock()


def require_ray() -> str:
    """The version of Ray.

    Raises:
        UnsupportedError: If it is not installed.
    """
    try:
        # To import it takes a second, and some callers only want to know.
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedError("this needs Ray: pip install 'regrow[ray]'") from None
    return version


@final
@dataclass(frozen=True, slots=True)
class RayNode:
    """A node of the cluster that is alive.

    Attributes:
        id: Its id.
        address: Its address.
        is_head: Whether it is the head's.
        resources: What it has in all.
        labels: Its labels.
    """

    id: str
    address: str
    is_head: bool
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class RayJob:
    """A job that was submitted.

    Attributes:
        id: Its submission id.
        view: How it goes.
        metadata: What it was submitted with.
    """

    id: str
    view: RankView
    metadata: Mapping[str, str]

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self.view.state in ("PENDING", "RUNNING")


@final
class RayCluster:
    """A Ray cluster.

    Every method raises NoRayHeadError if the head does not answer in time, and RayError if it
    refuses.

    Attributes:
        address: HOST:PORT of its head (GCS).
        dashboard: URL of its dashboard, which takes jobs.
        keys: Values that live as long as the head.
        version: The version of Ray here, and there.
    """

    def __init__(self, address: str | None = None, *, dashboard: str | None = None) -> None:
        """Connects.

        Args:
            address: HOST:PORT of the head; default: RAY_ADDRESS.
            dashboard: URL of the dashboard; default: what the head says.

        Raises:
            UsageError: If there is no address, or it is none.
            NoRayHeadError: If no head answers there.
            UnsupportedError: If Ray is missing here, or is another version there.
        """
        self.version = require_ray()
        self.address = checked(address or os.environ.get(ADDRESS_VARIABLE, ""))
        self._given_dashboard = dashboard
        self.connect()

    def connect(self) -> None:
        """Connects anew: to a head that was started again, which knows nothing of the former one.

        Raises:
            NoRayHeadError: If no head answers there.
            UnsupportedError: If it is another version.
        """
        knock(self.address)
        with _told_in_one_line(self.address):
            self.keys = KeyStore(self.address)
            self.dashboard = self._given_dashboard or self._ask_dashboard()
            self._jobs = _job_client(self.dashboard)
        self._check_version()

    def ping(self) -> None:
        """Returns if the head answers; the dashboard of one that does not takes a minute to say so."""
        knock(self.address)
        self.keys.ask(*_DASHBOARD_KEYS, _PING_S)

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        """What the dashboard refuses because the head does not answer it, is that."""
        self.ping()
        try:
            with _told_in_one_line(self.address):
                yield
        except RayError as error:
            self.ping()
            raise error from None

    def _ask_dashboard(self) -> str:
        key, namespace = _DASHBOARD_KEYS
        told = self.keys.ask(key, namespace)
        if told is None:
            raise NoRayHeadError(
                f"the Ray head at {self.address} has no dashboard, which takes jobs: start it with "
                "--include-dashboard=true, as regrow ray head up does"
            )
        return f"http://{told.decode()}"

    def _check_version(self) -> None:
        there = getattr(self._jobs, "_server_ray_version", None)
        if there is not None and there != self.version:
            raise UnsupportedError(
                f"the Ray head at {self.address} is version {there}, this is {self.version}: "
                "install the same on both sides"
            )

    # --- nodes ---

    def nodes(self) -> list[RayNode]:
        """The nodes that are alive."""
        with self._asked(), _without_overrides():
            found = _alive_nodes(self.address, self.dashboard)
        return [
            RayNode(
                one.node_id,
                one.node_ip,
                bool(one.is_head_node),
                dict(one.resources_total or {}),
                dict(one.labels or {}),
            )
            for one in found
        ]

    # --- jobs ---

    def submit(
        self,
        entrypoint: str,
        *,
        job_id: str,
        resources: Mapping[str, float],
        metadata: Mapping[str, str],
        runtime_env: Mapping[str, Any] | None = None,
    ) -> str:
        """Submits a job; returns its id.

        Args:
            entrypoint: A shell command.
            job_id: The id that it is to have.
            resources: What it needs of a node.
            metadata: For whoever lists jobs.
            runtime_env: As Ray has it; files in it are uploaded.
        """
        with self._asked():
            submitted = self._jobs.submit_job(
                entrypoint=entrypoint,
                submission_id=job_id,
                runtime_env=dict(runtime_env or {}),
                metadata=dict(metadata),
                entrypoint_resources=dict(resources),
            )
        return str(submitted)

    def jobs(self) -> list[RayJob]:
        """All jobs that were submitted, also those that have ended."""
        with self._asked():
            found = self._jobs.list_jobs()
        return [_job_of(one) for one in found if one.submission_id]

    def stop(self, job_id: str) -> None:
        """Begins to stop a job; nothing happens when it has ended."""
        with self._asked():
            self._jobs.stop_job(job_id)
            if self._jobs.get_job_status(job_id) == "PENDING":
                end_supervisor(self.address, job_id)

    async def follow(self, job_id: str) -> AsyncIterator[str]:
        """What a job prints, until it ends; what its node has lost is not there any more.

        Raises:
            NoClusterError: If the connection breaks.
        """
        from aiohttp import ClientError

        try:
            async for text in self._jobs.tail_job_logs(job_id):
                yield str(text)
        except (ClientError, RuntimeError, OSError) as error:
            raise NoClusterError(f"the log of {job_id} ends: {error}") from None


@final
class KeyStore:
    """Values that live as long as the head does; for processes that need nothing else of it."""

    def __init__(self, address: str) -> None:
        """Connects.

        Raises:
            NoRayHeadError: If no head answers there.
        """
        knock(address)
        with _told_in_one_line(address):
            # Its stubs, if they are there, do not know it.
            self._gcs = importlib.import_module("ray._raylet").GcsClient(address=address)
        self._address = address

    def get(self, key: str) -> str | None:
        """A value; None if there is none.

        Raises:
            NoRayHeadError: If the head does not answer.
        """
        value = self.ask(key.encode(), _NAMESPACE)
        return None if value is None else value.decode()

    def put(self, key: str, value: str) -> None:
        """Keeps a value, in place of the last one.

        Raises:
            NoRayHeadError: If the head does not answer.
        """
        with _told_in_one_line(self._address):
            self._gcs.internal_kv_put(key.encode(), value.encode(), True, _NAMESPACE, _KV_S)

    def ask(self, key: bytes, namespace: bytes, timeout_s: float = _KV_S) -> bytes | None:
        """A value of any namespace, Ray's own included; None if there is none.

        Raises:
            NoRayHeadError: If the head does not answer.
        """
        with _told_in_one_line(self._address):
            value: bytes | None = self._gcs.internal_kv_get(key, namespace, timeout_s)
        return value


def _alive_nodes(address: str, dashboard: str) -> list[Any]:
    """The nodes that Ray takes for alive."""
    # What this imports takes long, and ranks need none of it.
    from ray.util.state import list_nodes
    from ray.util.state.exception import RayStateApiException, ServerUnavailable

    try:
        found: list[Any] = list_nodes(
            address=dashboard,
            filters=[("state", "=", "ALIVE")],
            detail=True,
            limit=10_000,
            timeout=int(_TIMEOUT_S[1]),
            # Nodes that are dead count for the limit: Ray takes it for missing ones.
            raise_on_missing_output=False,
        )
    except ServerUnavailable as error:
        raise _silence(address, str(error)) from None
    except RayStateApiException as error:
        raise _refusal(address, str(error)) from None
    return found


def _job_client(dashboard: str) -> Any:
    from ray.job_submission import JobSubmissionClient

    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)

    class Client(JobSubmissionClient):  # type: ignore[misc]
        """With a deadline for each request, of which Ray has none."""

        def _do_request(self, *arguments: Any, **options: Any) -> Any:
            options.setdefault("timeout", _TIMEOUT_S)
            return super()._do_request(*arguments, **options)

    with _without_overrides():
        return Client(dashboard)


@contextlib.contextmanager
def _without_overrides() -> Iterator[None]:
    """Ray takes these variables even where an address is given."""
    with _environ_lock:
        kept = {name: os.environ.pop(name) for name in _OVERRIDING if name in os.environ}
        try:
            yield
        finally:
            os.environ.update(kept)


@contextlib.contextmanager
def _told_in_one_line(address: str) -> Iterator[None]:
    """Turns what Ray's clients raise, of many kinds, into errors of ours."""
    import requests
    from ray.exceptions import RayError as AnyOfRay
    from ray.exceptions import RaySystemError, RpcError

    try:
        yield
    except (
        ConnectionError,
        requests.RequestException,
        RpcError,
        RaySystemError,
    ) as error:
        if getattr(error, "rpc_code", None) == _UNIMPLEMENTED:
            raise no_head(address) from None
        raise _silence(address, str(error)) from None
    except (RuntimeError, ValueError, AnyOfRay) as error:
        raise _refusal(address, str(error)) from None


def _silence(address: str, text: str) -> NoRayHeadError:
    text = one_line(text).partition(" (Caused by ")[0][:_LONGEST]
    return unanswered(address, text)


def _refusal(address: str, text: str) -> RegrowError:
    if _OTHER_HEAD in text:
        return NoRayHeadError(f"another Ray head was started at {address}")
    if differs := mismatch(text):
        return UnsupportedError(differs)
    return RayError(f"the Ray cluster at {address} refuses: {one_line(text)}")


def _job_of(details: Any) -> RayJob:
    state = cast(JobState, str(getattr(details.status, "value", details.status)))
    view = RankView(
        state, details.driver_node_id or None, details.message or "", details.driver_exit_code
    )
    return RayJob(str(details.submission_id), view, dict(details.metadata or {}))
