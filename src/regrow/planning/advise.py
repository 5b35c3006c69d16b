"""Which parallelism across slices: every way to split costed, ranked, and its reasons told."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, final

from regrow.errors import UsageError
from regrow.planning import intensity
from regrow.planning.cost import USABLE_HBM, Cost, cost_of
from regrow.planning.mesh import HybridMesh
from regrow.planning.model import Model, Slices

_SAME_TIME: Final = 0.01


@final
@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to split a training over slices.

    Attributes:
        mesh: Its mesh; within a slice FSDP, and tensor parallelism where FSDP would be short of work.
        cost: What a step costs.
        fits: Whether a chip's memory holds it.
        relative: The step's time over that of the best strategy that fits.
        reasons: Why it stands where it stands.
    """

    mesh: HybridMesh
    cost: Cost
    fits: bool
    relative: float
    reasons: tuple[str, ...]

    @property
    def name(self) -> str:
        """Such as "data 4", "fsdp 2 x data 2" or "pipeline 2 x data 2"."""
        return _name(self.mesh)


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """The answer to `advise`.

    Attributes:
        model, slices, batch_tokens: The question; the batch is that of all slices.
        strategies: The best first.
    """

    model: Model
    slices: Slices
    batch_tokens: float
    strategies: tuple[Strategy, ...]

    @property
    def slice_tokens(self) -> float:
        """The batch of one slice."""
        return self.batch_tokens / self.slices.slices

    @property
    def least_slice_tokens(self) -> float:
        """The batch of one slice from which on data parallelism hides its network."""
        bits = intensity.data_parallel_bits(self.slices.slices, self.model.gradient_bits)
        active = self.model.active / self.model.parameters
        return intensity.least_batch(self.slices.intensity, bits, intensity.BACKWARD_FLOP * active)

    @property
    def advised_slice_tokens(self) -> float:
        """The same with the page's margin."""
        return intensity.advised_batch(self.least_slice_tokens)

    @property
    def batch_instead(self) -> float | None:
        """The global batch with which data parallelism would do, if now a pipeline is best.

        The page advises to see whether the training bears it before one takes to pipelines.
        """
        (data,) = (one for one in self.strategies if one.mesh.dcn[0] == self.slices.slices)
        if self.strategies[0].mesh.stages == 1 or not data.fits or data.cost.network == "hidden":
            return None
        return self.advised_slice_tokens * self.slices.slices


def advise(
    model: Model, slices: Slices, batch_tokens: float, microbatches: int | None = None
) -> Plan:
    """Ranks the ways to split a training over slices.

    First what fits into memory, then by the time of a step; of those within 1 % the simpler one, in
    the page's order: data parallelism, FSDP, pipelines of growing depth.

    Args:
        model: What is trained.
        slices: What it is trained on.
        batch_tokens: The global batch, in tokens: the largest one that training bears well.
        microbatches: Of a pipeline; None: four a stage, or more if memory needs it.

    Raises:
        UsageError: A number is out of range.
    """
    chips = slices.slices * slices.chips
    if not chips <= batch_tokens < math.inf:
        raise UsageError(
            f"a batch of {batch_tokens:g} tokens; {chips} chips need one each, or more"
        )
    if microbatches is not None and microbatches < 1:
        raise UsageError(f"microbatches is {microbatches}; it must be at least 1")
    costed = [
        cost_of(model, slices, batch_tokens, *split, microbatches)
        for split in _splits(slices.slices, model.layers)
    ]
    usable = USABLE_HBM * slices.hbm_bytes
    fitting = [cost.step_s for _, cost in costed if cost.memory_bytes <= usable]
    best_s = min(fitting or [cost.step_s for _, cost in costed])
    strategies = [
        Strategy(
            mesh,
            cost,
            cost.memory_bytes <= usable,
            cost.step_s / best_s,
            tuple(_reasons(mesh, cost, usable)),
        )
        for mesh, cost in costed
    ]
    return Plan(model, slices, batch_tokens, tuple(sorted(strategies, key=_rank)))


def _rank(strategy: Strategy) -> tuple[bool, float, int, int, float]:
    _, fsdp, _ = strategy.mesh.dcn
    slower = round((strategy.relative - 1) / _SAME_TIME)
    return (not strategy.fits, slower, strategy.mesh.stages, fsdp, strategy.cost.memory_bytes)


def _splits(slices: int, layers: int | None) -> list[tuple[int, int, int]]:
    """Every (data, fsdp, stages) whose product is the number of slices."""
    return [
        (replicas // fsdp, fsdp, stages)
        for stages, replicas in [(1, slices), *intensity.pipeline_shapes(slices)]
        if layers is None or layers % stages == 0
        for fsdp in range(1, replicas + 1)
        if replicas % fsdp == 0
    ]


def _name(mesh: HybridMesh) -> str:
    data, fsdp, _ = mesh.dcn
    parts = [("pipeline", mesh.stages), ("fsdp", fsdp), ("data", data)]
    return " x ".join(f"{kind} {degree}" for kind, degree in parts if degree > 1) or "one slice"


def _reasons(mesh: HybridMesh, cost: Cost, usable_bytes: float) -> Iterator[str]:
    _, fsdp, _ = mesh.dcn
    yield _network_reason(cost)
    if mesh.stages > 1:
        yield (
            f"{mesh.stages} slices share a batch in {cost.microbatches} microbatches; "
            f"{cost.bubble:.0%} of the step is bubble"
        )
    elif cost.microbatches > 1:
        yield f"activations fit if gradients are accumulated over {cost.microbatches} microbatches"
    if fsdp > 1:
        anew = ", moved anew for each microbatch" if cost.microbatches > 1 else ""
        yield f"weights and optimizer are spread over {fsdp} slices{anew}; a late collective stalls all"
    if mesh.ici[2] > 1:
        yield f"ici_tensor_parallelism {mesh.ici[2]}: FSDP alone has too few tokens a chip for ICI"
    if cost.ici_forward_s > cost.forward_s or cost.ici_backward_s > cost.backward_s:
        yield "within a slice, too, chips wait for the network: take smaller slices or a larger batch"
    if cost.memory_bytes > usable_bytes:
        yield (
            f"needs {cost.memory_bytes / 1e9:,.1f} GB of memory a chip, "
            f"of {usable_bytes / 1e9:,.1f} GB"
        )


def _network_reason(cost: Cost) -> str:
    times = f"the network has {cost.headroom:.2f} times the time it needs"
    return {
        "none": "nothing crosses slices",
        "hidden": times,
        "tight": f"{times}; {intensity.MARGIN:.2f} times is advised, since it may drop packets",
        "exposed": f"{times}: chips wait for it",
    }[cost.network]
