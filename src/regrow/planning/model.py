"""What a plan is made for: a model, and the slices that train it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, final

from regrow.errors import UsageError
from regrow.planning import intensity
from regrow.planning.accelerators import Accelerator

STATE_BYTES: Final = 16.0
"""Weights, gradients and Adam's two moments in 32 bits (16 with mixed precision, too:
Rajbhandari et al. 2019, arXiv:1910.02054, section 3.1)."""

_ACTIVATION_BYTES: Final = 2
_LAYER_ACTIVATION_BYTES: Final = 34
_WIDTH_TO_DEPTH: Final = 128
MAX_SLICES: Final = 256


@final
@dataclass(frozen=True, slots=True)
class Model:
    """A transformer, or what is near enough to one.

    Attributes:
        parameters: All of them.
        active_parameters: Those that a token meets (mixture of experts); None: all.
        layers, embedding: Its depth and width; None: guessed from the parameters.
        gradient_bits, weight_bits: Of a parameter, on the network.
        state_bytes: Of a parameter, in memory: weight, gradient, optimizer.
    """

    parameters: float
    active_parameters: float | None = None
    layers: int | None = None
    embedding: int | None = None
    gradient_bits: float = intensity.GRADIENT_BITS
    weight_bits: float = intensity.WEIGHT_BITS
    state_bytes: float = STATE_BYTES

    def __post_init__(self) -> None:
        _positive("parameters", self.parameters)
        for name in ("active_parameters", "layers", "embedding"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        for name in ("gradient_bits", "weight_bits", "state_bytes"):
            _positive(name, getattr(self, name))
        if self.active > self.parameters:
            raise UsageError(
                f"{self.active:g} active parameters are more than all {self.parameters:g}"
            )

    @property
    def active(self) -> float:
        """Parameters that a token meets."""
        return self.active_parameters or self.parameters

    @property
    def width(self) -> float:
        """The embedding; guessed with 12 L D^2 parameters (Kaplan et al. 2020, arXiv:2001.08361)."""
        if self.embedding:
            return self.embedding
        if self.layers:
            return math.sqrt(self.active / (12 * self.layers))
        return math.cbrt(self.active * _WIDTH_TO_DEPTH / 12)

    @property
    def depth(self) -> float:
        """The number of layers; guessed as a 128th of the width."""
        if self.layers:
            return self.layers
        return max(1.0, self.active / (12 * self.width**2))

    def activation_bytes(self, stages: int) -> float:
        """Bytes a token in flight, for a stage.

        The input of each layer is kept and the layer computed again in the backward pass; the layer
        under work takes 34 bytes an element (Korthikanti et al. 2022, arXiv:2205.05198, eq. 1,
        without attention scores).
        """
        kept = _ACTIVATION_BYTES * self.depth / stages
        return (kept + _LAYER_ACTIVATION_BYTES) * self.width

    @property
    def boundary_bits(self) -> float:
        """Bits a token that a pipeline's stage hands on, each way."""
        return 8 * _ACTIVATION_BYTES * self.width


@final
@dataclass(frozen=True, slots=True)
class Slices:
    """Equal slices, and what they can do.

    Attributes:
        slices: How many.
        chips: Of a slice.
        vm_chips: Of a VM; tensor parallelism stays within that many.
        flops_per_s, hbm_bytes, dcn_bits_per_s: Of a chip.
        ici_bytes_per_s: Of a chip, both directions; None if unknown.
        name: What they are called.
    """

    slices: int
    chips: int
    vm_chips: int
    flops_per_s: float
    hbm_bytes: float
    dcn_bits_per_s: float
    ici_bytes_per_s: float | None = None
    name: str = "custom"

    def __post_init__(self) -> None:
        for name in ("slices", "chips", "vm_chips", "flops_per_s", "hbm_bytes"):
            _positive(name, getattr(self, name))
        if self.slices > 1:
            _positive("dcn_bits_per_s", self.dcn_bits_per_s)
        if self.slices > MAX_SLICES:
            raise UsageError(f"{self.slices} slices: a Multislice has at most {MAX_SLICES}")

    @property
    def intensity(self) -> float:
        """FLOP that can be done in the time of one bit on the network between slices."""
        return intensity.hardware_intensity(self.flops_per_s, 1, self.dcn_bits_per_s)


def slices_of(
    accelerator: Accelerator,
    slices: int,
    *,
    flops_per_s: float | None = None,
    hbm_bytes: float | None = None,
    dcn_bits_per_s: float | None = None,
) -> Slices:
    """Slices of an accelerator type; what was measured replaces what the table says.

    Args:
        accelerator: The type.
        slices: How many.
        flops_per_s: Of a chip.
        hbm_bytes: Of a chip.
        dcn_bits_per_s: Of a slice, as `regrow bench dcn` measures it.

    Raises:
        UsageError: This type cannot be several slices, or its network is not known.
    """
    made_of = accelerator.generation
    if slices > 1 and not made_of.multislice:
        raise UsageError(f"{accelerator.name}: Multislice needs TPU v4 or later")
    if dcn_bits_per_s is not None:
        chip_dcn = dcn_bits_per_s / accelerator.chips
    elif made_of.dcn_bits_per_s is not None:
        chip_dcn = made_of.dcn_bits_per_s / made_of.dcn_host_chips
    elif slices == 1:
        chip_dcn = float("inf")
    else:
        raise UsageError(
            f"no source gives the bandwidth between slices of {made_of.name}; give what "
            "`regrow bench dcn` measures as --dcn-gbits-per-slice"
        )
    return Slices(
        slices=slices,
        chips=accelerator.chips,
        vm_chips=accelerator.chips_per_host,
        flops_per_s=made_of.peak_flops_per_s if flops_per_s is None else flops_per_s,
        hbm_bytes=made_of.hbm_bytes if hbm_bytes is None else hbm_bytes,
        dcn_bits_per_s=chip_dcn,
        ici_bytes_per_s=made_of.ici_bytes_per_s,
        name=accelerator.name,
    )


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise UsageError(f"{name} is {value:g}; it must be a number above 0")
