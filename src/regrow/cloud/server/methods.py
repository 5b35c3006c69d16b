"""Every method of the Cloud TPU API, v2 and v2alpha1."""

from __future__ import annotations

import hashlib
from typing import Any, Final

from regrow.cloud.accelerators import ACCELERATORS
from regrow.cloud.machine.admission import RUNTIME_VERSIONS, check_zone, invalid
from regrow.cloud.machine.capacity import Pool
from regrow.cloud.machine.refusals import found
from regrow.cloud.names import Place
from regrow.cloud.resources import Node, QueuedResource
from regrow.cloud.server.call import Call, Method
from regrow.cloud.server.decode import camel
from regrow.cloud.server.render import (
    accelerator_type,
    location,
    runtime_version,
    upcoming_maintenance,
)

# --- queued resources ---


def _create_queued(call: Call) -> Any:
    plane = call.engine.plane
    queued_id = call.query.get("queuedResourceId", "")
    operation = call.engine.do(
        lambda now: plane.queued.create(
            call.place,
            queued_id,
            call.body,
            now,
            version=call.version,
            request_id=call.request_id,
        )
    )
    return call.operation(operation)


def _get_queued(call: Call) -> Any:
    queued = call.engine.plane.queued.get(call.path)
    return call.renderer.queued(queued, call.version, ints=call.ints)


def _list_queued(call: Call) -> Any:
    places = call.places()
    items = call.engine.plane.tables.queued.values()
    return call.listed(
        "queuedResources",
        ((one.seq, one) for one in items if one.place in places),
        lambda one: call.renderer.queued(one, call.version, ints=call.ints),
    )


def _delete_queued(call: Call) -> Any:
    plane, force = call.engine.plane, call.force
    operation = call.engine.do(
        lambda now: plane.queued.delete(
            call.path, now, force=force, version=call.version, request_id=call.request_id
        )
    )
    return call.operation(operation)


def _reset_queued(call: Call) -> Any:
    plane = call.engine.plane
    return call.operation(
        call.engine.do(lambda now: plane.queued.reset(call.path, now, version=call.version))
    )


def _maintain_queued(call: Call) -> Any:
    plane = call.engine.plane
    queued = plane.queued.get(call.path)
    names = call.body.get("nodeNames", [])
    full = [name if "/" in name else queued.place.child(Node.kind, name) for name in names]
    if not full or not set(full) <= set(queued.node_names):
        raise invalid(f"node_names must name nodes of {queued.name}.")
    return call.operation(
        call.engine.do(
            lambda now: plane.nodes.maintain(full, queued.name, now, version=call.version)
        )
    )


def _maintenance_of_queued(call: Call) -> Any:
    plane = call.engine.plane
    infos = [
        {
            "nodeName": node.name,
            "nodeUid": str(node.uid),
            "upcomingMaintenance": upcoming_maintenance(node.due_at or 0.0),
        }
        for node in plane.tables.nodes_of(plane.queued.get(call.path))
        if node.notice == "maintenance"
    ]
    return {"nodeUpcomingMaintenances": infos}


# --- nodes ---


def _create_node(call: Call) -> Any:
    plane = call.engine.plane
    operation = call.engine.do(
        lambda now: plane.nodes.create(
            call.place,
            call.query.get("nodeId", ""),
            call.body,
            now,
            version=call.version,
            request_id=call.request_id,
        )
    )
    return call.operation(operation)


def _get_node(call: Call) -> Any:
    node = call.engine.plane.nodes.get(call.path)
    return call.renderer.node(node, call.version, ints=call.ints)


def _list_nodes(call: Call) -> Any:
    places = call.places()
    items = call.engine.plane.tables.nodes.values()
    return call.listed(
        "nodes",
        ((one.seq, one) for one in items if one.place in places),
        lambda one: call.renderer.node(one, call.version, ints=call.ints),
    )


_PATCHABLE: Final = (
    "description",
    "tags",
    "labels",
    "metadata",
    "networkConfig.enableExternalIps",
)


def _patch_node(call: Call) -> Any:
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
    return call.operation(
        call.engine.do(lambda now: plane.nodes.patch(call.path, changes, now, version=call.version))
    )


def _delete_node(call: Call) -> Any:
    plane = call.engine.plane
    operation = call.engine.do(
        lambda now: plane.nodes.delete(
            call.path, now, version=call.version, request_id=call.request_id
        )
    )
    return call.operation(operation)


def _stop_node(call: Call) -> Any:
    plane = call.engine.plane
    return call.operation(
        call.engine.do(lambda now: plane.nodes.stop(call.path, now, version=call.version))
    )


def _start_node(call: Call) -> Any:
    plane = call.engine.plane
    return call.operation(
        call.engine.do(lambda now: plane.nodes.start(call.path, now, version=call.version))
    )


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


def _maintain_node(call: Call) -> Any:
    plane = call.engine.plane
    _workers(call, plane.nodes.get(call.path))
    return call.operation(
        call.engine.do(
            lambda now: plane.nodes.maintain([call.path], call.path, now, version=call.version)
        )
    )


# --- operations ---


def _get_operation(call: Call) -> Any:
    return call.operation(call.engine.plane.operations.get(call.path))


def _list_operations(call: Call) -> Any:
    places = call.places()
    items = call.engine.plane.tables.operations.values()
    return call.listed(
        "operations", ((one.seq, one) for one in items if one.place in places), call.operation
    )


def _cancel_operation(call: Call) -> Any:
    plane = call.engine.plane
    call.engine.do(lambda now: plane.operations.cancel(call.path, now))
    return {}


