"""Waiting for a queued resource, with a deadline for each part of the way."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, final

from regrow.cloud.client import CloudClient, api_error
from regrow.cloud.names import Place
from regrow.cloud.resources import QueuedState
from regrow.errors import CloudApiError, Code, RegrowError, WaitTimeout

Phase = Literal["assign", "provision", "ready", "done"]

_PHASES: Final[dict[str, Phase]] = {
    QueuedState.CREATING: "assign",
    QueuedState.ACCEPTED: "assign",
    QueuedState.WAITING_FOR_RESOURCES: "assign",
    QueuedState.PROVISIONING: "provision",
    QueuedState.ACTIVE: "ready",
}
_WORDS: Final[dict[Phase, str]] = {
    "assign": "capacity for",
    "provision": "the slices of",
    "ready": "healthy hosts of",
    "done": "",
}
_FIRST_POLL_S: Final = 0.05
_LONGEST_POLL_S: Final = 5.0


@final
@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long each part of the way may take, in seconds.

    Attributes:
        assign_s: Until there is capacity.
        provision_s: From then until the slices are there.
        ready_s: From then until every node is READY and healthy.
    """

    assign_s: float = 24 * 3600.0
    provision_s: float = 1800.0
    ready_s: float = 600.0

    def of(self, phase: Phase) -> float:
        """The deadline of a part."""
        return {
            "assign": self.assign_s,
            "provision": self.provision_s,
            "ready": self.ready_s,
            "done": 0.0,
        }[phase]


@final
@dataclass(frozen=True, slots=True)
class Progress:
    """How far a queued resource has come.

    Attributes:
        phase: The part of the way that it is on.
        state: Its state.
        ready: Nodes that are READY and healthy.
        nodes: Its nodes.
    """

    phase: Phase
    state: str
    ready: int
    nodes: int


def look(client: CloudClient, place: Place, queued_id: str) -> Progress:
    """How far it has come.

    Raises:
        CloudApiError: Why it will not become ACTIVE any more: its own error, or ABORTED.
    """
    queued = client.queued(place, queued_id)
    state: dict[str, Any] = queued.get("state", {})
    name = str(state.get("state", "STATE_UNSPECIFIED"))
    specs = queued.get("tpu", {}).get("nodeSpec", [])
    if name == QueuedState.FAILED:
        raise api_error(state.get("failedData", {}).get("error", {}))
    phase = _PHASES.get(name)
    if phase is None:
        by = f" by {state['stateInitiator']}" if "stateInitiator" in state else ""
        raise CloudApiError(
            Code.ABORTED, f"{queued_id} is {name}{by}; it will not be served again: delete it."
        )
    if phase != "ready":
        return Progress(phase, name, 0, len(specs))
    ready = sum(_is_healthy(client, place, str(spec["nodeId"])) for spec in specs)
    return Progress("done" if ready == len(specs) else "ready", name, ready, len(specs))


def _is_healthy(client: CloudClient, place: Place, node_id: str) -> bool:
    """READY is not liveness: a node may be READY and its hosts not."""
    try:
        node = client.node(place, node_id)
    except CloudApiError as error:
        if error.code is Code.NOT_FOUND:
            return False
        raise
    # A node that says nothing of its health has not been found ill.
    health = node.get("health", "HEALTH_UNSPECIFIED")
    return node.get("state") == "READY" and health in ("HEALTHY", "HEALTH_UNSPECIFIED")


def wait_ready(
    client: CloudClient,
    place: Place,
    queued_id: str,
    deadlines: Deadlines,
    *,
    tell: Callable[[Progress], None] | None = None,
) -> None:
    """Waits until a queued resource is ACTIVE and its nodes are healthy.

    Args:
        client: Whom to ask.
        place: Where it is.
        queued_id: Its id.
        deadlines: How long each part may take.
        tell: Is called whenever it has come further.

    Raises:
        CloudApiError: If it will not become ACTIVE any more.
        WaitTimeout: If a part has taken too long.
    """
    seen: Progress | None = None
    phase: Phase = "assign"
    began_at = time.monotonic()
    pause_s = _FIRST_POLL_S
    while True:
        progress = look(client, place, queued_id)
        if progress != seen:
            seen, pause_s = progress, _FIRST_POLL_S
            if tell is not None:
                tell(progress)
        if progress.phase == "done":
            return
        if progress.phase != phase:
            phase, began_at = progress.phase, time.monotonic()
        left_s = began_at + deadlines.of(phase) - time.monotonic()
        if left_s <= 0:
            raise WaitTimeout(f"{_WORDS[phase]} {queued_id}", deadlines.of(phase))
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LONGEST_POLL_S)


_SCRIPT_STATUS: Final = "startup-script/exit-status"


def wait_startup(client: CloudClient, place: Place, queued_id: str, timeout_s: float) -> None:
    """Waits until the startup script has ended on all hosts of a queued resource of a local server.

    Args:
        client: Whom to ask.
        place: Where it is.
        queued_id: Its id.
        timeout_s: How long.

    Raises:
        CloudApiError: ABORTED, if it has failed on a host; or what the API refuses.
        WaitTimeout: If it has not ended in time.
    """
    deadline = time.monotonic() + timeout_s
    specs = client.queued(place, queued_id).get("tpu", {}).get("nodeSpec", [])
    for index, spec in enumerate(specs):
        pause_s = _FIRST_POLL_S
        while True:
            told = client.guest_attributes(place, str(spec["nodeId"]), _SCRIPT_STATUS)
            statuses = [one.get(_SCRIPT_STATUS) for one in told]
            for worker, status in enumerate(statuses):
                if status not in (None, "0"):
                    raise CloudApiError(
                        Code.ABORTED,
                        f"the startup script of {queued_id} has failed with exit status {status} "
                        f"on slice {index} worker {worker}.",
                    )
            if None not in statuses:
                break
            if time.monotonic() > deadline:
                raise WaitTimeout(f"the startup script of {queued_id} to end", timeout_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)


@contextlib.contextmanager
def given_up_deleted(client: CloudClient, place: Place, queued_id: str) -> Iterator[None]:
    """Deletes a queued resource if the block fails or is interrupted.

    One that nobody waits for any more would take capacity hours later, and its name and quota
    until then.
    """
    try:
        yield
    except BaseException:
        with contextlib.suppress(RegrowError):
            client.delete_queued(place, queued_id, force=True)
        raise


DEAD: Final = frozenset({QueuedState.FAILED, QueuedState.SUSPENDED})
"""States that hold quota and will never again have slices."""


def dead(client: CloudClient, place: Place) -> list[str]:
    """Ids of the dead queued resources of a place: they hold quota until they are deleted."""
    return [
        str(one["name"]).rpartition("/")[2]
        for one in client.list_queued(place)
        if one.get("state", {}).get("state") in DEAD
    ]
