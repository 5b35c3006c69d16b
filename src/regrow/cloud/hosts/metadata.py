"""What the metadata server of a host tells: the keys that JAX, Ray and startup scripts ask for.

Formats: jax/_src/clusters/cloud_tpu_cluster.py, ray/_private/accelerators/tpu.py, and the tpu-env of
real TPU VMs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from regrow.cloud.names import base
from regrow.cloud.resources import Node
from regrow.processes import HOSTS_VARIABLE

Tree = Mapping[str, Any]
NO_MAINTENANCE: Final = json.dumps(
    {"error": "no notifications have been received yet, try again later"}
)
_MEGASCALE_PORT: Final = 8080


def hostname(node: Node, worker: int) -> str:
    """Name of a worker's instance."""
    return f"t1v-n-{node.uid & 0xFFFFFFFF:08x}-w-{worker}"


def project_number(project: str) -> int:
    """A number for a project that is known by its id."""
    if project.isdigit():
        return int(project)
    return int.from_bytes(hashlib.sha256(project.encode()).digest()[:5], "big")


def tpu_env(node: Node, worker: int, coordinator: str) -> dict[str, str]:
    """The settings of the TPU runtime on a worker, the Multislice's among them."""
    accelerator = node.accelerator
    place = node.place
    env = {
        "ACCELERATOR_TYPE": node.accelerator_type,
        "CHIPS_PER_HOST_BOUNDS": _bounds(accelerator.host_axes),
        "CONSUMER_PROJECT_ID": place.project,
        "CONSUMER_PROJECT_NUMBER": str(project_number(place.project)),
        "HOST_BOUNDS": _bounds(accelerator.slice_axes),
        "NODE_ID": base(node.name),
        "PREEMPTIBLE": _boolean(node.tier.preemptible),
        "RUNTIME_VERSION": str(node.body.get("runtimeVersion", "")),
        "TOPOLOGY": node.topology,
        "TPU_CHIPS_PER_PROCESS_BOUNDS": _bounds(accelerator.host_axes),
        "TPU_PROCESS_BOUNDS": _bounds(accelerator.slice_axes),
        "TPU_TOPOLOGY_WRAP": ",".join(_boolean(wrap) for wrap in accelerator.wraps),
        "TYPE": accelerator.generation.type,
        "UID": str(node.uid),
        "WORKER_ID": str(worker),
        "ZONE": place.zone,
    }
    if node.slices > 1:
        env |= {
            "MEGASCALE_COORDINATOR_ADDRESS": f"{coordinator}:{_MEGASCALE_PORT}",
            "MEGASCALE_NUM_SLICES": str(node.slices),
            "MEGASCALE_SLICE_ID": str(node.slice_index),
        }
    return env


def tree_of(
    node: Node, worker: int, address: Callable[[int], str], first_of_slice_0: int
) -> dict[str, Any]:
    """Everything below /computeMetadata/v1/ on a worker.

    Args:
        node: Its slice.
        worker: Its place in the slice.
        address: The address of a host by its number.
        first_of_slice_0: Number of worker 0 of slice 0, the coordinator of a Multislice.
    """
    place = node.place
    number = project_number(place.project)
    addresses = [address(node.first_host + index) for index in range(node.accelerator.hosts)]
    env = tpu_env(node, worker, address(first_of_slice_0))
    attributes = dict(node.body.get("metadata", {})) | {
        "accelerator-type": node.accelerator_type,
        "agent-worker-number": str(worker),
        "instance-id": base(node.name),
        "tpu-env": "\n".join(f"{key}: '{value}'" for key, value in env.items()),
        "worker-network-endpoints": ",".join(
            f"{hostname(node, index)}:{index}:{one}" for index, one in enumerate(addresses)
        ),
    }
    instance: dict[str, Any] = {
        "attributes": attributes,
        "description": str(node.body.get("description", "")),
        "hostname": f"{hostname(node, worker)}.{place.zone}.c.{place.project}.internal",
        "id": str(node.uid + worker),
        "machine-type": f"projects/{number}/machineTypes/{node.accelerator_type}",
        "maintenance-event": "NONE",
        "name": hostname(node, worker),
        "network-interfaces": {"0": {"ip": addresses[worker], "network": "default"}},
        "preempted": _upper(node.notice == "preemption"),
        "scheduling": {
            "automatic-restart": _upper(not node.tier.preemptible),
            "on-host-maintenance": "TERMINATE",
            "preemptible": _upper(node.tier.preemptible),
        },
        "tags": json.dumps(node.body.get("tags", [])),
        "upcoming-maintenance": NO_MAINTENANCE,
        "zone": f"projects/{number}/zones/{place.zone}",
    }
    if node.notice == "maintenance":
        instance["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
        instance["upcoming-maintenance"] = json.dumps(
            {"type": "UNSCHEDULED", "maintenance_status": "PENDING", "can_reschedule": "false"}
        )
    project = {"attributes": {}, "numeric-project-id": str(number), "project-id": place.project}
    return {"instance": instance, "project": project}


def environ_of(node: Node, worker: int, address: str, port: int) -> dict[str, str]:
    """The variables with which programs on a local host find what they look for.

    The devices of a host are CPU devices. JAX's own class for Cloud TPUs is for machines that have
    libtpu; HOSTS_VARIABLE has `regrow.multihost` stand in for it.
    """
    return {
        "GCE_METADATA_HOST": f"{address}:{port}",
        "GCE_METADATA_IP": f"{address}:{port}",
        "HOSTNAME": hostname(node, worker),
        "JAX_NUM_CPU_DEVICES": str(node.accelerator.devices_per_host),
        "JAX_PLATFORMS": "cpu",
        HOSTS_VARIABLE: str(node.accelerator.hosts),
        "TPU_ACCELERATOR_TYPE": node.accelerator_type,
        "TPU_NAME": base(node.name),
        "TPU_TOPOLOGY": node.topology,
        "TPU_WORKER_ID": str(worker),
    }


def _bounds(axes: tuple[int, int, int]) -> str:
    return ",".join(str(axis) for axis in axes)


def _boolean(value: bool) -> str:
    return "true" if value else "false"


def _upper(value: bool) -> str:
    return "TRUE" if value else "FALSE"


# --- reading the tree ---


def lookup(tree: Tree, path: str) -> Any:
    """The value or subtree at a path; KeyError if there is none."""
    value: Any = tree
    for part in path.strip("/").split("/"):
        if part:
            if not isinstance(value, Mapping):
                raise KeyError(path)
            value = value[part]
    return value


def listing(subtree: Tree) -> str:
    """The keys of a subtree, those of subtrees with a slash."""
    lines = (f"{key}/" if isinstance(value, Mapping) else key for key, value in subtree.items())
    return "".join(f"{line}\n" for line in sorted(lines))
