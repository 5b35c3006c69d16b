"""The metadata server of a cloud machine: tells when the machine is going to be preempted or maintained.

It is asked where GCE_METADATA_HOST names it, as Google's own libraries do. The calls hang until something
changes, so they cost nothing meanwhile. On Kubernetes the same news comes as a SIGTERM.
"""

from __future__ import annotations

import http.client
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

log = logging.getLogger(__name__)

HOST_VARIABLE: Final = "GCE_METADATA_HOST"
# What each key says while there is nothing to say.
QUIET: Final[Mapping[str, str]] = {"preempted": "FALSE", "maintenance-event": "NONE"}
_PATH: Final = "/computeMetadata/v1/instance/"
_FLAVOR: Final = {"Metadata-Flavor": "Google"}
_HANGS_S: Final = 60
_TIMEOUT_S: Final = _HANGS_S + 20
_AGAIN_S: Final = 5.0


def watch(tell: Callable[[str], None]) -> bool:
    """Has `tell` called from a thread of its own when a key says something; False: there is no server."""
    host = os.environ.get(HOST_VARIABLE)
    if not host:
        return False
    for key in QUIET:
        name = f"metadata-{key}"
        threading.Thread(target=_watch, args=(host, key, tell), name=name, daemon=True).start()
    return True


def _watch(host: str, key: str, tell: Callable[[str], None]) -> None:
    etag: str | None = None
    known: str | None = None
    while True:
        try:
            value, etag = _asked(host, key, etag)
        except (OSError, http.client.HTTPException) as error:
            log.debug("metadata server %s: %s", host, error)
            etag = None
            time.sleep(_AGAIN_S)
            continue
        # What it says already when this process begins was no reason not to start it here.
        if known is not None and value not in (known, QUIET[key]):
            tell(f"the metadata server says {key}: {value[:60]}")
        known = value


def _asked(host: str, key: str, etag: str | None) -> tuple[str, str | None]:
    """The value of a key; with an etag once it is another one."""
    path = f"{_PATH}{key}"
    if etag is not None:
        path += f"?wait_for_change=true&timeout_sec={_HANGS_S}&last_etag={etag}"
    connection = http.client.HTTPConnection(host, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", path, headers=_FLAVOR)
        response = connection.getresponse()
        value = response.read(4096).decode("utf-8", "replace").strip()
        if response.status != http.client.OK:
            raise OSError(f"status {response.status} for {key}")
        return value, response.headers.get("ETag")
    finally:
        connection.close()
