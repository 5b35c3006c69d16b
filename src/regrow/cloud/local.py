"""Talking to the local server beside its API: faults, capacity, status, and its end."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from typing import Any, Final

from regrow.cloud.hosts.slice_hosts import end_left
from regrow.cloud.server.admin import ADMIN_PREFIX
from regrow.cloud.server.state_dir import ServerState, StateDir
from regrow.errors import CloudApiError, Code, NoClusterError, WaitTimeout

_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.02


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
