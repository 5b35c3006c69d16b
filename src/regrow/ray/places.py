"""Whether and where a Ray cluster has a place for a slice: decided from its list of nodes; no I/O."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

SLICE_LABEL: Final = "ray.io/tpu-slice-name"
"""Ray's label of nodes that are hosts of one TPU slice."""
WORKER_LABEL: Final = "ray.io/tpu-worker-id"
"""Ray's label of a host's place in its TPU slice."""

Nodes = Sequence[Mapping[str, Any]]


def describe(resources: Mapping[str, float], hosts: int) -> str:
    """Tells what a slice needs."""
    each = json.dumps(dict(resources))
    return f"a node with {each}" if hosts == 1 else f"{hosts} nodes with {each} each"


def shortage(
    resources: Mapping[str, float], total: Mapping[str, float], free: Mapping[str, float]
) -> str:
    """Tells what a cluster has, and what others leave, of what a slice needs.

    Args:
        resources: What each host needs.
        total: What all nodes have together.
        free: What of that nobody uses.
    """
    has, left = ({name: _whole(of.get(name, 0)) for name in resources} for of in (total, free))
    return f"the Ray cluster has {json.dumps(has)}, of which {json.dumps(left)} is free"


def _whole(number: float) -> float:
    return int(number) if number == int(number) else round(number, 4)


def _fits(node: Mapping[str, Any], resources: Mapping[str, float]) -> bool:
    has = node.get("Resources", {})
    return bool(node.get("Alive")) and all(
        has.get(name, 0) >= number for name, number in resources.items()
    )


def lacking(nodes: Nodes, resources: Mapping[str, float], hosts: int, strategy: str) -> str:
    """Why the nodes will never have a place for a slice, even if nobody used them; empty if they do.

    Args:
        nodes: As `ray.nodes()` lists them.
        resources: What each host needs.
        hosts: How many there are.
        strategy: Of the placement group.
    """
    fitting = sum(_fits(node, resources) for node in nodes)
    wanted = hosts if strategy == "STRICT_SPREAD" else 1
    if fitting >= wanted:
        return ""
    alive = [node for node in nodes if node.get("Alive")]
    names = Counter(
        name
        for node in alive
        for name in node.get("Resources", {})
        if not name.startswith(("node:", "memory", "object_store", "bundle"))
        and "_group_" not in name
    )
    offered = ", ".join(sorted(names)) or "nothing"
    return (
        f"a slice needs {describe(resources, hosts)}, but only {fitting} of the {len(alive)} nodes of "
        f"the Ray cluster could serve; the nodes offer {offered}"
    )


def slice_names(nodes: Nodes, resources: Mapping[str, float], hosts: int) -> list[str]:
    """The TPU slices, by Ray's labels, that have enough fitting hosts; sorted."""
    counted = Counter(
        str(node["Labels"][SLICE_LABEL])
        for node in nodes
        if _fits(node, resources) and node.get("Labels", {}).get(SLICE_LABEL)
    )
    return sorted(name for name, number in counted.items() if number >= hosts)


def selectors(nodes: Nodes, name: str, hosts: int) -> list[dict[str, str]]:
    """The labels of the node that each host of a slice is to be on.

    Args:
        nodes: As `ray.nodes()` lists them.
        name: The TPU slice.
        hosts: How many of its hosts are used.
    """
    workers = {
        str(node["Labels"].get(WORKER_LABEL))
        for node in nodes
        if node.get("Alive") and node.get("Labels", {}).get(SLICE_LABEL) == name
    }
    # Neighbours in the slice are to be neighbours in ours; where Ray tells no places, any order does.
    in_order = all(str(host) in workers for host in range(hosts))
    order = ({WORKER_LABEL: str(host)} if in_order else {} for host in range(hosts))
    return [{SLICE_LABEL: name} | one for one in order]
