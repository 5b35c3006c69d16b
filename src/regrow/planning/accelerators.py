"""TPU generations and the slices that are made of them: shapes, speeds, and where these are from.

Unless a generation says otherwise, its numbers are those of cloud.google.com/tpu/docs/<generation>.
Speeds are peaks for bfloat16. What no source gives is None.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, final

from regrow.errors import UsageError

GIB: Final = 2**30


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A TPU generation.

    Attributes:
        name: Say "v5e".
        prefix: What its accelerator types begin with, say "v5litepod".
        cores_per_chip: What a type's number counts for each chip: TensorCores, or 1 for chips.
        devices_per_chip: Devices that JAX shows for each chip.
        device_kinds: What JAX calls its devices.
        largest_vm_chips: A slice of at most so many chips is one VM; larger ones have 4 a VM.
        multislice: Whether several slices of it can be one Multislice.
        topologies: The topology by the number in the type's name.
        peak_flops_per_s: Of a chip, FLOP/s.
        hbm_bytes: Of a chip.
        hbm_bytes_per_s: Of a chip.
        ici_bytes_per_s: Of a chip, all its links, both directions.
        dcn_bits_per_s: Of a physical host, each direction.
        dcn_host_chips: Chips of a physical host, which share its network; a host can hold two VMs.
        sources: Where the numbers are from, beyond the generation's own page.
    """

    name: str
    prefix: str
    cores_per_chip: int
    devices_per_chip: int
    device_kinds: tuple[str, ...]
    largest_vm_chips: int
    multislice: bool
    topologies: Mapping[int, str]
    peak_flops_per_s: float
    hbm_bytes: float
    hbm_bytes_per_s: float
    ici_bytes_per_s: float | None
    dcn_bits_per_s: float | None
    dcn_host_chips: int
    sources: str


@final
@dataclass(frozen=True, slots=True)
class Accelerator:
    """The shape of a slice.

    Attributes:
        name: The accelerator type, say "v4-16".
        generation: What it is made of.
        topology: Chips along each axis, say "2x2x2".
    """

    name: str
    generation: Generation
    topology: str

    @property
    def chips(self) -> int:
        """Chips of a slice."""
        return math.prod(int(axis) for axis in self.topology.split("x"))

    @property
    def chips_per_host(self) -> int:
        """Chips of each VM."""
        return self.chips if self.chips <= self.generation.largest_vm_chips else 4

    @property
    def hosts(self) -> int:
        """VMs of a slice."""
        return self.chips // self.chips_per_host

    @property
    def devices(self) -> int:
        """Devices that JAX shows for a slice."""
        return self.chips * self.generation.devices_per_chip


