"""The methods of queuedResources."""

from __future__ import annotations

from typing import Any, Final

from regrow.cloud.machine.admission import invalid
from regrow.cloud.resources import Node, QueuedResource
from regrow.cloud.server.call import ALPHA, PAGED, ZONE, Call, Method
from regrow.cloud.server.render import upcoming_maintenance


def _create(call: Call) -> Any:
    plane = call.engine.plane
    queued_id = call.query.get("queuedResourceId", "")
    return call.do(
        lambda now: plane.queued.create(
            call.place,
            queued_id,
            call.body,
            now,
            version=call.version,
            request_id=call.request_id,
        )
    )


def _get(call: Call) -> Any:
    queued = call.engine.plane.queued.get(call.path)
    return call.renderer.queued(queued, call.version, ints=call.ints)


def _list(call: Call) -> Any:
    return call.listed_records(
        "queuedResources",
        call.engine.plane.tables.queued.values(),
        lambda one: call.renderer.queued(one, call.version, ints=call.ints),
    )


def _delete(call: Call) -> Any:
    plane, force = call.engine.plane, call.force
    return call.do(
        lambda now: plane.queued.delete(
            call.path, now, force=force, version=call.version, request_id=call.request_id
        )
    )


def _reset(call: Call) -> Any:
    plane = call.engine.plane
    return call.do(lambda now: plane.queued.reset(call.path, now, version=call.version))


def _maintain(call: Call) -> Any:
    plane = call.engine.plane
    queued = plane.queued.get(call.path)
    names = call.body.get("nodeNames", [])
    full = [name if "/" in name else queued.place.child(Node.kind, name) for name in names]
    if not full or not set(full) <= set(queued.node_names):
        raise invalid(f"node_names must name nodes of {queued.name}.")
    return call.do(lambda now: plane.nodes.maintain(full, queued.name, now, version=call.version))


def _maintenance(call: Call) -> Any:
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


_QUEUED: Final = f"{ZONE}/{QueuedResource.kind}"

QUEUED_METHODS: Final = (
    Method("POST", _QUEUED, _create, ("queuedResourceId", "requestId"), "QueuedResource"),
    Method("GET", _QUEUED, _list, PAGED),
    Method("GET", f"{_QUEUED}/*", _get),
    Method("DELETE", f"{_QUEUED}/*", _delete, ("force", "requestId")),
    Method("POST", f"{_QUEUED}/*:reset", _reset),
    Method(
        "POST",
        f"{_QUEUED}/*:performMaintenanceQueuedResource",
        _maintain,
        (),
        "PerformMaintenanceQueuedResourceRequest",
        ALPHA,
    ),
    Method("GET", f"{_QUEUED}/*:getMaintenanceInfo", _maintenance, versions=ALPHA),
)
