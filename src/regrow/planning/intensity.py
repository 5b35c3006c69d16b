"""The arithmetic of the Multislice page: when does the network between slices keep up?

Source, where nothing else is named: cloud.google.com/tpu/docs/multislice-introduction, section
"Sharding with Multislice for maximum performance". Units: FLOP, bits, tokens, seconds. A batch is
that of one slice ("per pod" on the page) unless its name says otherwise.

A collective over n ranks moves (n-1)/n of an array in and out of each rank. The page takes 1/2 of it
for two slices, and the limit, 1, for more: 32 and up to 64 bits a parameter for the all-reduce of
gradients of 32 bits, which is a reduce-scatter and an all-gather.
"""

from __future__ import annotations

import math
from typing import Final

GRADIENT_BITS: Final = 32
"""Bits of a gradient on the network (the page's 32 bits a parameter with two slices)."""

WEIGHT_BITS: Final = 32
"""Bits of a gathered weight; 32 makes FSDP's need equal to data parallelism's, as on the page."""

FORWARD_FLOP: Final = 2.0
"""FLOP a parameter and token of a transformer's forward pass: the page's 6 less its 4."""

BACKWARD_FLOP: Final = 4.0
"""FLOP a parameter and token of a transformer's backward pass."""

MARGIN: Final = 350_000 / 176_000
"""By how much the page wants the batch above the least: the network may drop packets for a while."""


def hardware_intensity(flops_per_s: float, chips: int, dcn_bits_per_s: float) -> float:
    """FLOP that a host can do in the time of one bit on its network, FLOP/bit.

    Args:
        flops_per_s: Peak of a chip.
        chips: Chips that share the network.
        dcn_bits_per_s: Of the host.

    With TPU v4 it is 4 * 275e12 / 50e9 = 22,000.
    """
    return chips * flops_per_s / dcn_bits_per_s


def network_share(ranks: int) -> float:
    """The part of an array that a reduce-scatter or an all-gather moves: 0, 1/2, then 1."""
    return 0.0 if ranks == 1 else 0.5 if ranks == 2 else 1.0


def data_parallel_bits(slices: int, gradient_bits: float = GRADIENT_BITS) -> float:
    """Bits a parameter and step of the all-reduce of gradients: 32 for two slices, then 64."""
    return 2 * network_share(slices) * gradient_bits


def fsdp_forward_bits(slices: int, weight_bits: float = WEIGHT_BITS) -> float:
    """Bits a parameter of FSDP across slices in the forward pass: weights are gathered."""
    return network_share(slices) * weight_bits


def fsdp_backward_bits(
    slices: int, gradient_bits: float = GRADIENT_BITS, weight_bits: float = WEIGHT_BITS
) -> float:
    """The same in the backward pass: weights are gathered again, gradients reduced and scattered."""
    return network_share(slices) * (weight_bits + gradient_bits)


def split_bits(
    data: int,
    fsdp: int,
    gradient_bits: float = GRADIENT_BITS,
    weight_bits: float = WEIGHT_BITS,
) -> tuple[float, float, float]:
    """Bits a parameter when `data` replicas are each spread over `fsdp` slices.

    Returns:
        What a forward pass gathers; what a backward pass gathers and scatters; and the all-reduce of
        the scattered gradients, once a step. With one kind of parallelism they are those of the
        functions above; and for weights as wide as gradients the latter two sum up to the same,
        however the slices are split.
    """
    slices = data * fsdp
    if slices == 1:
        return (0.0, 0.0, 0.0)
    rounded = network_share(slices) / ((slices - 1) / slices)
    spread = rounded * (fsdp - 1) / fsdp
    replicated = rounded * (data - 1) / data / fsdp
    return (
        spread * weight_bits,
        spread * (weight_bits + gradient_bits),
        2 * replicated * gradient_bits,
    )


def operational_intensity(
    batch_tokens: float, bits: float, flop_per_token: float = BACKWARD_FLOP
) -> float:
    """FLOP that a pass does for each bit it sends, FLOP/bit; infinite if it sends none.

    With 4 FLOP a parameter and token: 4 B / 32 for two slices, 4 B / 64 for more.
    """
    return flop_per_token * batch_tokens / bits if bits else math.inf


def data_parallel_intensity(batch_tokens: float, slices: int) -> float:
    """Operational intensity of data parallelism across slices, FLOP/bit."""
    return operational_intensity(batch_tokens, data_parallel_bits(slices))


def fsdp_intensity(batch_tokens: float, slices: int, weight_bits: float = WEIGHT_BITS) -> float:
    """Operational intensity of FSDP across slices, FLOP/bit: that of its tighter pass."""
    backward = fsdp_backward_bits(slices, weight_bits=weight_bits)
    forward = fsdp_forward_bits(slices, weight_bits)
    return min(
        operational_intensity(batch_tokens, backward),
        operational_intensity(batch_tokens, forward, FORWARD_FLOP),
    )


def least_batch(
    hardware: float, bits: float, flop_per_token: float = BACKWARD_FLOP, depth: int = 1
) -> float:
    """The batch of a slice, in tokens, from which on the network hides behind the arithmetic.

    Args:
        hardware: Intensity of the hardware, FLOP/bit.
        bits: Bits a parameter that the pass sends.
        flop_per_token: FLOP a parameter and token of the pass.
        depth: Slices that share a batch, as stages of a pipeline.

    TPU v4 and data parallelism: 176,000 with two slices, 352,000 with more.
    """
    return hardware * bits / flop_per_token / depth


def advised_batch(least_tokens: float) -> float:
    """The least batch with the page's margin; TPU v4: 350,000 and 700,000."""
    return MARGIN * least_tokens


def pipeline_shapes(slices: int) -> list[tuple[int, int]]:
    """Depth and replicas of the pipelines to consider, in the page's order.

    2 and N/2, then 4 and N/4, and so on; where N is no power of two, all its divisors.
    """
    return [(depth, slices // depth) for depth in range(2, slices + 1) if slices % depth == 0]


def least_pipeline(hardware: float, batch_tokens: float, slices: int) -> tuple[int, int]:
    """Depth and replicas of the shallowest pipeline whose network hides with the page's margin.

    Args:
        hardware: Intensity of the hardware, FLOP/bit.
        batch_tokens: Of one slice; the `depth` slices of a pipeline share theirs.
        slices: All there are.

    Returns:
        Depth 1 if plain data parallelism will do; depth `slices` at most, which reduces nothing.
    """
    shapes = [(1, slices), *pipeline_shapes(slices)]
    return next(
        (depth, replicas)
        for depth, replicas in shapes
        if batch_tokens
        >= advised_batch(least_batch(hardware, data_parallel_bits(replicas), depth=depth))
    )


def pipeline_bubble(depth: int, microbatches: int) -> float:
    """The part of a step in which a stage waits (Huang et al. 2019, arXiv:1811.06965)."""
    return (depth - 1) / (microbatches + depth - 1)
