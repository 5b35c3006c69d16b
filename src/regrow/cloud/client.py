"""A client of the Cloud TPU API, of the local server and of the real one."""

from __future__ import annotations

import json
import logging
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, final
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry

from regrow.cloud.names import Place
from regrow.cloud.resources import ApiVersion, Node, Operation, QueuedResource
from regrow.errors import (
    CloudApiError,
    Code,
    NoClusterError,
    UnsupportedError,
    UsageError,
    WaitTimeout,
)

_SCOPE: Final = "https://www.googleapis.com/auth/cloud-platform"
_TIMEOUT_S: Final = (10.0, 60.0)
_RETRIES: Final = 5
_CONNECT_RETRIES: Final = 2
_BACKOFF_S: Final = 0.2
_FIRST_POLL_S: Final = 0.05
_LONGEST_POLL_S: Final = 5.0
Json = dict[str, Any]


def make_session(endpoint: str, token: str | None = None) -> requests.Session:
    """An HTTP session that proves who it is, and tries again what may be tried again.

    Args:
        endpoint: The server. For Google's own, Application Default Credentials are used.
        token: A bearer token for any other server.

    Raises:
        UnsupportedError: If google-auth is needed and missing, or finds no credentials.
    """
    session = _google_session() if urlsplit(endpoint).scheme == "https" else requests.Session()
    # The proxies of the environment have nothing to do with a server on this machine.
    session.trust_env = urlsplit(endpoint).scheme == "https"
    if token is not None:
        session.headers["Authorization"] = f"Bearer {token}"
    # What makes a queued resource carries a request id, so that it is done once however often it is
    # sent; a node that is made twice is refused the second time, and all else may be done twice.
    retry = Retry(
        total=_RETRIES,
        connect=_CONNECT_RETRIES,
        backoff_factor=_BACKOFF_S,
        status_forcelist=(502, 503, 504),
        allowed_methods=None,
        raise_on_status=False,
    )
    session.mount(endpoint, HTTPAdapter(max_retries=retry))
    return session


def _google_session() -> requests.Session:
    try:
        import google.auth
        from google.auth.exceptions import DefaultCredentialsError
        from google.auth.transport.requests import AuthorizedSession
    except ImportError:
        raise UnsupportedError(
            "the real Cloud TPU needs google-auth: pip install 'regrow[gcp]'"
        ) from None
    # It warns of what it then raises, or does without.
    logging.getLogger("google.auth").setLevel(logging.ERROR)
    try:
        credentials, _ = google.auth.default(scopes=[_SCOPE])
    except DefaultCredentialsError as error:
        raise UnsupportedError(f"no credentials for Google Cloud: {error}") from None
    session: requests.Session = AuthorizedSession(credentials)  # type: ignore[no-untyped-call]
    return session


def _credential_errors() -> tuple[type[Exception], ...]:
    """What google-auth raises when credentials are no longer good, if it is used."""
    module = sys.modules.get("google.auth.exceptions")
    return () if module is None else (module.GoogleAuthError,)