def _delete_operation(call: Call) -> Any:
    plane = call.engine.plane
    call.engine.do(lambda now: plane.operations.delete(call.path))
    return {}


# --- what there is ---


def _list_locations(call: Call) -> Any:
    zones = call.engine.plane.config.zones
    return call.listed(
        "locations", enumerate(Place(call.words[0], zone) for zone in zones), location
    )


def _get_location(call: Call) -> Any:
    check_zone(call.engine.plane.config, call.place)
    return location(call.place)


def _service_identity(call: Call) -> Any:
    number = int.from_bytes(hashlib.sha256(call.place.project.encode()).digest()[:5], "big")
    return {"identity": {"email": f"service-{number}@cloud-tpu.iam.gserviceaccount.com"}}


def _list_accelerator_types(call: Call) -> Any:
    return call.listed_here(
        "acceleratorTypes",
        ACCELERATORS,
        lambda name, place: accelerator_type(ACCELERATORS[name], place, ints=call.ints),
    )


def _get_accelerator_type(call: Call) -> Any:
    check_zone(call.engine.plane.config, call.place)
    named = {call.place.child("acceleratorTypes", name): name for name in ACCELERATORS}
    return accelerator_type(ACCELERATORS[found(named, call.path)], call.place, ints=call.ints)


def _list_runtime_versions(call: Call) -> Any:
    return call.listed_here("runtimeVersions", RUNTIME_VERSIONS, runtime_version)


def _get_runtime_version(call: Call) -> Any:
    check_zone(call.engine.plane.config, call.place)
    named = {call.place.child("runtimeVersions", name): name for name in RUNTIME_VERSIONS}
    return runtime_version(found(named, call.path), call.place)


def _list_reservations(call: Call) -> Any:
    capacity = call.engine.plane.capacity
    taken = capacity.taken()
    rows = [(one, place) for place in call.places() for one in capacity.reservations(place)]
    return call.listed(
        "reservations",
        enumerate(rows),
        lambda row: call.renderer.reservation(
            row[0],
            row[1],
            taken[Pool(row[0].zone, row[0].generation, row[0].name)],
            ints=call.ints,
        ),
    )


_ZONE: Final = "projects/*/locations/*"
_QUEUED: Final = f"{_ZONE}/{QueuedResource.kind}"
_NODES: Final = f"{_ZONE}/{Node.kind}"
_OPERATIONS: Final = f"{_ZONE}/operations"
_PAGED: Final = ("pageSize", "pageToken")
_FILTERED: Final = (*_PAGED, "filter", "orderBy")
_ALPHA: Final = ("v2alpha1",)

METHODS: Final = (
    Method("GET", "projects/*/locations", _list_locations, (*_FILTERED, "extraLocationTypes")),
    Method("GET", _ZONE, _get_location),
    Method("POST", f"{_ZONE}:generateServiceIdentity", _service_identity),
    Method("GET", f"{_ZONE}/acceleratorTypes", _list_accelerator_types, _FILTERED),
    Method("GET", f"{_ZONE}/acceleratorTypes/*", _get_accelerator_type),
    Method("GET", f"{_ZONE}/runtimeVersions", _list_runtime_versions, _FILTERED),
    Method("GET", f"{_ZONE}/runtimeVersions/*", _get_runtime_version),
    Method("GET", f"{_ZONE}/reservations", _list_reservations, _PAGED, versions=_ALPHA),
    Method("POST", _NODES, _create_node, ("nodeId", "requestId"), "Node"),
    Method("GET", _NODES, _list_nodes, _PAGED),
    Method("GET", f"{_NODES}/*", _get_node),
    Method("PATCH", f"{_NODES}/*", _patch_node, ("updateMask",), "Node"),
    Method("DELETE", f"{_NODES}/*", _delete_node, ("requestId",)),
    Method("POST", f"{_NODES}/*:start", _start_node),
    Method("POST", f"{_NODES}/*:stop", _stop_node),
    Method(
        "POST", f"{_NODES}/*:getGuestAttributes", _guest_attributes, (), "GetGuestAttributesRequest"
    ),
    Method(
        "POST",
        f"{_NODES}/*:simulateMaintenanceEvent",
        _maintain_node,
        (),
        "SimulateMaintenanceEventRequest",
        _ALPHA,
    ),
    Method("POST", f"{_NODES}/*:performMaintenance", _maintain_node, versions=_ALPHA),
    Method("POST", _QUEUED, _create_queued, ("queuedResourceId", "requestId"), "QueuedResource"),
    Method("GET", _QUEUED, _list_queued, _PAGED),
    Method("GET", f"{_QUEUED}/*", _get_queued),
    Method("DELETE", f"{_QUEUED}/*", _delete_queued, ("force", "requestId")),
    Method("POST", f"{_QUEUED}/*:reset", _reset_queued),
    Method(
        "POST",
        f"{_QUEUED}/*:performMaintenanceQueuedResource",
        _maintain_queued,
        (),
        "PerformMaintenanceQueuedResourceRequest",
        _ALPHA,
    ),
    Method("GET", f"{_QUEUED}/*:getMaintenanceInfo", _maintenance_of_queued, versions=_ALPHA),
    Method("GET", _OPERATIONS, _list_operations, (*_FILTERED, "returnPartialSuccess")),
    Method("GET", f"{_OPERATIONS}/*", _get_operation),
    Method("POST", f"{_OPERATIONS}/*:cancel", _cancel_operation),
    Method("DELETE", f"{_OPERATIONS}/*", _delete_operation),
)
"""As the discovery documents list them; a test compares."""
