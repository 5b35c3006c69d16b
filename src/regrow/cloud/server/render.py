"""Records as the API shows them, by version."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, final

from regrow.cloud.accelerators import Accelerator
from regrow.cloud.config import CloudConfig, OperationMetadata, ReservationConfig
from regrow.cloud.names import Place, base
from regrow.cloud.resources import (
    KINDS,
    ApiVersion,
    Node,
    Operation,
    QueuedResource,
    QueuedState,
    Tier,
)
from regrow.cloud.server.schema import ENUMS, MESSAGES
from regrow.cloud.times import format_time

SIMULATED: Final = "Simulated: this slice has no processes."
_TYPES: Final = "type.googleapis.com"
_PORT: Final = 8470
_STATE_DATA: Final = {
    QueuedState.CREATING: "creatingData",
    QueuedState.ACCEPTED: "acceptedData",
    QueuedState.PROVISIONING: "provisioningData",
    QueuedState.FAILED: "failedData",
    QueuedState.DELETING: "deletingData",
    QueuedState.ACTIVE: "activeData",
    QueuedState.SUSPENDING: "suspendingData",
    QueuedState.SUSPENDED: "suspendedData",
}
"""WAITING_FOR_RESOURCES has none."""


def encode(
    value: dict[str, Any], message: str, version: ApiVersion, *, ints: bool = False
) -> dict[str, Any]:
    """Leaves out what a version does not have, and writes numbers as the JSON mapping does."""
    shown: dict[str, Any] = {}
    fields = MESSAGES.get(message, {})
    for name, given in value.items():
        field = fields.get(name)
        if field is None:
            shown[name] = given
        elif field.only in (None, version):
            many = given if field.repeated else [given]
            encoded = [_single(one, field.type, version, ints) for one in many]
            shown[name] = encoded if field.repeated else encoded[0]
    return shown


def _single(value: Any, kind: str, version: ApiVersion, ints: bool) -> Any:
    if kind in MESSAGES:
        return encode(value, kind, version, ints=ints)
    if kind in ENUMS and ints:
        return ENUMS[kind][value]
    return str(value) if kind == "int64" else value


@final
@dataclass(frozen=True, slots=True)
class Renderer:
    """What it takes to show records.

    Attributes:
        config: The world they live in.
        address: The address of a host by its number.
        simulated: Whether the slices have no processes.
    """

    config: CloudConfig
    address: Callable[[int], str]
    simulated: bool = False

    # --- queued resources and nodes ---

    def queued(
        self, queued: QueuedResource, version: ApiVersion, *, ints: bool = False
    ) -> dict[str, Any]:
        """A queued resource: its one nodeSpec is told for each of its nodes."""
        spec = queued.body["tpu"]["nodeSpec"][0]
        body = dict(spec["node"])
        if self.simulated:
            body["healthDescription"] = SIMULATED
        specs = [
            {"parent": spec["parent"], "nodeId": node_id, "node": body}
            for node_id in queued.node_ids
        ]
        shown = queued.body | {
            "name": queued.name,
            "createTime": format_time(queued.created_at),
            "tpu": {"nodeSpec": specs},
            "state": self._state(queued),
        }
        if queued.tier is Tier.RESERVED:
            # v2 tells a reserved request by its reservation, v2alpha1 by its guarantee as well.
            shown["guaranteed"] = queued.body.get("guaranteed", {}) | {"reserved": True}
            shown["reservationName"] = queued.place.child("reservations", queued.reservation or "-")
        return encode(shown, "QueuedResource", version, ints=ints)

    def _state(self, queued: QueuedResource) -> dict[str, Any]:
        state: dict[str, Any] = {"state": queued.state.value}
        if queued.initiator and queued.state in (QueuedState.SUSPENDING, QueuedState.SUSPENDED):
            state["stateInitiator"] = queued.initiator
        data = _STATE_DATA.get(queued.state)
        if data is not None:
            failed = queued.state is QueuedState.FAILED
            state[data] = {"error": queued.error} if failed else {}
        return state

    def node(self, node: Node, version: ApiVersion, *, ints: bool = False) -> dict[str, Any]:
        """A node."""
        accelerator = node.accelerator
        generation = accelerator.generation
        shown = (
            self._defaults(node)
            | node.body
            | {
                "name": node.name,
                "id": node.uid,
                "acceleratorType": node.accelerator_type,
                "acceleratorConfig": {"type": generation.type, "topology": node.topology},
                "state": node.state.value,
                "health": node.health.value,
                "createTime": format_time(node.created_at),
                # v2alpha1 has no word for v2.
                "apiVersion": "V2" if version == node.api_version == "v2" else "V2_ALPHA1",
                "networkEndpoints": self._endpoints(node, accelerator),
                "multisliceNode": node.slices > 1,
            }
        )
        text = SIMULATED if self.simulated else node.trouble
        if text:
            shown["healthDescription"] = text
        if node.queued is not None:
            shown["queuedResource"] = node.queued
        if node.notice == "maintenance" and node.due_at is not None:
            shown["upcomingMaintenance"] = upcoming_maintenance(node.due_at)
        return encode(shown, "Node", version, ints=ints)

    @staticmethod
    def _defaults(node: Node) -> dict[str, Any]:
        scheduling: dict[str, bool] = {}
        if node.tier.preemptible:
            scheduling = {"preemptible": True, "spot": True}
        elif node.tier is Tier.RESERVED:
            scheduling = {"reserved": True}
        network = f"projects/{node.place.project}/global/networks/default"
        return {
            "schedulingConfig": scheduling,
            "networkConfig": {"network": network, "enableExternalIps": False},
        }

    def _endpoints(self, node: Node, accelerator: Accelerator) -> list[dict[str, Any]]:
        external = node.body.get("networkConfig", {}).get("enableExternalIps", False)
        endpoints = []
        for index in range(accelerator.hosts):
            address = self.address(node.first_host + index)
            access = {"externalIp": address} if external else {}
            endpoints.append({"ipAddress": address, "port": _PORT, "accessConfig": access})
        return endpoints

    # --- operations ---

    def operation(
        self, operation: Operation, version: ApiVersion, *, ints: bool = False
    ) -> dict[str, Any]:
        """An operation, as the clients of a version can read it."""
        metadata: dict[str, Any] = {
            "@type": _metadata_type(self.config.operation_metadata, version),
            "createTime": format_time(operation.created_at),
            "target": operation.target,
            "verb": operation.verb,
            "cancelRequested": operation.cancel_requested,
            "apiVersion": operation.api_version,
        }
        shown: dict[str, Any] = {
            "name": operation.name,
            "metadata": metadata,
            "done": operation.done,
        }
        if operation.ended_at is None:
            return shown
        metadata["endTime"] = format_time(operation.ended_at)
        if operation.error is not None:
            shown["error"] = operation.error
        else:
            shown["response"] = self._response(operation, version, ints)
        return shown

    def _response(self, operation: Operation, version: ApiVersion, ints: bool) -> dict[str, Any]:
        if operation.response is None:
            return {"@type": f"{_TYPES}/google.protobuf.Empty"}
        record = KINDS[operation.response["kind"]].from_doc(operation.response["doc"])
        if isinstance(record, QueuedResource):
            message, body = "QueuedResource", self.queued(record, version, ints=ints)
        else:
            assert isinstance(record, Node)
            message, body = "Node", self.node(record, version, ints=ints)
        return {"@type": f"{_TYPES}/google.cloud.tpu.{version}.{message}"} | body

    # --- what there is ---

    def reservation(
        self, one: ReservationConfig, place: Place, used: int, *, ints: bool = False
    ) -> dict[str, Any]:
        """A reservation and what is used of it."""
        shown = {
            "name": place.child("reservations", one.name),
            "state": "ACTIVE",
            "standard": {
                "size": one.chips,
                "capacityUnits": "CHIPS",
                "resourceType": one.generation,
                "usage": {"total": used},
            },
        }
        return encode(shown, "Reservation", "v2alpha1", ints=ints)


def upcoming_maintenance(at: float) -> dict[str, Any]:
    """A maintenance event that nobody had planned and nobody can put off."""
    return {
        "type": "UNSCHEDULED",
        "canReschedule": False,
        "windowStartTime": format_time(at),
        "windowEndTime": format_time(at),
        "latestWindowStartTime": format_time(at),
        "maintenanceStatus": "PENDING",
    }


def accelerator_type(
    accelerator: Accelerator, place: Place, *, ints: bool = False
) -> dict[str, Any]:
    """An accelerator type."""
    config = {"type": accelerator.generation.type, "topology": accelerator.topology}
    return {
        "name": place.child("acceleratorTypes", accelerator.name),
        "type": accelerator.name,
        "acceleratorConfigs": [encode(config, "AcceleratorConfig", "v2", ints=ints)],
    }


def runtime_version(version: str, place: Place) -> dict[str, Any]:
    """A runtime version."""
    return {"name": place.child("runtimeVersions", version), "version": version}


def location(place: Place) -> dict[str, Any]:
    """A zone."""
    return {"name": place.name, "locationId": base(place.name), "displayName": place.zone}


def _metadata_type(setting: OperationMetadata, version: ApiVersion) -> str:
    """The official v2 client cannot read the type that v2alpha1 answers with."""
    common = setting == "common" or (setting == "by-version" and version == "v2alpha1")
    package = "google.cloud.common" if common else f"google.cloud.tpu.{version}"
    return f"{_TYPES}/{package}.OperationMetadata"