@final
class CloudClient:
    """Calls methods of the API.

    Every method raises CloudApiError with the server's own code and text if it refuses, and
    NoClusterError if it cannot be reached.

    Attributes:
        endpoint: The server.
        version: The version of the API.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        version: ApiVersion = "v2",
        token: str | None = None,
    ) -> None:
        """Connects when it is first used.

        Args:
            endpoint: The URL of the server; https://tpu.googleapis.com is the real one.
            version: The version of the API.
            token: A bearer token; Google's own server needs none here.

        Raises:
            UsageError: If the endpoint is no URL.
            UnsupportedError: If there are no credentials for Google's own server.
        """
        if urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).hostname:
            raise UsageError(f"{endpoint!r} is no endpoint: give a URL like http://127.0.0.1:8470")
        self.endpoint = endpoint.rstrip("/")
        self.version = version
        self._session = make_session(self.endpoint, token)

    def close(self) -> None:
        """Closes its connections."""
        self._session.close()

    def call(
        self,
        http: str,
        path: str,
        body: Json | None = None,
        params: Mapping[str, str] | None = None,
    ) -> Json:
        """Calls a method.

        Args:
            http: The HTTP method.
            path: The resource's name, and the verb behind a colon.
            body: The message.
            params: Query parameters.
        """
        url = f"{self.endpoint}/{self.version}/{path}"
        try:
            answer = self._session.request(
                http, url, params=params, json=body, timeout=_TIMEOUT_S, allow_redirects=False
            )
        except requests.RequestException as error:
            raise NoClusterError(f"{self.endpoint} does not answer: {error}") from None
        except _credential_errors() as error:
            raise UnsupportedError(f"no access to Google Cloud: {error}") from None
        return _read(answer)

    def pages(self, path: str, field: str) -> Iterator[Json]:
        """All items of a list, page after page."""
        token = ""
        while True:
            params = {"pageToken": token} if token else None
            part = self.call("GET", path, params=params)
            yield from part.get(field, [])
            token = part.get("nextPageToken", "")
            if not token:
                return

    # --- queued resources ---

    def create_queued(self, place: Place, queued_id: str, body: Json) -> Json:
        """Asks for slices; returns the operation."""
        params = {"queuedResourceId": queued_id, "requestId": str(uuid.uuid4())}
        return self.call("POST", f"{place.name}/{QueuedResource.kind}", body, params)

    def queued(self, place: Place, queued_id: str) -> Json:
        """A queued resource."""
        return self.call("GET", place.child(QueuedResource.kind, queued_id))

    def list_queued(self, place: Place) -> list[Json]:
        """All queued resources of a place; the zone "-" is all zones."""
        return list(self.pages(f"{place.name}/{QueuedResource.kind}", QueuedResource.kind))

    def delete_queued(self, place: Place, queued_id: str, *, force: bool = False) -> Json | None:
        """Deletes a queued resource; None if it is gone already."""
        params = {"requestId": str(uuid.uuid4())} | ({"force": "true"} if force else {})
        return self._delete(place.child(QueuedResource.kind, queued_id), params)

    def reset_queued(self, place: Place, queued_id: str) -> Json:
        """Restarts all hosts of a queued resource."""
        return self.call("POST", f"{place.child(QueuedResource.kind, queued_id)}:reset", {})

    def maintain_queued(self, place: Place, queued_id: str, node_ids: Sequence[str]) -> Json:
        """Has maintenance of nodes of a queued resource done now (v2alpha1 only)."""
        name = place.child(QueuedResource.kind, queued_id)
        nodes = [one if "/" in one else place.child(Node.kind, one) for one in node_ids]
        return self.call("POST", f"{name}:performMaintenanceQueuedResource", {"nodeNames": nodes})

    # --- nodes ---

    def create_node(self, place: Place, node_id: str, body: Json) -> Json:
        """Makes a node; returns the operation."""
        return self.call("POST", f"{place.name}/{Node.kind}", body, {"nodeId": node_id})

    def node(self, place: Place, node_id: str) -> Json:
        """A node."""
        return self.call("GET", place.child(Node.kind, node_id))

    def list_nodes(self, place: Place) -> list[Json]:
        """All nodes of a place; the zone "-" is all zones."""
        return list(self.pages(f"{place.name}/{Node.kind}", Node.kind))

    def delete_node(self, place: Place, node_id: str) -> Json | None:
        """Deletes a node; None if it is gone already."""
        return self._delete(place.child(Node.kind, node_id), {})

    def patch_node(self, place: Place, node_id: str, fields: Json) -> Json:
        """Replaces fields of a node."""
        params = {"updateMask": ",".join(fields)}
        return self.call("PATCH", place.child(Node.kind, node_id), fields, params)

    def stop_node(self, place: Place, node_id: str) -> Json:
        """Stops a node."""
        return self.call("POST", f"{place.child(Node.kind, node_id)}:stop", {})

    def start_node(self, place: Place, node_id: str) -> Json:
        """Starts a stopped node."""
        return self.call("POST", f"{place.child(Node.kind, node_id)}:start", {})

    def guest_attributes(self, place: Place, node_id: str, query: str = "") -> list[dict[str, str]]:
        """What the hosts of a node have written, by worker: "NAMESPACE/KEY" and value.

        Args:
            place: Where it is.
            node_id: Its id.
            query: A namespace, or NAMESPACE/KEY; empty: everything.
        """
        name = place.child(Node.kind, node_id)
        answer = self.call("POST", f"{name}:getGuestAttributes", {"queryPath": query})
        return [
            {
                f"{item['namespace']}/{item['key']}": str(item.get("value", ""))
                for item in worker.get("queryValue", {}).get("items", [])
            }
            for worker in answer.get("guestAttributes", [])
        ]

    def simulate_maintenance(self, place: Place, node_id: str, workers: Sequence[str]) -> Json:
        """Has a node meet a maintenance event (v2alpha1 only)."""
        name = place.child(Node.kind, node_id)
        return self.call("POST", f"{name}:simulateMaintenanceEvent", {"workerIds": [*workers]})

    def _delete(self, name: str, params: Mapping[str, str]) -> Json | None:
        try:
            return self.call("DELETE", name, params=params)
        except CloudApiError as error:
            # It may have vanished between two tries of the same request.
            if error.code is Code.NOT_FOUND:
                return None
            raise

    # --- operations ---

    def wait(
        self, operation: Json, timeout_s: float, *, tell: Callable[[Json], None] | None = None
    ) -> Json:
        """Waits for the end of an operation.

        Args:
            operation: It, as a method returned it.
            timeout_s: How long.
            tell: Is called with it after every look.

        Returns:
            Its response.

        Raises:
            CloudApiError: The error that it has ended with.
            WaitTimeout: If it has not ended in time; it goes on.
        """
        deadline = time.monotonic() + timeout_s
        pause_s = _FIRST_POLL_S
        while not operation.get("done"):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                verb = operation.get("metadata", {}).get("verb", "operation")
                raise WaitTimeout(f"{verb} of {_target(operation)} to end", timeout_s)
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)
            operation = self.call("GET", operation["name"])
            if tell is not None:
                tell(operation)
        if "error" in operation:
            raise api_error(operation["error"])
        response: Json = operation.get("response", {})
        return response


def _target(operation: Json) -> str:
    target: str = operation.get("metadata", {}).get("target") or operation.get(
        "name", Operation.kind
    )
    return target


def api_error(status: Json) -> CloudApiError:
    """The error that a google.rpc.Status tells of."""
    try:
        code = Code(status.get("code", 2))
    except ValueError:
        code = Code.UNKNOWN
    return CloudApiError(code, str(status.get("message", "")), status.get("details", ()))


def _read(answer: requests.Response) -> Json:
    try:
        value = answer.json()
    except (ValueError, json.JSONDecodeError):
        value = None
    if answer.ok and isinstance(value, dict):
        return value
    error = value.get("error") if isinstance(value, dict) else None
    if not isinstance(error, dict):
        text = (
            f"{answer.url} answered {answer.status_code} {answer.reason}, which is no API's answer"
        )
        raise CloudApiError(Code.UNAVAILABLE, text)
    code = Code.__members__.get(str(error.get("status")), Code.UNKNOWN)
    raise CloudApiError(code, str(error.get("message", "")), error.get("details", ()))
