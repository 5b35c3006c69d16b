"""Accelerator types: what a slice of a name is made of.

Sources: cloud.google.com/tpu/docs/v2 to v6e (chips per VM, topologies, names), and the enum
AcceleratorConfig.Type of the Cloud TPU API, which has no v7.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final, final


@final
@dataclass(frozen=True, slots=True)
class Generation:
    """A TPU generation.

    Attributes:
        name: As capacity and quotas are configured, say "v5e".
        type: Its name in AcceleratorConfig.Type.
        prefix: What accelerator types of it begin with, say "v5litepod".
        cores_per_chip: What a name counts for each chip: TensorCores, or 1 where it counts chips.
        devices_per_chip: Devices that JAX shows for each chip.
        dimensions: Of its torus.
        largest_vm_chips: A slice of at most so many chips is one VM.
        multislice: Whether several slices of it can be one Multislice.
        runtime_version: The software version that is advised for it.
        topologies: Topology by the number in the name.
    """

    name: str
    type: str
    prefix: str
    cores_per_chip: int
    devices_per_chip: int
    dimensions: int
    largest_vm_chips: int
    multislice: bool
    runtime_version: str
    topologies: dict[int, str]


@final
@dataclass(frozen=True, slots=True)
class Accelerator:
    """The shape of a slice.

    Attributes:
        name: The accelerator type, say "v4-16".
        generation: Its generation.
        topology: Chips along each axis, say "2x2x2".
    """

    name: str
    generation: Generation
    topology: str

    @property
    def chips(self) -> int:
        """Chips of a slice."""
        return math.prod(_axes(self.topology))

    @property
    def hosts(self) -> int:
        """VMs of a slice: as many network endpoints does the API show."""
        return max(1, self.chips // self.chips_per_host)

    @property
    def chips_per_host(self) -> int:
        """Chips of each VM."""
        return self.chips if self.chips <= self.generation.largest_vm_chips else 4

    @property
    def devices_per_host(self) -> int:
        """Devices that JAX shows on each VM."""
        return self.chips_per_host * self.generation.devices_per_chip

    @property
    def host_axes(self) -> tuple[int, int, int]:
        """Chips of a VM along each axis."""
        if self.chips_per_host == self.chips:
            return _three(_axes(self.topology))
        return (2, 2, 1)

    @property
    def slice_axes(self) -> tuple[int, int, int]:
        """VMs of the slice along each axis."""
        x, y, z = _three(_axes(self.topology))
        a, b, c = self.host_axes
        return (x // a, y // b, z // c)

    @property
    def wraps(self) -> tuple[bool, bool, bool]:
        """Along which axes the chips form a ring: whole cubes in 3D, 16 in a row in 2D."""
        axes = _three(_axes(self.topology))
        if self.generation.dimensions == 3:
            whole = all(axis % 4 == 0 for axis in axes)
            return (whole, whole, whole)
        return (axes[0] == 16, axes[1] == 16, False)


def _axes(topology: str) -> tuple[int, ...]:
    return tuple(int(axis) for axis in topology.split("x"))


def _three(axes: tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*axes, 1, 1)[:3]
    return (x, y, z)


_2D_CORES: Final = {8: "2x2", 32: "4x4", 64: "4x8", 128: "8x8", 256: "8x16", 512: "16x16"}
_3D_CORES: Final = {
    8: "2x2x1",
    16: "2x2x2",
    32: "2x2x4",
    64: "2x4x4",
    128: "4x4x4",
    256: "4x4x8",
    512: "4x8x8",
    1024: "8x8x8",
    2048: "8x8x16",
    4096: "8x16x16",
}
_CHIPS: Final = {
    1: "1x1",
    4: "2x2",
    8: "2x4",
    16: "4x4",
    32: "4x8",
    64: "8x8",
    128: "8x16",
    256: "16x16",
}

_BASE: Final = "tpu-ubuntu2204-base"
GENERATIONS: Final = {
    generation.name: generation
    for generation in (
        Generation("v2", "V2", "v2", 2, 2, 2, 4, False, _BASE, _2D_CORES),
        Generation(
            "v3", "V3", "v3", 2, 2, 2, 4, False, _BASE, _2D_CORES | {1024: "16x32", 2048: "32x32"}
        ),
        Generation("v4", "V4", "v4", 2, 1, 3, 4, True, _BASE, _3D_CORES),
        Generation(
            "v5e", "V5LITE_POD", "v5litepod", 1, 1, 2, 8, True, "v2-alpha-tpuv5-lite", _CHIPS
        ),
        Generation(
            "v5p",
            "V5P",
            "v5p",
            2,
            1,
            3,
            4,
            True,
            "v2-alpha-tpuv5",
            _3D_CORES | {8192: "16x16x16", 12288: "16x16x24"},
        ),
        Generation("v6e", "V6E", "v6e", 1, 1, 2, 8, True, "v2-alpha-tpuv6e", _CHIPS),
    )
}
"""By name."""

ACCELERATORS: Final = {
    f"{generation.prefix}-{number}": Accelerator(
        f"{generation.prefix}-{number}", generation, topology
    )
    for generation in GENERATIONS.values()
    for number, topology in generation.topologies.items()
}
"""By accelerator type."""

_TOPOLOGY: Final = re.compile(r"[1-9]\d{0,2}(x[1-9]\d{0,2}){1,2}")


def by_topology(type_name: str, topology: str) -> Accelerator | None:
    """The shape that an AcceleratorConfig asks for; None if there is none such.

    Besides the named topologies a 3D generation has every one whose axes do not decrease, are 1, 2
    or a multiple of 4, and which is no larger than its largest named one.
    """
    generation = next((one for one in GENERATIONS.values() if one.type == type_name), None)
    if generation is None or not _TOPOLOGY.fullmatch(topology):
        return None
    for number, named in generation.topologies.items():
        if named == topology:
            return ACCELERATORS[f"{generation.prefix}-{number}"]
    axes = _axes(topology)
    number = math.prod(axes) * generation.cores_per_chip
    fits = (
        generation.dimensions == len(axes) == 3
        and list(axes) == sorted(axes)
        and all(axis == 2 or axis % 4 == 0 for axis in axes)
        and number <= max(generation.topologies)
    )
    return Accelerator(f"{generation.prefix}-{number}", generation, topology) if fits else None
