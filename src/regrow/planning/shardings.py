"""The sharding benchmark of the Multislice page: training steps of a stack of dense layers.

Imports JAX. The model and the count of FLOP are those of `shardings.py` in MaxText (see
cloud.google.com/tpu/docs/multislice-introduction), so that results compare.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from regrow.errors import UsageError
from regrow.planning import devices
from regrow.planning.accelerators import generation_of_device
from regrow.planning.mesh import AXES, Degrees, HybridMesh, hybrid_mesh

FEED_FORWARD: Final = 4
"""Width of the hidden layers over that of the embedding."""

_LEARNING_RATE: Final = 1e-4
_BYTES: Final = 2  # of a bfloat16
# XLA computes bfloat16 in float32 on CPUs, with copies: three times the activations as XLA's own analysis
# has them (2.4 times without tensor parallelism, up to 3.7 with it). And it gathers all weights at once,
# and has all gradients whole before it scatters them, both in float32.
_CPU_ACTIVATIONS: Final = 3
_CPU_BYTES: Final = 4
_WEIGHTS: Final = PartitionSpec("tensor", "fsdp")
_BATCH: Final = PartitionSpec(("data", "fsdp"), "tensor")

_Weights = list[tuple[jax.Array, jax.Array]]


@final
@dataclass(frozen=True, slots=True)
class Memory:
    """An estimate of what a device needs.

    Attributes:
        state_bytes: Weights and gradients.
        activation_bytes: The rest.
    """

    state_bytes: float
    activation_bytes: float

    @property
    def total_bytes(self) -> float:
        """All of it."""
        return self.state_bytes + self.activation_bytes


@final
@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained.

    Attributes:
        batch_size: Rows a device.
        embedding_dimension: Width of the embedding.
        num_layers: Layers; each has two matrices of embedding times 4 embeddings.
    """

    batch_size: int = 131072
    embedding_dimension: int = 2048
    num_layers: int = 4

    def __post_init__(self) -> None:
        for name in ("batch_size", "embedding_dimension", "num_layers"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def parameters(self) -> int:
        """All weights."""
        return 2 * FEED_FORWARD * self.embedding_dimension**2 * self.num_layers

    @property
    def device_flop(self) -> float:
        """FLOP a device and step, 6 a parameter and row, as the page counts."""
        return 6.0 * self.parameters * self.batch_size

    def memory(self, mesh: HybridMesh, *, is_cpu: bool = False) -> Memory:
        """What a device needs for it.

        Weights and gradients, and one layer's gathered weights; activations, kept for the backward pass,
        and two gradients of a layer. What XLA needs on CPUs is more.
        """
        _, fsdp, tensor = (inner * outer for inner, outer in zip(mesh.ici, mesh.dcn, strict=True))
        sharded = _BYTES * 2 * self.parameters / (fsdp * tensor)
        kept = (1 + FEED_FORWARD) * self.num_layers
        elements = self.batch_size * self.embedding_dimension
        activations = float(_BYTES * elements * (kept + 2 * FEED_FORWARD))
        if is_cpu:
            whole = _CPU_BYTES * self.parameters / tensor * (2 if fsdp > 1 else 1)
            return Memory(sharded + whole, _CPU_ACTIVATIONS * activations)
        return Memory(sharded + _BYTES * self.parameters / self.num_layers / tensor, activations)


@final
@dataclass(frozen=True, slots=True)
class Result:
    """What was measured.

    Attributes:
        workload, mesh: Of what.
        slices, devices_per_slice, device_kind: On what.
        times_s: Of each step.
        peak_flops_per_s: Of a device; None if it is not known.
    """

    workload: Workload
    mesh: HybridMesh
    slices: int
    devices_per_slice: int
    device_kind: str
    times_s: list[float]
    peak_flops_per_s: float | None

    @property
    def step_s(self) -> float:
        """The average time of a step, as the page reports it."""
        return sum(self.times_s) / len(self.times_s)

    @property
    def flops_per_s(self) -> float:
        """FLOP/s a device."""
        return self.workload.device_flop / self.step_s

    @property
    def share_of_peak(self) -> float | None:
        """Of a device's peak FLOP/s."""
        return self.flops_per_s / self.peak_flops_per_s if self.peak_flops_per_s else None


@final
class Benchmark:
    """The benchmark on the devices that this process sees.

    Raises:
        UsageError: The degrees do not make up the slices, or do not divide the workload, or that is
            too large for this machine, whose memory CPU devices share.
    """

    def __init__(self, workload: Workload, ici: Degrees, dcn: Degrees) -> None:
        self._slices = devices.by_slice()
        self.workload = workload
        self.mesh = hybrid_mesh(
            ici, dcn, chips_per_slice=len(self._slices[0]), slices=len(self._slices)
        )
        self.device_kind = self._slices[0][0].device_kind
        self._check_divides()
        self._check_memory()

    @property
    def shape(self) -> tuple[int, int]:
        """Slices, and devices of each."""
        return (len(self._slices), len(self._slices[0]))

    @property
    def memory(self) -> Memory:
        """What a device needs, by estimate."""
        is_cpu = self._slices[0][0].platform == "cpu"
        return self.workload.memory(self.mesh, is_cpu=is_cpu)

    @property
    def cautions(self) -> tuple[str, ...]:
        """What is likely to go badly, and why."""
        made_of = generation_of_device(self.device_kind)
        needed = self.memory.total_bytes
        if made_of is None or needed <= made_of.hbm_bytes / made_of.devices_per_chip:
            return self.mesh.cautions
        there = made_of.hbm_bytes / made_of.devices_per_chip
        too_large = f"{needed / 1e9:.1f} GB a device will hardly fit into {there / 1e9:.1f} GB"
        return (*self.mesh.cautions, too_large)

    def run(
        self,
        steps: int,
        *,
        peak_flops_per_s: float | None = None,
        profiler_path: str | None = None,
    ) -> Result:
        """Takes a step that compiles, then `steps` that count."""
        mesh = self.device_mesh()
        weights, batch = make_inputs(self.workload, mesh)
        step = training_step(mesh)

        def run() -> Any:
            nonlocal weights
            weights = step(weights, batch)
            return weights

        trace = jax.profiler.trace(profiler_path) if profiler_path else contextlib.nullcontext()
        with jax.set_mesh(mesh), trace:
            times_s = devices.timed(run, steps)
        slices, per_slice = self.shape
        peak = peak_flops_per_s or _peak(self.device_kind)
        return Result(self.workload, self.mesh, slices, per_slice, self.device_kind, times_s, peak)

    def device_mesh(self) -> Mesh:
        """The mesh over the devices, of shape ici * dcn along each axis."""
        ordered = [device for one in self._slices for device in one]
        if len(self._slices) == 1:
            grid = mesh_utils.create_device_mesh(self.mesh.mesh_shape, ordered)
        else:
            grid = mesh_utils.create_hybrid_device_mesh(
                self.mesh.mesh_shape, self.mesh.dcn_mesh_shape, ordered
            )
        return Mesh(np.asarray(grid), AXES)

    def _check_divides(self) -> None:
        embedding = self.workload.embedding_dimension
        _, fsdp, tensor = (
            inner * outer for inner, outer in zip(self.mesh.ici, self.mesh.dcn, strict=True)
        )
        for axis, degree in (("fsdp", fsdp), ("tensor", tensor)):
            if embedding % degree:
                raise UsageError(
                    f"embedding_dimension {embedding} does not divide by the {degree} ways of "
                    f"{axis} parallelism"
                )

    def _check_memory(self) -> None:
        local = jax.local_devices()
        if local[0].platform != "cpu":
            return
        needed = len(local) * self.memory.total_bytes
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > there:
            raise UsageError(
                f"{len(local)} CPU devices would need some {needed / 1e9:.1f} GB, but this machine has "
                f"{there / 1e9:.1f} GB; make batch_size or embedding_dimension smaller"
            )


def make_inputs(workload: Workload, mesh: Mesh) -> tuple[_Weights, jax.Array]:
    """Weights and a batch, made where they belong."""
    width, rows = workload.embedding_dimension, workload.batch_size * math.prod(mesh.devices.shape)
    shape = (FEED_FORWARD * width, width)

    def make(key: jax.Array) -> tuple[_Weights, jax.Array]:
        batch_key, *keys = jax.random.split(key, 1 + 2 * workload.num_layers)
        scale = 1 / math.sqrt(width)
        flat = [jax.random.uniform(one, shape, jnp.bfloat16, -scale, scale) for one in keys]
        batch = jax.random.uniform(batch_key, (rows, width), jnp.bfloat16, -1, 1)
        return list(zip(flat[::2], flat[1::2], strict=True)), batch

    weights = NamedSharding(mesh, _WEIGHTS)
    layers = [(weights, weights)] * workload.num_layers
    made = jax.jit(make, out_shardings=(layers, NamedSharding(mesh, _BATCH)))
    result: tuple[_Weights, jax.Array] = made(jax.random.key(0, impl="rbg"))  # compiles in no time
    return result


def training_step(mesh: Mesh, learning_rate: float = _LEARNING_RATE) -> Callable[..., Any]:
    """A compiled step of SGD: weights (given away) and a batch become weights."""

    def step(weights: _Weights, batch: jax.Array) -> Any:
        gradients = jax.grad(_loss)(weights, batch)
        return jax.tree.map(lambda one, slope: one - learning_rate * slope, weights, gradients)

    return jax.jit(step, donate_argnums=0, out_shardings=NamedSharding(mesh, _WEIGHTS))


def _loss(weights: _Weights, batch: jax.Array) -> jax.Array:
    for up, down in weights:
        hidden = jax.lax.with_sharding_constraint(jax.nn.sigmoid(batch @ up.T), _BATCH)
        batch = jax.lax.with_sharding_constraint(jax.nn.sigmoid(hidden @ down), _BATCH)
    return jnp.mean(batch, dtype=jnp.float32)


def _peak(device_kind: str) -> float | None:
    made_of = generation_of_device(device_kind)
    return made_of.peak_flops_per_s / made_of.devices_per_chip if made_of else None
