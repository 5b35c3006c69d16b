"""The methods of nodes."""

from __future__ import annotations

from typing import Any, Final

from regrow.cloud.machine.admission import invalid
from regrow.cloud.resources import Node
from regrow.cloud.server.call import ALPHA, PAGED, ZONE, Call, Method
from regrow.cloud.server.decode import camel


def _create(call: Call) -> Any:
    plane = call.engine.plane
    return call.do(
        lambda now: plane.nodes.create(
            call.place,
            call.query.get("nodeId", ""),
            call.body,
            now,
            version=call.version,
            request_id=call.request_id,
        )
    )


def _get(call: Call) -> Any:
    node = call.engine.plane.nodes.get(call.path)
    return call.renderer.node(node, call.version, ints=call.ints)


def _list(call: Call) -> Any:
    return call.listed_records(
        "nodes",
        call.engine.plane.tables.nodes.values(),
        lambda one: call.renderer.node(one, call.version, ints=call.ints),
    )


_PATCHABLE: Final = (
    "description",
    "tags",
    "labels",
    "metadata",
    "networkConfig.enableExternalIps",
)


def _patch(call: Call) -> Any:
    plane = call.engine.plane
    node = plane.nodes.get(call.path)
    paths = [camel(path) for path in call.query.get("updateMask", "").split(",") if path]
    if not paths or not set(paths) <= set(_PATCHABLE):
        raise invalid(f"update_mask must name some of: {', '.join(_PATCHABLE)}.")
    changes: dict[str, Any] = {}
    for path in paths:
        outer, _, inner = path.partition(".")
        value = call.body.get(outer)
        if inner:
            value = node.body.get(outer, {}) | {inner: (value or {}).get(inner, False)}
        changes[outer] = value
    return call.do(lambda now: plane.nodes.patch(call.path, changes, now, version=call.version))


def _delete(call: Call) -> Any:
    plane = call.engine.plane
    return call.do(
        lambda now: plane.nodes.delete(
            call.path, now, version=call.version, request_id=call.request_id
        )
    )


def _stop(call: Call) -> Any:
    plane = call.engine.plane
    return call.do(lambda now: plane.nodes.stop(call.path, now, version=call.version))


def _start(call: Call) -> Any:
    plane = call.engine.plane
    return call.do(lambda now: plane.nodes.start(call.path, now, version=call.version))


def _workers(call: Call, node: Node) -> list[int]:
    """The workers that a request names; none: all."""
    hosts = node.accelerator.hosts
    workers = []
    for text in call.body.get("workerIds", []):
        if not text.isascii() or not text.isdigit() or int(text) >= hosts:
            raise invalid(f"worker_ids: {text!r} is not within [0, {hosts - 1}].")
        workers.append(int(text))
    return workers or list(range(hosts))


def _guest_attributes(call: Call) -> Any:
    node = call.engine.plane.nodes.get(call.path)
    wanted = call.body.get("queryPath", "").strip("/")
    shown = []
    for worker in _workers(call, node):
        values = call.engine.fleet.guest_attributes(node, worker)
        items = [
            {"namespace": namespace, "key": key, "value": value}
            for namespace, entries in sorted(values.items())
            for key, value in sorted(entries.items())
            if wanted in ("", namespace, f"{namespace}/{key}")
        ]
        shown.append({"queryPath": wanted, "queryValue": {"items": items}})
    return {"guestAttributes": shown}


def _maintain(call: Call) -> Any:
    plane = call.engine.plane
    _workers(call, plane.nodes.get(call.path))
    return call.do(
        lambda now: plane.nodes.maintain([call.path], call.path, now, version=call.version)
    )


_NODES: Final = f"{ZONE}/{Node.kind}"

NODE_METHODS: Final = (
    Method("POST", _NODES, _create, ("nodeId", "requestId"), "Node"),
    Method("GET", _NODES, _list, PAGED),
    Method("GET", f"{_NODES}/*", _get),
    Method("PATCH", f"{_NODES}/*", _patch, ("updateMask",), "Node"),
    Method("DELETE", f"{_NODES}/*", _delete, ("requestId",)),
    Method("POST", f"{_NODES}/*:start", _start),
    Method("POST", f"{_NODES}/*:stop", _stop),
    Method(
        "POST", f"{_NODES}/*:getGuestAttributes", _guest_attributes, (), "GetGuestAttributesRequest"
    ),
    Method(
        "POST",
        f"{_NODES}/*:simulateMaintenanceEvent",
        _maintain,
        (),
        "SimulateMaintenanceEventRequest",
        ALPHA,
    ),
    Method("POST", f"{_NODES}/*:performMaintenance", _maintain, versions=ALPHA),
)
