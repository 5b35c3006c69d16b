"""The nodes that the pods of a slice are scheduled on.

Labels and resource names: cloud.google.com/kubernetes-engine/docs/concepts/tpus and .../gpus.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal, final

from regrow.errors import UsageError

Platform = Literal["tpu", "gpu", "cpu"]
_LABEL: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_FLAT: Final = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_DEEP: Final = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8"),
    *("8x8x8", "8x8x16", "8x16x16", "16x16x16", "16x16x24"),
)


@final
@dataclass(frozen=True, slots=True)
class _Tpu:
    """A TPU generation as node pools have it; a slice of up to `single_host` chips is one host."""

    label: str
    topologies: tuple[str, ...]
    single_host: int = 4


_TPUS: Final = MappingProxyType(
    {
        "v4": _Tpu("tpu-v4-podslice", _DEEP[:-2]),
        "v5e": _Tpu("tpu-v5-lite-podslice", _FLAT),
        "v5p": _Tpu("tpu-v5p-slice", _DEEP),
        "v6e": _Tpu("tpu-v6e-slice", _FLAT),
        "tpu7x": _Tpu("tpu7x", _DEEP[:-2]),
    }
)


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
    """The nodes of a TPU slice, from its generation and topology, such as "v5p:2x2x2".

    Raises:
        UsageError: If there is no such slice.
    """
    generation, _, topology = text.partition(":")
    kind = _TPUS.get(generation)
    if kind is None:
        raise UsageError(f"there is no TPU {generation!r}; there are: {', '.join(_TPUS)}")
    if topology not in kind.topologies:
        raise UsageError(
            f"there is no {generation} slice of topology {topology!r}; there are: "
            f"{', '.join(kind.topologies)}"
        )
    chips = math.prod(int(axis) for axis in topology.split("x"))
    per_host = min(chips, kind.single_host)
    return Nodes(
        platform="tpu",
        hosts=chips // per_host,
        resource="google.com/tpu",
        per_host=per_host,
        selector={
            "cloud.google.com/gke-tpu-accelerator": kind.label,
            "cloud.google.com/gke-tpu-topology": topology,
        },
        pool_label="cloud.google.com/gke-nodepool",
    )


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
