"""What the local server can do that the real one cannot: faults on command, capacity, its status."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

from regrow.cloud.resources import Node
from regrow.cloud.server.engine import Engine
from regrow.cloud.server.render import Renderer
from regrow.cloud.server.state_dir import ADMIN_PREFIX
from regrow.errors import CloudApiError, Code, UsageError

_Handler = Callable[[Engine, Renderer, dict[str, Any]], Any]


def _status(engine: Engine, renderer: Renderer, _: dict[str, Any]) -> Any:
    plane = engine.plane
    tables, capacity = plane.tables, plane.capacity
    taken: Counter[str] = Counter()
    for pool, chips in capacity.taken().items():
        taken[f"{pool.zone}/{pool.reservation or pool.generation}"] += chips
    return {
        "simulated": renderer.simulated,
        "queuedResources": [_queued_line(engine, one.name) for one in tables.queued.values()],
        "nodes": [_node_line(one) for one in tables.nodes.values() if one.queued is None],
        "zones": {zone: dict(chips) for zone, chips in plane.config.zones.items()},
        "taken": dict(taken),
    }


def _queued_line(engine: Engine, name: str) -> dict[str, Any]:
    queued = engine.plane.queued.get(name)
    nodes = engine.plane.tables.nodes_of(queued)
    return {
        "name": name,
        "acceleratorType": queued.accelerator_type,
        "tier": queued.tier.value,
        "slices": len(queued.node_ids),
        "state": queued.state.value,
        "nodes": [_node_line(node) for node in nodes],
    }


def _node_line(node: Node) -> dict[str, Any]:
    return {
        "name": node.name,
        "acceleratorType": node.accelerator_type,
        "state": node.state.value,
        "incarnation": node.incarnation,
        "boot": node.boot,
        "hosts": node.accelerator.hosts,
        "trouble": node.trouble,
    }


def _preempt(engine: Engine, _: Renderer, body: dict[str, Any]) -> Any:
    name = _text(body, "name")
    engine.do(lambda now: engine.plane.queued.preempt(name, now))
    return {}


def _configure(engine: Engine, _: Renderer, body: dict[str, Any]) -> Any:
    """Sets the free chips of a generation in a zone."""
    zone, generation, chips = _text(body, "zone"), _text(body, "generation"), body.get("chips")
    zones: Mapping[str, Mapping[str, int]] = engine.plane.config.zones
    if zone not in zones:
        raise UsageError(f"there is no zone {zone}; there are: {', '.join(zones)}")
    engine.configure(zones={**zones, zone: {**zones[zone], generation: chips}})
    return {}


def _text(body: dict[str, Any], field: str) -> str:
    value = body.get(field)
    if not isinstance(value, str):
        raise UsageError(f"{field!r} must be a text")
    return value


ADMIN_METHODS: Final[Mapping[tuple[str, str], _Handler]] = {
    ("GET", "status"): _status,
    ("POST", "preempt"): _preempt,
    ("POST", "capacity"): _configure,
}


def perform_admin(
    methods: Mapping[tuple[str, str], _Handler],
    engine: Engine,
    renderer: Renderer,
    http: str,
    path: str,
    body: bytes,
) -> Any:
    """Answers a request that only the local server knows.

    Raises:
        CloudApiError: The answer, if it is a refusal.
        UsageError: If the body is wrong.
    """
    handler = methods.get((http, path.removeprefix(ADMIN_PREFIX)))
    if handler is None:
        raise CloudApiError(Code.NOT_FOUND, f"Method not found: {http} {path}")
    try:
        value = json.loads(body or b"{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UsageError("the body must be a JSON object")
    return handler(engine, renderer, value)
