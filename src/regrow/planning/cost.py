"""What a step costs with a way to split it over slices: arithmetic, networks, memory.

The costs are those of peaks (`intensity`), each network hidden behind the arithmetic as far as it
goes: times are lower bounds, good for comparing. The network between slices counts with the page's
margin. What tensor parallelism sends within a slice is not counted, nor are a model's attention scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, final

from regrow.planning import intensity
from regrow.planning.mesh import HybridMesh
from regrow.planning.model import Model, Slices

USABLE_HBM: Final = 0.9
"""The rest is for the program, the runtime and fragmentation."""

MICROBATCHES_PER_STAGE: Final = 4
"""With fewer the bubble counts, with more it hardly shrinks (arXiv:1811.06965, section 3.2)."""

_ROUNDING: Final = 1e-9


@final
@dataclass(frozen=True, slots=True)
class Cost:
    """What one step costs.

    Attributes:
        forward_s, backward_s: Arithmetic.
        dcn_forward_s, dcn_backward_s: The network between slices, without margin.
        ici_forward_s, ici_backward_s: FSDP's within a slice.
        bubble: The part of the step in which a pipeline's stage waits.
        microbatches: In how many parts a batch passes, for the memory's or the pipeline's sake.
        state_bytes, activation_bytes: Of a chip.
    """

    forward_s: float
    backward_s: float
    dcn_forward_s: float
    dcn_backward_s: float
    ici_forward_s: float
    ici_backward_s: float
    bubble: float
    microbatches: int
    state_bytes: float
    activation_bytes: float

    @property
    def memory_bytes(self) -> float:
        """Of a chip."""
        return self.state_bytes + self.activation_bytes

    @property
    def step_s(self) -> float:
        """The step, the network between slices taken with the page's margin."""
        margin = intensity.MARGIN
        forward = max(self.forward_s, margin * self.dcn_forward_s, self.ici_forward_s)
        backward = max(self.backward_s, margin * self.dcn_backward_s, self.ici_backward_s)
        return (forward + backward) / (1 - self.bubble)

    @property
    def headroom(self) -> float:
        """Arithmetic over the network between slices, of the tighter pass: 1 is the least batch."""
        passes = ((self.forward_s, self.dcn_forward_s), (self.backward_s, self.dcn_backward_s))
        return min(work / network if network else math.inf for work, network in passes)

    @property
    def network(self) -> str:
        """Whether the network between slices hides: "none", "hidden", "tight" or "exposed"."""
        if math.isinf(self.headroom):
            return "none"
        if self.headroom >= intensity.MARGIN * (1 - _ROUNDING):
            return "hidden"
        return "tight" if self.headroom >= 1 - _ROUNDING else "exposed"


def cost_of(
    model: Model,
    slices: Slices,
    batch_tokens: float,
    data: int,
    fsdp: int,
    stages: int,
    microbatches: int | None = None,
) -> tuple[HybridMesh, Cost]:
    """The mesh and the cost of `data` * `fsdp` pipelines of `stages` slices.

    Args:
        model: What is trained.
        slices: On what; there are data * fsdp * stages.
        batch_tokens: The global batch.
        data: Replicas.
        fsdp: Over how many slices, or pipelines, the weights are spread.
        stages: Of a pipeline.
        microbatches: Of a pipeline; None: four a stage, or more if memory needs it.
    """
    parameters = model.parameters / stages
    tokens = batch_tokens / (data * fsdp)
    work = model.active / stages * tokens / (slices.chips * slices.flops_per_s)

    state = model.state_bytes * parameters / (fsdp * slices.chips)
    activations = model.activation_bytes(stages) * tokens / slices.chips
    room = USABLE_HBM * slices.hbm_bytes - state
    parts = _parts(activations, room, stages, tokens / slices.chips, microbatches)

    gathered, scattered, reduced = intensity.split_bits(
        data, fsdp, model.gradient_bits, model.weight_bits
    )
    handed_on = tokens * model.boundary_bits if stages > 1 else 0.0
    slice_bits_per_s = slices.chips * slices.dcn_bits_per_s

    forward_s = intensity.FORWARD_FLOP * work
    gather_s = parts * _gather_s(parameters * model.weight_bits, slices)
    tensor = _tensor_degree(gather_s, forward_s, slices.vm_chips)
    mesh = HybridMesh((1, slices.chips // tensor, tensor), (data, fsdp, 1), stages)
    return mesh, Cost(
        forward_s=forward_s,
        backward_s=intensity.BACKWARD_FLOP * work,
        dcn_forward_s=(parts * gathered * parameters + handed_on) / slice_bits_per_s,
        dcn_backward_s=((parts * scattered + reduced) * parameters + handed_on) / slice_bits_per_s,
        ici_forward_s=gather_s / tensor,
        ici_backward_s=gather_s / tensor * (1 + model.gradient_bits / model.weight_bits),
        bubble=intensity.pipeline_bubble(stages, parts),
        microbatches=parts,
        state_bytes=state,
        activation_bytes=activations * min(stages, parts) / parts,
    )


def _parts(
    activations: float, room: float, stages: int, chip_tokens: float, asked: int | None
) -> int:
    """In how many parts a batch passes: as few as memory allows; a stage holds `stages` of them.

    Args:
        activations: Bytes of a chip, of a whole batch.
        room: Bytes that there are for them.
        stages: Of the pipeline.
        chip_tokens: Of the batch; a part has one at least.
        asked: What the user wants of a pipeline.
    """
    if stages > 1 and asked is not None:
        return asked
    parts = 1 if stages == 1 else MICROBATCHES_PER_STAGE * stages
    if room <= 0:
        return parts
    while activations * min(stages, parts) / parts > room and 2 * parts <= chip_tokens:
        parts *= 2
    return parts


def _gather_s(bits: float, slices: Slices) -> float:
    """The time in which each chip receives all weights over ICI, half of which sends."""
    if slices.ici_bytes_per_s is None or slices.chips == 1:
        return 0.0
    return bits / 8 / (slices.ici_bytes_per_s / 2)


def _tensor_degree(gather_s: float, forward_s: float, most: int) -> int:
    """Tensor parallelism within a slice: only where FSDP's gathers take longer than the arithmetic.

    With t ways of it a chip gathers a t-th of the weights (jax-ml.github.io/scaling-book/training).
    """
    tensor = 1
    while gather_s / tensor > forward_s and most % (2 * tensor) == 0:
        tensor *= 2
    return tensor
