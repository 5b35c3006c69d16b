"""The nodes that the pods of a slice are scheduled on.

Labels and resource names: cloud.google.com/kubernetes-engine/docs/concepts/tpus and .../gpus.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal, final

from regrow.errors import UsageError
from regrow.planning.accelerators import GENERATIONS, Accelerator, accelerator

Platform = Literal["tpu", "gpu", "cpu"]
_LABEL: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_HOST_CHIPS: Final = 4
"""Chips of a node of the pools below; a smaller slice is one node."""

_TPUS: Final = MappingProxyType(
    {
        "v4": "tpu-v4-podslice",
        "v5e": "tpu-v5-lite-podslice",
        "v5p": "tpu-v5p-slice",
        "v6e": "tpu-v6e-slice",
        "tpu7x": "tpu7x",
    }
)
"""Value of the label cloud.google.com/gke-tpu-accelerator, by generation."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """What a slice is made of.

    Attributes:
        platform: Kind of its devices.
        hosts: Its pods, one a node.
        resource: The resource that the devices of a pod are.
        per_host: How many of it each pod gets.
        selector: Labels of the nodes.
        pool_label: A label whose value is the same for all nodes of one slice, and only for them.
    """

    platform: Platform
    hosts: int
    resource: str
    per_host: int
    selector: Mapping[str, str] = field(default_factory=dict)
    pool_label: str | None = None

    def __post_init__(self) -> None:
        for what, value in (("hosts", self.hosts), ("devices of a host", self.per_host)):
            if type(value) is not int or value < 1:
                raise UsageError(f"{what} are {value!r}; it must be a number from 1 up")


def tpu_nodes(text: str) -> Nodes:
    """The nodes of a TPU slice: an accelerator type such as "v5p-16", or "v5p:2x2x2".

    Raises:
        UsageError: If there is no such slice, or none on Kubernetes.
    """
    one = _topology(text) if ":" in text else accelerator(text)
    label = _TPUS.get(one.generation.name)
    if label is None:
        raise UsageError(f"Kubernetes has no TPU {one.generation.name}; it has: {', '.join(_TPUS)}")
    per_host = min(one.chips, _HOST_CHIPS)
    return Nodes(
        platform="tpu",
        hosts=one.chips // per_host,
        resource="google.com/tpu",
        per_host=per_host,
        selector={
            "cloud.google.com/gke-tpu-accelerator": label,
            "cloud.google.com/gke-tpu-topology": one.topology,
        },
        pool_label="cloud.google.com/gke-nodepool",
    )


def _topology(text: str) -> Accelerator:
    name, _, topology = text.partition(":")
    generation = GENERATIONS.get(name)
    if generation is None:
        raise UsageError(f"there is no TPU {name!r}; there are: {', '.join(_TPUS)}")
    if topology not in generation.topologies.values():
        raise UsageError(
            f"there is no {name} slice of topology {topology!r}; there are: "
            f"{', '.join(generation.topologies.values())}"
        )
    return Accelerator(text, generation, topology)


def gpu_nodes(text: str, hosts: int) -> Nodes:
    """The nodes of a slice of GPUs, from model and number a host, such as "nvidia-h100-80gb:8".

    Raises:
        UsageError: If it is no such text.
    """
    model, _, number = text.rpartition(":")
    if not _LABEL.fullmatch(model) or not number.isdecimal():
        raise UsageError(f"{text!r} is no MODEL:NUMBER of GPUs, such as nvidia-h100-80gb:8")
    selector = {"cloud.google.com/gke-accelerator": model}
    return Nodes(
        platform="gpu",
        hosts=hosts,
        resource="nvidia.com/gpu",
        per_host=int(number),
        selector=selector,
    )


def cpu_nodes(cores: int, hosts: int) -> Nodes:
    """The nodes of a slice of CPU devices, one for each of so many cores of a host."""
    return Nodes(platform="cpu", hosts=hosts, resource="cpu", per_host=cores)
