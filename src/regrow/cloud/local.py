"""The local server as its clients meet it: found or started, asked what only it can do, ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, Final

from regrow.cloud.hosts.spec import end_left
from regrow.cloud.resources import ApiVersion
from regrow.cloud.server.state_dir import ADMIN_PREFIX, ServerState, StateDir
from regrow.errors import (
    CloudApiError,
    ClusterStartError,
    Code,
    NoClusterError,
    WaitTimeout,
)
from regrow.processes import python_argv

if TYPE_CHECKING:
    from regrow.cloud.client import CloudClient

ENDPOINT_VARIABLE: Final = "REGROW_TPU_ENDPOINT"
_START_DEADLINE_S: Final = 60.0
_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.02


def connect(endpoint: str | None = None, *, version: ApiVersion = "v2") -> CloudClient:
    """A client of a server, by default of the local one, which is started if it does not run.

    Args:
        endpoint: The URL of a server; default: REGROW_TPU_ENDPOINT, or that of the local one.
        version: The version of the API.

    Raises:
        UsageError: If the endpoint is no URL.
        ClusterError: If the local server cannot be started.
        UnsupportedError: If there are no credentials for Google's own server.
    """
    # requests takes long to import, and only clients of the API need it.
    from regrow.cloud.client import CloudClient

    endpoint = endpoint or os.environ.get(ENDPOINT_VARIABLE)
    if endpoint:
        return CloudClient(endpoint, version=version)
    state_dir = StateDir()
    server = found_or_started(state_dir)
    return CloudClient(server.endpoint, version=version, token=state_dir.token())


def found_or_started(state_dir: StateDir) -> ServerState:
    """The local server; it is started, to stay, if it does not run.

    Raises:
        ClusterStartError: If it cannot be started.
    """
    with contextlib.suppress(NoClusterError):
        return state_dir.server()
    argv = python_argv("regrow", "cloud", "up", "--detach", "--state-dir", str(state_dir.path))
    try:
        told = subprocess.run(
            argv, capture_output=True, text=True, timeout=_START_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise WaitTimeout("the local Cloud TPU to be up", _START_DEADLINE_S) from None
    try:
        # Somebody else may have started it at the same time.
        return state_dir.server()
    except NoClusterError:
        lines = told.stderr.strip().splitlines() or ["it gave no reason"]
        raise ClusterStartError(lines[-1].removeprefix("regrow: ")) from None


def ask(state_dir: StateDir, http: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Asks the local server something that the real one does not know.

    Raises:
        NoClusterError: If none runs.
        CloudApiError: If it refuses.
    """
    server = state_dir.server()
    request = urllib.request.Request(  # noqa: S310 - the scheme is that of a server of ours
        f"{server.endpoint}{ADMIN_PREFIX}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {state_dir.token()}"},
        method=http,
    )
    # No proxy that the environment names has anything to do with this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        told = json.loads(error.read())["error"]
        raise CloudApiError(Code[told["status"]], told["message"]) from None
    except OSError as error:
        raise NoClusterError(f"the local Cloud TPU does not answer: {error}") from None


def end(state_dir: StateDir, timeout_s: float) -> ServerState:
    """Ends the local server and all its hosts; what it knows is kept.

    Raises:
        NoClusterError: If none runs; hosts that a dead one has left have been ended then.
        WaitTimeout: If it has not ended in time.
    """
    try:
        server = state_dir.server()
    except NoClusterError:
        if state_dir.path.is_dir():
            with state_dir.locked():
                end_left(state_dir.path)
        raise
    os.kill(server.process.pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while server.process.alive():
        if time.monotonic() > deadline:
            raise WaitTimeout("the local Cloud TPU to end", timeout_s)
        time.sleep(_POLL_S)
    return server
