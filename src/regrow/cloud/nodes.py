"""What callers do with one node: ask whether it is there, make it, change it, delete it, and wait."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

from regrow.cloud.client import CloudClient
from regrow.cloud.names import Place
from regrow.errors import CloudApiError, Code

Json = dict[str, Any]
Tell = Callable[[Json], None]
SCRIPT_KEY: Final = "startup-script"


def found_node(client: CloudClient, place: Place, node_id: str) -> Json | None:
    """A node; None if there is none.

    Raises:
        CloudApiError: Any other error than NOT_FOUND: it does not tell whether there is one.
    """
    return _found(lambda: client.node(place, node_id))


def found_queued(client: CloudClient, place: Place, queued_id: str) -> Json | None:
    """A queued resource; None if there is none.

    Raises:
        CloudApiError: Any other error than NOT_FOUND: it does not tell whether there is one.
    """
    return _found(lambda: client.queued(place, queued_id))


def _found(ask: Callable[[], Json]) -> Json | None:
    try:
        return ask()
    except CloudApiError as error:
        if error.code is Code.NOT_FOUND:
            return None
        raise


def create_node(
    client: CloudClient,
    place: Place,
    node_id: str,
    body: Json,
    *,
    timeout_s: float,
    tell: Tell | None = None,
) -> Json:
    """Makes a node and waits until it is READY.

    Args:
        client: Whom to ask.
        place: Where it is to be.
        node_id: Its id.
        body: What it is to be like (`bodies.NodeRequest.body`).
        timeout_s: How long that may take, in seconds.
        tell: Is called with the operation after every look.

    Returns:
        The node.

    Raises:
        CloudApiError: If the API refuses, or the operation fails.
        WaitTimeout: If it takes too long; the operation goes on.
    """
    operation = client.create_node(place, node_id, body)
    with being_made(node_id):
        return client.wait(operation, timeout_s, tell=tell)


@contextlib.contextmanager
def being_made(name: str) -> Iterator[None]:
    """Tells something that is gone while it is waited for from a zone, say, that there is not.

    Raises:
        CloudApiError: ABORTED instead of NOT_FOUND.
    """
    try:
        yield
    except CloudApiError as error:
        if error.code is not Code.NOT_FOUND:
            raise
        raise CloudApiError(Code.ABORTED, f"{name} was deleted while it was made") from None


def delete_node(
    client: CloudClient,
    place: Place,
    node_id: str,
    *,
    timeout_s: float,
    tell: Tell | None = None,
) -> bool:
    """Deletes a node and waits until it is gone; False if there was none.

    Raises:
        CloudApiError: If the API refuses, or the operation fails.
        WaitTimeout: If it takes too long; the operation goes on.
    """
    operation = client.delete_node(place, node_id)
    if operation is None:
        return False
    client.wait(operation, timeout_s, tell=tell)
    return True


def update_startup_script(
    client: CloudClient, place: Place, node_id: str, script: str, *, timeout_s: float
) -> None:
    """Gives a node another startup script, which runs on its next start; other metadata stays.

    Raises:
        CloudApiError: If there is no such node, or the API refuses.
        WaitTimeout: If it takes too long.
    """
    metadata = dict(client.node(place, node_id).get("metadata", {})) | {SCRIPT_KEY: script}
    client.wait(client.patch_node(place, node_id, {"metadata": metadata}), timeout_s)


def guest_attributes(
    client: CloudClient, place: Place, node_id: str, namespace: str
) -> list[dict[str, str]]:
    """What the workers of a node have told through their metadata servers, by key, one each.

    Raises:
        CloudApiError: If there is no such node, or the API refuses.
    """
    name = f"{place.child('nodes', node_id)}:getGuestAttributes"
    answer = client.call("POST", name, {"queryPath": f"{namespace}/"})
    return [
        {item["key"]: str(item["value"]) for item in one.get("queryValue", {}).get("items", [])}
        for one in answer.get("guestAttributes", [])
    ]
