"""Accelerator types: what a slice of a name is made of.

What a generation is made of is told in `planning.accelerators`; here is what the Cloud TPU API adds
to it. The enum AcceleratorConfig.Type has no v7.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

from regrow.planning import accelerators as planning


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
    topologies: Mapping[int, str]


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


def _served(name: str, type_name: str, dimensions: int, runtime_version: str) -> Generation:
    one = planning.GENERATIONS[name]
    return Generation(
        name=name,
        type=type_name,
        prefix=one.prefix,
        cores_per_chip=one.cores_per_chip,
        devices_per_chip=one.devices_per_chip,
        dimensions=dimensions,
        largest_vm_chips=one.largest_vm_chips,
        multislice=one.multislice,
        runtime_version=runtime_version,
        topologies=one.topologies,
    )


GENERATIONS: Final = {
    generation.name: generation
    for generation in (
        _served("v2", "V2", 2, "tpu-ubuntu2204-base"),
        _served("v3", "V3", 2, "tpu-ubuntu2204-base"),
        _served("v4", "V4", 3, "tpu-ubuntu2204-base"),
        _served("v5e", "V5LITE_POD", 2, "v2-alpha-tpuv5-lite"),
        _served("v5p", "V5P", 3, "v2-alpha-tpuv5"),
        _served("v6e", "V6E", 2, "v2-alpha-tpuv6e"),
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
