"""What a request must be like to be taken in; the clients' own mistakes end here."""

from __future__ import annotations

import re
from typing import Any, Final

from regrow.cloud.accelerators import ACCELERATORS, GENERATIONS, Accelerator, by_topology
from regrow.cloud.config import MAX_SLICES, CloudConfig
from regrow.cloud.machine.queue import uid_of
from regrow.cloud.names import Place, base, check_id
from regrow.cloud.resources import ApiVersion, Node, QueuedResource, Tier
from regrow.cloud.times import parse_duration, parse_time
from regrow.errors import CloudApiError, Code

RUNTIME_VERSIONS: Final = (
    "tpu-ubuntu2204-base",
    "tpu-vm-base",
    "tpu-vm-v4-base",
    "v2-alpha-tpuv5-lite",
    "v2-alpha-tpuv5",
    "v2-alpha-tpuv6e",
    "v2-tpuv5-litepod",
)
"""Those that the API lists; tpu-vm-tf-… and tpu-vm-pt-… are taken as well."""

_OLD_RUNTIME: Final = re.compile(r"tpu-vm-(tf|pt|cos)-[a-z0-9.-]+")
_MAX_DESCRIPTION: Final = 512
_LABEL: Final = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_LABEL_VALUE: Final = re.compile(r"[a-z0-9_-]{0,63}")


def invalid(message: str) -> CloudApiError:
    """The answer to a request that is wrong in itself."""
    return CloudApiError(Code.INVALID_ARGUMENT, message)


def one_of(where: str, fields: dict[str, Any], *names: str, needed: bool = False) -> str | None:
    """The only one of some fields that exclude each other."""
    given = [name for name in names if name in fields]
    if len(given) > 1:
        raise invalid(f"{where}: only one of {', '.join(given)} may be given.")
    if needed and not given:
        raise invalid(f"{where}: one of {', '.join(names)} is required.")
    return given[0] if given else None


# --- nodes ---


def accelerator_of(node: dict[str, Any]) -> Accelerator:
    """The shape that a node asks for."""
    which = one_of("node", node, "acceleratorType", "acceleratorConfig", needed=True)
    if which == "acceleratorType":
        named = ACCELERATORS.get(node["acceleratorType"])
        if named is None:
            raise invalid(
                f"The accelerator type {node['acceleratorType']!r} is unknown; acceleratorTypes.list "
                f"tells which there are, say {', '.join(_examples(node['acceleratorType']))}."
            )
        return named
    config = node["acceleratorConfig"]
    shape = by_topology(config.get("type", ""), config.get("topology", ""))
    if shape is None:
        raise invalid(
            f"There is no topology {config.get('topology', '')!r} of the accelerator type "
            f"{config.get('type', 'TYPE_UNSPECIFIED')}."
        )
    return shape


def _examples(wrong: str) -> list[str]:
    prefix = wrong.partition("-")[0]
    same = [name for name in ACCELERATORS if name.startswith(f"{prefix}-")]
    return same[:4] or ["v4-16", "v5litepod-16", "v5p-16", "v6e-16"]


def check_node(node: dict[str, Any]) -> Accelerator:
    """Checks the fields of a node that the user gives; returns its shape."""
    accelerator = accelerator_of(node)
    runtime = node.get("runtimeVersion", "")
    if not runtime:
        raise invalid("node.runtime_version is required.")
    if runtime not in RUNTIME_VERSIONS and not _OLD_RUNTIME.fullmatch(runtime):
        advised = accelerator.generation.runtime_version
        raise invalid(
            f"The runtime version {runtime!r} is unknown; for this accelerator: {advised}."
        )
    one_of("node", node, "networkConfig", "networkConfigs")
    check_description(node)
    check_labels(node)
    _check_scheduling(node.get("schedulingConfig", {}))
    return accelerator


def check_description(node: dict[str, Any]) -> None:
    """Checks the length of a description."""
    if len(node.get("description", "")) > _MAX_DESCRIPTION:
        raise invalid(f"node.description is longer than {_MAX_DESCRIPTION} characters.")


def check_labels(node: dict[str, Any]) -> None:
    """Checks labels by the rules that all of Google Cloud has for them."""
    for key, value in node.get("labels", {}).items():
        if not _LABEL.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            raise invalid(f"node.labels: {key!r}: {value!r} is no valid label.")


def _check_scheduling(config: dict[str, Any]) -> None:
    spot = config.get("spot") or config.get("preemptible")
    if spot and config.get("reserved"):
        raise invalid("node.scheduling_config: a node cannot be both reserved and spot.")


def _tier_of_scheduling(config: dict[str, Any]) -> Tier:
    model = config.get("provisioningModel", "")
    if config.get("spot") or config.get("preemptible") or model == "SPOT":
        return Tier.SPOT
    reserved = config.get("reserved") or model == "RESERVATION_BOUND"
    return Tier.RESERVED if reserved else Tier.ON_DEMAND


def node_from(
    body: dict[str, Any], place: Place, node_id: str, version: ApiVersion, seq: int, now: float
) -> Node:
    """A node of its own, as nodes.create asks for it."""
    check_id("node_id", node_id)
    accelerator = check_node(body)
    scheduling = body.get("schedulingConfig", {})
    tier = _tier_of_scheduling(scheduling)
    reservation = scheduling.get("reservationName")
    if reservation and tier is not Tier.RESERVED:
        raise invalid("node.scheduling_config: reservation_name needs reserved.")
    return Node(
        name=place.child(Node.kind, node_id),
        seq=seq,
        created_at=now,
        accelerator_type=accelerator.name,
        topology=accelerator.topology,
        tier=tier,
        reservation=base(reservation) if reservation else None,
        api_version=version,
        uid=uid_of(seq, now),
        body=body,
    )