_TORUS_2D: Final = {8: "2x2", 32: "4x4", 64: "4x8", 128: "8x8", 256: "8x16", 512: "16x16"}
_TORUS_3D: Final = {
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
_CHIPS_2D: Final = {
    1: "1x1",
    4: "2x2",
    8: "2x4",
    16: "4x4",
    32: "4x8",
    64: "8x8",
    128: "8x16",
    256: "16x16",
}

_GENERATIONS: Final = (
    Generation(
        name="v2",
        prefix="v2",
        cores_per_chip=2,
        devices_per_chip=2,
        device_kinds=("TPU v2",),
        largest_vm_chips=4,
        multislice=False,
        topologies=_TORUS_2D,
        peak_flops_per_s=45e12,
        hbm_bytes=16 * GIB,
        hbm_bytes_per_s=700e9,
        ici_bytes_per_s=None,
        dcn_bits_per_s=None,
        dcn_host_chips=4,
        sources="peak and memory as commonly cited (the page gives no table)",
    ),
    Generation(
        name="v3",
        prefix="v3",
        cores_per_chip=2,
        devices_per_chip=2,
        device_kinds=("TPU v3",),
        largest_vm_chips=4,
        multislice=False,
        topologies=_TORUS_2D | {1024: "16x32", 2048: "32x32"},
        peak_flops_per_s=123e12,
        hbm_bytes=32 * GIB,
        hbm_bytes_per_s=900e9,
        ici_bytes_per_s=4 * 200e9,
        dcn_bits_per_s=None,
        dcn_host_chips=4,
        sources="ICI, 4 links: jax-ml.github.io/scaling-book/tpus",
    ),
    Generation(
        name="v4",
        prefix="v4",
        cores_per_chip=2,
        devices_per_chip=1,
        device_kinds=("TPU v4",),
        largest_vm_chips=4,
        multislice=True,
        topologies=_TORUS_3D,
        peak_flops_per_s=275e12,
        hbm_bytes=32 * GIB,
        hbm_bytes_per_s=1200e9,
        ici_bytes_per_s=6 * 90e9,
        dcn_bits_per_s=50e9,
        dcn_host_chips=4,
        sources="DCN: cloud.google.com/tpu/docs/multislice-introduction; "
        "ICI, 6 links: jax-ml.github.io/scaling-book/tpus",
    ),
    Generation(
        name="v5e",
        prefix="v5litepod",
        cores_per_chip=1,
        devices_per_chip=1,
        device_kinds=("TPU v5 lite", "TPU v5e"),
        largest_vm_chips=8,
        multislice=True,
        topologies=_CHIPS_2D,
        peak_flops_per_s=197e12,
        hbm_bytes=16e9,
        hbm_bytes_per_s=819e9,
        ici_bytes_per_s=400e9,
        dcn_bits_per_s=2 * 100e9,
        dcn_host_chips=8,
        sources="",
    ),
    Generation(
        name="v5p",
        prefix="v5p",
        cores_per_chip=2,
        devices_per_chip=1,
        device_kinds=("TPU v5", "TPU v5p"),
        largest_vm_chips=4,
        multislice=True,
        topologies=_TORUS_3D | {8192: "16x16x16", 12288: "16x16x24"},
        peak_flops_per_s=459e12,
        hbm_bytes=95 * GIB,
        hbm_bytes_per_s=2765e9,
        ici_bytes_per_s=1200e9,
        dcn_bits_per_s=4 * 50e9,
        dcn_host_chips=4,
        sources="",
    ),
    Generation(
        name="v6e",
        prefix="v6e",
        cores_per_chip=1,
        devices_per_chip=1,
        device_kinds=("TPU v6 lite", "TPU v6e"),
        largest_vm_chips=8,
        multislice=True,
        topologies=_CHIPS_2D,
        peak_flops_per_s=918e12,
        hbm_bytes=32e9,
        hbm_bytes_per_s=1638e9,
        ici_bytes_per_s=800e9,
        dcn_bits_per_s=4 * 200e9,
        dcn_host_chips=8,
        sources="DCN as commonly cited, not verified",
    ),
    Generation(
        name="tpu7x",
        prefix="tpu7x",
        cores_per_chip=2,
        devices_per_chip=2,
        device_kinds=("TPU7x", "TPU v7", "TPU v7x"),
        largest_vm_chips=4,
        multislice=True,
        topologies=_TORUS_3D,
        peak_flops_per_s=2307e12,
        hbm_bytes=192 * GIB,
        hbm_bytes_per_s=7380e9,
        ici_bytes_per_s=1200e9,
        dcn_bits_per_s=None,
        dcn_host_chips=4,
        sources="not in the Cloud TPU API: GKE and Compute Engine only",
    ),
)

GENERATIONS: Final[Mapping[str, Generation]] = MappingProxyType(
    {generation.name: generation for generation in _GENERATIONS}
)
"""By name."""

ACCELERATORS: Final[Mapping[str, Accelerator]] = MappingProxyType(
    {
        f"{generation.prefix}-{number}": Accelerator(
            f"{generation.prefix}-{number}", generation, topology
        )
        for generation in _GENERATIONS
        for number, topology in generation.topologies.items()
    }
)
"""By accelerator type."""

_TYPE: Final = re.compile(r"([a-z0-9]+)-([0-9]+)")


def accelerator(name: str) -> Accelerator:
    """The slice of an accelerator type, such as "v4-16"; "v5e-16" is "v5litepod-16".

    Raises:
        UsageError: There is no such type; tells those of its generation.
    """
    match = _TYPE.fullmatch(name)
    generation = _generation(match.group(1)) if match else None
    if match is None or generation is None:
        near = difflib.get_close_matches(name, ACCELERATORS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(
            f"{name!r} is no accelerator type{hint}; write a generation "
            f"({', '.join(one.prefix for one in _GENERATIONS)}) and a size, such as v4-16"
        )
    found = ACCELERATORS.get(f"{generation.prefix}-{match.group(2)}")
    if found is None:
        counts = "chips" if generation.cores_per_chip == 1 else "TensorCores"
        raise UsageError(
            f"there is no accelerator type {name}; the number counts {counts}, and those of "
            f"{generation.prefix} are {', '.join(map(str, generation.topologies))}"
        )
    return found


def generation_of_device(device_kind: str) -> Generation | None:
    """What a device is made of that JAX calls `device_kind`; None if it is no TPU of these."""
    return next((one for one in _GENERATIONS if device_kind in one.device_kinds), None)


def _generation(prefix: str) -> Generation | None:
    return next((one for one in _GENERATIONS if prefix in (one.prefix, one.name)), None)
