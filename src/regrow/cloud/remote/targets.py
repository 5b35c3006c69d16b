"""Which hosts a command is for: `--node` and `--worker`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from regrow.cloud.client import CloudClient
from regrow.cloud.names import Place
from regrow.errors import CloudApiError, Code, UsageError

_RANGE: Final = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_SOON_READY: Final = frozenset({"CREATING", "STARTING", "RESTARTING", "REPAIRING"})


@final
@dataclass(frozen=True, slots=True)
class Host:
    """A host of a slice.

    Attributes:
        node: Id of its node.
        slice_index: Place of the node among those of its queued resource.
        worker: Its place in the node.
        address: Where it is reached from inside its network.
        external: Where it is reached from outside; empty if it is not.
    """

    node: str
    slice_index: int
    worker: int
    address: str
    external: str = ""

    @property
    def label(self) -> str:
        """How lines of it are marked."""
        return f"slice {self.slice_index} worker {self.worker}"


def chosen(flag: str, text: str, number: int) -> list[int]:
    """The indices that a flag chooses: "all", or "0", "1,4,6", "1-3" and lists of these.

    Args:
        flag: Its name, for messages.
        text: Its value.
        number: How many there are.

    Raises:
        UsageError: If it is none of that, or chooses one that is not there.
    """
    if text == "all":
        return list(range(number))
    indices: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if low > high:
            raise UsageError(f"{flag}={text}: give all, or indices like 0, 1,4,6 or 1-3")
        if high >= number:
            raise UsageError(f"{flag}={text}: {high} is not in [0, {number - 1}]")
        indices.update(range(low, high + 1))
    return sorted(indices)


def hosts_of_queued(
    client: CloudClient, place: Place, queued_id: str, nodes: str, workers: str
) -> list[Host]:
    """The chosen hosts of the chosen nodes of a queued resource.

    Raises:
        UsageError: If an index is out of range.
        CloudApiError: If there is no such queued resource, or a node of it cannot be reached.
    """
    queued = client.queued(place, queued_id)
    ids = [str(spec.get("nodeId", "")) for spec in queued.get("tpu", {}).get("nodeSpec", [])]
    hosts: list[Host] = []
    for index in chosen("--node", nodes, len(ids)):
        try:
            node = client.node(place, ids[index])
        except CloudApiError as error:
            if error.code is not Code.NOT_FOUND:
                raise
            state = queued.get("state", {}).get("state")
            raise CloudApiError(
                Code.FAILED_PRECONDITION, f"{queued_id} is {state} and has no node {ids[index]}"
            ) from None
        hosts += hosts_of_node(node, ids[index], index, workers)
    return hosts


def hosts_of_node(node: dict[str, Any], node_id: str, index: int, workers: str) -> list[Host]:
    """The chosen hosts of a node.

    Raises:
        UsageError: If an index is out of range.
        CloudApiError: FAILED_PRECONDITION, if the node has no hosts that run.
    """
    state = str(node.get("state", "STATE_UNSPECIFIED"))
    if state != "READY":
        hint = "try again soon" if state in _SOON_READY else "it has no hosts that run"
        raise CloudApiError(Code.FAILED_PRECONDITION, f"node {node_id} is {state}: {hint}")
    endpoints: Sequence[dict[str, Any]] = node.get("networkEndpoints", [])
    return [
        Host(
            node_id,
            index,
            worker,
            str(endpoints[worker].get("ipAddress", "")),
            str(endpoints[worker].get("accessConfig", {}).get("externalIp", "")),
        )
        for worker in chosen("--worker", workers, len(endpoints))
    ]