# --- queued resources ---


def queued_from(
    body: dict[str, Any], place: Place, queued_id: str, version: ApiVersion, seq: int, now: float
) -> QueuedResource:
    """A queued resource, as queuedResources.create asks for it."""
    check_id("queued_resource_id", queued_id)
    specs = body.get("tpu", {}).get("nodeSpec", [])
    if len(specs) != 1:
        raise invalid(f"tpu.node_spec must have exactly one entry; it has {len(specs)}.")
    spec = specs[0]
    _check_parent(spec.get("parent", ""), place)
    accelerator = check_node(spec.get("node", {}))
    tier, reservation = _tier_of(body, place)
    valid_after, valid_until = _validity(body.get("queueingPolicy", {}), now)
    return QueuedResource(
        name=place.child(QueuedResource.kind, queued_id),
        seq=seq,
        created_at=now,
        due_at=now,
        accelerator_type=accelerator.name,
        topology=accelerator.topology,
        tier=tier,
        reservation=reservation,
        api_version=version,
        body=body,
        node_ids=_node_ids(spec, queued_id, accelerator),
        valid_after=valid_after,
        valid_until=valid_until,
    )


def _check_parent(parent: str, place: Place) -> None:
    parts = parent.split("/")
    if len(parts) != 4 or parts[0::2] != ["projects", "locations"] or not all(parts):
        raise invalid(f"tpu.node_spec.parent {parent!r} is not projects/PROJECT/locations/ZONE.")
    # A project may be told by its number here and by its id in the URL.
    if parts[3] != place.zone:
        raise invalid(f"tpu.node_spec.parent is in {parts[3]}, the request in {place.zone}.")


def _node_ids(spec: dict[str, Any], queued_id: str, accelerator: Accelerator) -> list[str]:
    which = one_of(
        "tpu.node_spec", spec, "nodeId", "multisliceParams", "multiNodeParams", needed=True
    )
    assert which is not None
    if which == "nodeId":
        return [check_id("tpu.node_spec.node_id", spec["nodeId"])]
    params = spec[which]
    count = params.get("nodeCount", 0)
    if not 1 < count <= MAX_SLICES:
        raise invalid(
            f"tpu.node_spec.{which}.node_count is {count}; it must be from 2 to {MAX_SLICES}."
        )
    if not accelerator.generation.multislice:
        first = next(one.name for one in GENERATIONS.values() if one.multislice)
        raise invalid(
            f"Multislice is supported on {first} and later only, not on {accelerator.name}."
        )
    prefix = params.get("nodeIdPrefix") or queued_id
    check_id(f"tpu.node_spec.{which}.node_id_prefix", prefix)
    return [f"{prefix}-{index}" for index in range(count)]


def _tier_of(body: dict[str, Any], place: Place) -> tuple[Tier, str | None]:
    which = one_of("queued_resource", body, "spot", "guaranteed", "bestEffort")
    model = body.get("provisioningModel", "")
    named = body.get("reservationName", "")
    guaranteed = body.get("guaranteed", {})
    reserved = bool(guaranteed.get("reserved") or named or model == "RESERVATION_BOUND")
    if reserved and (which in ("spot", "bestEffort") or model == "SPOT"):
        raise invalid("queued_resource: a request cannot be both reserved and spot.")
    if reserved:
        return Tier.RESERVED, _reservation(named, place)
    if which == "spot" or model == "SPOT":
        return Tier.SPOT, None
    if which == "bestEffort":
        return Tier.BEST_EFFORT, None
    return (Tier.GUARANTEED if which == "guaranteed" else Tier.ON_DEMAND), None


_RESERVATION: Final = re.compile(
    r"(projects|folders|organizations)/[^/]+/locations/([^/]+)/reservations/([^/]+)"
)


def _reservation(name: str, place: Place) -> str | None:
    if not name:
        return None
    match = _RESERVATION.fullmatch(name)
    if match is None:
        raise invalid(
            f"reservation_name {name!r} is not projects/PROJECT/locations/ZONE/reservations/ID."
        )
    if match.group(2) != place.zone:
        raise invalid(f"the reservation {name} is not in the zone {place.zone}.")
    return match.group(3)


def _validity(policy: dict[str, Any], now: float) -> tuple[float | None, float | None]:
    """From when and until when a request may be served."""
    which = one_of(
        "queueing_policy",
        policy,
        "validUntilDuration",
        "validUntilTime",
        "validAfterDuration",
        "validAfterTime",
        "validInterval",
    )
    after: float | None = None
    until: float | None = None
    match which:
        case "validUntilDuration":
            until = now + parse_duration(policy[which])
        case "validUntilTime":
            until = parse_time(policy[which])
        case "validAfterDuration":
            after = now + parse_duration(policy[which])
        case "validAfterTime":
            after = parse_time(policy[which])
        case "validInterval":
            interval = policy[which]
            after = parse_time(interval["startTime"]) if "startTime" in interval else None
            until = parse_time(interval["endTime"]) if "endTime" in interval else None
        case _:
            pass
    if until is not None and until <= max(now, after or now):
        raise invalid("queueing_policy: the end of the interval is past, or before its beginning.")
    return after, until


def check_zone(config: CloudConfig, place: Place) -> None:
    """Refuses a zone that there is not.

    Raises:
        CloudApiError: NOT_FOUND.
    """
    if place.zone not in config.zones:
        raise CloudApiError(
            Code.NOT_FOUND,
            f"Location {place.zone} is not found or access is unauthorized; there are: "
            f"{', '.join(config.zones)}.",
        )
