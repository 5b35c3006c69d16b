"""The messages of the Cloud TPU API v2 and v2alpha1, as far as a client sends or gets them.

Taken from Google's discovery documents (revision 20261001); the numbers of enums from the protocol
buffers of google-cloud-tpu. A test compares both where those packages are installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from regrow.cloud.resources import ApiVersion

ENUMS: Final[dict[str, dict[str, int]]] = {
    "AcceleratorConfig.Type": {
        "TYPE_UNSPECIFIED": 0,
        "V2": 2,
        "V3": 4,
        "V4": 7,
        "V5LITE_POD": 9,
        "V5P": 10,
        "V6E": 11,
    },
    "AttachedDisk.DiskMode": {"DISK_MODE_UNSPECIFIED": 0, "READ_WRITE": 1, "READ_ONLY": 2},
    "MultiNodeParams.WorkloadType": {
        "WORKLOAD_TYPE_UNSPECIFIED": 0,
        "THROUGHPUT_OPTIMIZED": 1,
        "AVAILABILITY_OPTIMIZED": 2,
    },
    "Node.ApiVersion": {
        "API_VERSION_UNSPECIFIED": 0,
        "V1_ALPHA1": 1,
        "V1": 2,
        "V2_ALPHA1": 3,
        "V2": 4,
    },
    "Node.Health": {
        "HEALTH_UNSPECIFIED": 0,
        "HEALTHY": 1,
        "TIMEOUT": 3,
        "UNHEALTHY_TENSORFLOW": 4,
        "UNHEALTHY_MAINTENANCE": 5,
    },
    "Node.State": {
        "STATE_UNSPECIFIED": 0,
        "CREATING": 1,
        "READY": 2,
        "RESTARTING": 3,
        "REIMAGING": 4,
        "DELETING": 5,
        "REPAIRING": 6,
        "STOPPED": 8,
        "STOPPING": 9,
        "STARTING": 10,
        "PREEMPTED": 11,
        "TERMINATED": 12,
        "HIDING": 13,
        "HIDDEN": 14,
        "UNHIDING": 15,
        "UNKNOWN": 16,
    },
    "ProvisioningModel": {
        "PROVISIONING_MODEL_UNSPECIFIED": 0,
        "STANDARD": 1,
        "SPOT": 2,
        "RESERVATION_BOUND": 3,
        "FLEX_START": 4,
    },
    "QueuedResourceState.State": {
        "STATE_UNSPECIFIED": 0,
        "CREATING": 1,
        "ACCEPTED": 2,
        "PROVISIONING": 3,
        "FAILED": 4,
        "DELETING": 5,
        "ACTIVE": 6,
        "SUSPENDING": 7,
        "SUSPENDED": 8,
        "WAITING_FOR_RESOURCES": 9,
    },
    "QueuedResourceState.StateInitiator": {
        "STATE_INITIATOR_UNSPECIFIED": 0,
        "USER": 1,
        "SERVICE": 2,
    },
    "Reservation.State": {
        "STATE_UNSPECIFIED": 0,
        "APPROVED": 3,
        "PROVISIONING": 4,
        "ACTIVE": 5,
        "DEPROVISIONING": 6,
        "EXPIRED": 7,
        "FAILED": 8,
    },
    "Standard.CapacityUnits": {"CAPACITY_UNITS_UNSPECIFIED": 0, "CORES": 1, "CHIPS": 2},
}


@final
@dataclass(frozen=True, slots=True)
class Field:
    """A field of a message.

    Attributes:
        type: "string", "bool", "int32", "int64", "duration", "time" or "map" (of strings), or the
            name of an enum or message.
        repeated: Whether it is a list.
        output: Whether only the server sets it; what a client sends of it is passed over.
        only: The one API version that has it; None: both.
    """

    type: str
    repeated: bool = False
    output: bool = False
    only: ApiVersion | None = None


def _message(text: str) -> dict[str, Field]:
    """Reads `name:type` words; `[]` repeated, `!` output only, `@v2` or `@v2alpha1` in that only."""
    fields = {}
    for word in text.split():
        name, _, rest = word.partition(":")
        rest, _, only = rest.partition("@")
        kind = rest.rstrip("!").removesuffix("[]")
        versions: dict[str, ApiVersion | None] = {"": None, "v2": "v2", "v2alpha1": "v2alpha1"}
        fields[name] = Field(kind, "[]" in rest, rest.endswith("!"), versions[only])
    return fields


MESSAGES: Final[dict[str, dict[str, Field]]] = {
    name: _message(text)
    for name, text in {
        "AcceleratorConfig": "type:AcceleratorConfig.Type topology:string",
        "AccessConfig": "externalIp:string!",
        "AttachedDisk": (
            "sourceDisk:string mode:AttachedDisk.DiskMode workerIds:string[]@v2alpha1"
        ),
        "BestEffort": "",
        "BootDiskConfig": (
            "customerEncryptionKey:CustomerEncryptionKey enableConfidentialCompute:bool@v2alpha1 "
            "diskSizeGb:int64@v2alpha1 provisionedIops:int64@v2alpha1 "
            "provisionedThroughput:int64@v2alpha1 sourceImage:string@v2alpha1 "
            "storagePool:string@v2alpha1"
        ),
        "CustomerEncryptionKey": "kmsKeyName:string",
        "Guaranteed": "minDuration:duration reserved:bool@v2alpha1",
        "GetGuestAttributesRequest": "queryPath:string workerIds:string[]",
        "Interval": "startTime:time endTime:time",
        "MultiNodeParams": (
            "nodeCount:int32 nodeIdPrefix:string workloadType:MultiNodeParams.WorkloadType"
        ),
        "MultisliceParams": "nodeCount:int32 nodeIdPrefix:string",
        "NetworkConfig": (
            "network:string subnetwork:string enableExternalIps:bool canIpForward:bool "
            "queueCount:int32"
        ),
        "NetworkEndpoint": "ipAddress:string port:int32 accessConfig:AccessConfig",
        "Node": (
            "name:string! description:string acceleratorType:string "
            "acceleratorConfig:AcceleratorConfig state:Node.State! health:Node.Health "
            "healthDescription:string! runtimeVersion:string networkConfig:NetworkConfig "
            "networkConfigs:NetworkConfig[] cidrBlock:string serviceAccount:ServiceAccount "
            "createTime:time! schedulingConfig:SchedulingConfig "
            "networkEndpoints:NetworkEndpoint[]! labels:map metadata:map tags:string[] id:int64! "
            "dataDisks:AttachedDisk[] apiVersion:Node.ApiVersion! symptoms:Symptom[]! "
            "queuedResource:string! shieldedInstanceConfig:ShieldedInstanceConfig "
            "multisliceNode:bool! bootDiskConfig:BootDiskConfig "
            "upcomingMaintenance:UpcomingMaintenance! autocheckpointEnabled:bool@v2alpha1"
        ),
        "NodeSpec": (
            "parent:string nodeId:string node:Node multisliceParams:MultisliceParams@v2 "
            "multiNodeParams:MultiNodeParams@v2alpha1"
        ),
        "PerformMaintenanceQueuedResourceRequest": "nodeNames:string[]",
        "QueuedResource": (
            "name:string! createTime:time! tpu:Tpu spot:Spot guaranteed:Guaranteed "
            "bestEffort:BestEffort@v2alpha1 queueingPolicy:QueueingPolicy "
            "state:QueuedResourceState! reservationName:string "
            "provisioningModel:ProvisioningModel@v2alpha1 runDuration:RunDuration@v2alpha1"
        ),
        "QueuedResourceState": (
            "state:QueuedResourceState.State! "
            "stateInitiator:QueuedResourceState.StateInitiator! failedData:FailedData!"
        ),
        "QueueingPolicy": (
            "validUntilDuration:duration validUntilTime:time validAfterDuration:duration "
            "validAfterTime:time validInterval:Interval"
        ),
        "Reservation": "name:string standard:Standard state:Reservation.State!",
        "RunDuration": "maxRunDuration:duration terminationTime:time",
        "SchedulingConfig": (
            "preemptible:bool reserved:bool spot:bool provisioningModel:ProvisioningModel@v2alpha1 "
            "reservationName:string@v2alpha1 terminationTimestamp:time!@v2alpha1"
        ),
        "ServiceAccount": "email:string scope:string[]",
        "ShieldedInstanceConfig": "enableSecureBoot:bool",
        "SimulateMaintenanceEventRequest": "workerIds:string[]",
        "Spot": "",
        "Standard": (
            "size:int32 capacityUnits:Standard.CapacityUnits resourceType:string interval:Interval "
            "usage:Usage"
        ),
        "Symptom": "createTime:time symptomType:string details:string workerId:string",
        "Tpu": "nodeSpec:NodeSpec[]",
        "UpcomingMaintenance": (
            "type:string canReschedule:bool windowStartTime:string windowEndTime:string "
            "latestWindowStartTime:string maintenanceStatus:string"
        ),
        "Usage": "total:int64",
        "FailedData": "",
        "Empty": "",
    }.items()
}
"""Fields by message. Both versions read the fields of both; each writes only its own."""
