"""The pods of a JobSet: the head's, the workers', and those of a program that runs on every host.

The containers and flags of the single controller have the names that Pathways' manifests have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from regrow.manifests.nodes import Nodes

SERVER_PORT: Final = 29000
RESOURCE_MANAGER_PORT: Final = 29001
WORKER_PORT: Final = 29005
JAX_PORT: Final = 8476
MEGASCALE_PORT: Final = 8081
# Nodes may have to be made first.
_NODES_S: Final = 3600

_COORDINATOR: Final = "metadata.labels['jobset.sigs.k8s.io/coordinator']"
_SLICE_INDEX: Final = "metadata.labels['jobset.sigs.k8s.io/job-index']"
_HOST_INDEX: Final = "metadata.annotations['batch.kubernetes.io/job-completion-index']"

# A process of a Job knows its place in the Job and the place of the Job: its rank is of both.
_RANKED: Final = (
    'JAX_PROCESS_ID=$((JAX_PARTITION_INDEX * HOSTS_PER_SLICE + HOST_INDEX)) exec "$0" "$@"'
)


def head_pod(
    *,
    image: str,
    nodes: Nodes,
    slices: int,
    flags: Sequence[str],
    command: Sequence[str],
    secret: str | None,
) -> dict[str, Any]:
    """The pod of the single controller: the proxy as a sidecar, and the user's program."""
    token = _token(secret)
    proxy = {
        "name": "pathways-proxy",
        "image": image,
        "command": ["regrow", "head"],
        "args": [
            f"--server_port={SERVER_PORT}",
            f"--resource_manager_address=$(PATHWAYS_HEAD):{RESOURCE_MANAGER_PORT}",
            f"--worker_port={RESOURCE_MANAGER_PORT}",
            f"--slices={slices}",
            f"--hosts-per-slice={nodes.hosts}",
            f"--devices-per-slice={nodes.hosts * nodes.per_host}",
            f"--start-timeout={_NODES_S}",
            *flags,
            *([] if secret else ["--allow-no-token"]),
        ],
        "env": [_field("PATHWAYS_HEAD", _COORDINATOR), *token],
        "ports": _ports(SERVER_PORT, RESOURCE_MANAGER_PORT),
        # An init container that is restarted always is a sidecar: it does not keep the pod alive.
        "restartPolicy": "Always",
    }
    main = {
        "name": "main",
        "image": image,
        "command": list(command),
        "env": [
            _field("PATHWAYS_HEAD", _COORDINATOR),
            {"name": "JAX_PLATFORMS", "value": "proxy"},
            {"name": "JAX_BACKEND_TARGET", "value": f"grpc://$(PATHWAYS_HEAD):{SERVER_PORT}"},
            *token,
        ],
    }
    return {"initContainers": [proxy], "containers": [main]}


def worker_pod(
    *, image: str, nodes: Nodes, slices: int, flags: Sequence[str], secret: str | None
) -> dict[str, Any]:
    """A host of a slice of the single controller."""
    container = {
        "name": "pathways-worker",
        "image": image,
        "command": ["regrow", "worker"],
        "args": [
            f"--server_port={WORKER_PORT}",
            f"--resource_manager_address=$(PATHWAYS_HEAD):{RESOURCE_MANAGER_PORT}",
            *flags,
        ],
        "env": [
            _field("PATHWAYS_HEAD", _COORDINATOR),
            *_place(nodes, slices),
            *_token(secret),
        ],
        "ports": _ports(WORKER_PORT),
        "resources": _resources(nodes),
    }
    return {"containers": [container]} | _scheduling(nodes)


def program_pod(*, image: str, nodes: Nodes, slices: int, command: Sequence[str]) -> dict[str, Any]:
    """A host of a multi-controller program: the same command on every host, each with its rank."""
    environ = [
        _field("COORDINATOR", _COORDINATOR),
        {"name": "JAX_COORDINATOR_ADDRESS", "value": f"$(COORDINATOR):{JAX_PORT}"},
        {"name": "JAX_NUM_PROCESSES", "value": str(slices * nodes.hosts)},
        *_place(nodes, slices),
    ]
    container = {
        "name": "main",
        "image": image,
        "command": ["sh", "-c", _RANKED, *command],
        "env": environ,
        "ports": _ports(JAX_PORT, MEGASCALE_PORT),
        "resources": _resources(nodes),
    }
    return {"containers": [container]} | _scheduling(nodes)


def spare_pod(*, image: str, nodes: Nodes) -> dict[str, Any]:
    """A pod that does nothing but hold a node, until one of higher priority needs it."""
    container = {
        "name": "spare",
        "image": image,
        "command": ["sleep", "infinity"],
        "resources": _resources(nodes),
    }
    return {"containers": [container]} | _scheduling(nodes)


def _place(nodes: Nodes, slices: int) -> list[dict[str, Any]]:
    """Which host of which slice a pod is."""
    environ = [
        _field("JAX_PARTITION_INDEX", _SLICE_INDEX),
        _field("HOST_INDEX", _HOST_INDEX),
        {"name": "HOSTS_PER_SLICE", "value": str(nodes.hosts)},
    ]
    if nodes.platform == "tpu" and slices > 1:
        environ += [
            _field("MEGASCALE_SLICE_ID", _SLICE_INDEX),
            {"name": "MEGASCALE_NUM_SLICES", "value": str(slices)},
            _field("MEGASCALE_COORDINATOR_HOST", _COORDINATOR),
            {
                "name": "MEGASCALE_COORDINATOR_ADDRESS",
                "value": f"$(MEGASCALE_COORDINATOR_HOST):{MEGASCALE_PORT}",
            },
        ]
    return environ


def _scheduling(nodes: Nodes) -> dict[str, Any]:
    selector: Mapping[str, str] = nodes.selector
    scheduling: dict[str, Any] = {"nodeSelector": dict(selector)} if selector else {}
    if nodes.platform == "tpu":
        scheduling |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return scheduling


def _resources(nodes: Nodes) -> dict[str, Any]:
    amount = {nodes.resource: nodes.per_host}
    return {"requests": dict(amount), "limits": amount}


def _ports(*numbers: int) -> list[dict[str, Any]]:
    return [{"containerPort": number, "protocol": "TCP"} for number in numbers]


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _token(secret: str | None) -> list[dict[str, Any]]:
    if secret is None:
        return []
    source = {"secretKeyRef": {"name": secret, "key": "token"}}
    return [{"name": "REGROW_TOKEN", "valueFrom": source}]
