"""Every method of the Cloud TPU API, v2 and v2alpha1."""

from __future__ import annotations

import hashlib
from typing import Any, Final

from regrow.cloud.accelerators import ACCELERATORS
from regrow.cloud.machine.admission import RUNTIME_VERSIONS, check_zone
from regrow.cloud.machine.capacity import Pool
from regrow.cloud.machine.refusals import found
from regrow.cloud.names import Place
from regrow.cloud.server.call import ALPHA, PAGED, ZONE, Call, Method
from regrow.cloud.server.node_methods import NODE_METHODS
from regrow.cloud.server.queued_methods import QUEUED_METHODS
from regrow.cloud.server.render import (
    accelerator_type,
    location,
    runtime_version,
)

# --- operations ---


def _get_operation(call: Call) -> Any:
    return call.operation(call.engine.plane.operations.get(call.path))


def _list_operations(call: Call) -> Any:
    operations = call.engine.plane.tables.operations.values()
    return call.listed_records("operations", operations, call.operation)


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


_OPERATIONS: Final = f"{ZONE}/operations"
_FILTERED: Final = (*PAGED, "filter", "orderBy")

METHODS: Final = (
    Method("GET", "projects/*/locations", _list_locations, (*_FILTERED, "extraLocationTypes")),
    Method("GET", ZONE, _get_location),
    Method("POST", f"{ZONE}:generateServiceIdentity", _service_identity),
    Method("GET", f"{ZONE}/acceleratorTypes", _list_accelerator_types, _FILTERED),
    Method("GET", f"{ZONE}/acceleratorTypes/*", _get_accelerator_type),
    Method("GET", f"{ZONE}/runtimeVersions", _list_runtime_versions, _FILTERED),
    Method("GET", f"{ZONE}/runtimeVersions/*", _get_runtime_version),
    Method("GET", f"{ZONE}/reservations", _list_reservations, PAGED, versions=ALPHA),
    *NODE_METHODS,
    *QUEUED_METHODS,
    Method("GET", _OPERATIONS, _list_operations, (*_FILTERED, "returnPartialSuccess")),
    Method("GET", f"{_OPERATIONS}/*", _get_operation),
    Method("POST", f"{_OPERATIONS}/*:cancel", _cancel_operation),
    Method("DELETE", f"{_OPERATIONS}/*", _delete_operation),
)
"""As the discovery documents list them; a test compares."""
