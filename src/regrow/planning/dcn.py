"""Times the network between slices, and a backward pass that it would have to hide behind.

Imports JAX. For architectures whose FLOP are not 6 a parameter and token the Multislice page advises
to compare the time of a backward pass with that of the all-reduce between slices.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from regrow.errors import UsageError
from regrow.planning import devices
from regrow.planning.intensity import MARGIN

Loss = Callable[[Any, Any], jax.Array]
"""Takes parameters and a batch; returns a scalar."""

_SPREAD: Final = PartitionSpec("slice", "chip")


@final
@dataclass(frozen=True, slots=True)
class AllReduce:
    """An all-reduce between slices, each of which holds one array spread over its chips.

    Attributes:
        array_bytes: Of a slice's array.
        slices: How many took part.
        times_s: Of each repetition.
    """

    array_bytes: int
    slices: int
    times_s: list[float]

    @property
    def seconds(self) -> float:
        """The median."""
        return devices.median(self.times_s)

    @property
    def bits_per_s(self) -> float:
        """Out of a slice, and into it; of 2 (n-1)/n of the array, which no algorithm beats."""
        return 2 * (self.slices - 1) / self.slices * 8 * self.array_bytes / self.seconds


@final
@dataclass(frozen=True, slots=True)
class Backward:
    """A backward pass on one slice.

    Attributes:
        gradient_bytes: Of all gradients.
        times_s: Of each repetition.
    """

    gradient_bytes: int
    times_s: list[float]

    @property
    def seconds(self) -> float:
        """The median."""
        return devices.median(self.times_s)


def headroom(backward: Backward, all_reduce: AllReduce) -> float:
    """The backward pass over the all-reduce of its gradients: 1 is the least, `MARGIN` advised."""
    return backward.seconds / all_reduce.seconds


def verdict(ratio: float) -> str:
    """What the page advises."""
    if ratio >= MARGIN:
        return "data parallelism across slices will scale"
    if ratio >= 1:
        return f"data parallelism will scale barely; {MARGIN:.1f} times is advised"
    return "data parallelism would wait for the network: take a larger batch a slice"


def all_reduce(array_bytes: int, repeats: int) -> AllReduce:
    """Times an all-reduce between all slices.

    Args:
        array_bytes: Of the array on each slice; rounded up to one float32 a chip.
        repeats: How often.

    Raises:
        UsageError: There is one slice.
    """
    slices = devices.by_slice()
    if len(slices) < 2:
        raise UsageError(
            "there is one slice, and nothing crosses slices; `regrow run --slices 2` makes two"
        )
    mesh = Mesh(np.array(slices), ("slice", "chip"))
    chips = len(slices[0])
    elements = max(1, math.ceil(array_bytes / 4 / chips)) * chips

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=_SPREAD, out_specs=PartitionSpec(None, "chip"))
    def reduce(part: jax.Array) -> Any:
        return jax.lax.psum(part, "slice")

    shape = (len(slices), elements)
    made = jax.jit(lambda: jnp.ones(shape, jnp.float32), out_shardings=NamedSharding(mesh, _SPREAD))
    array = made()
    return AllReduce(4 * elements, len(slices), devices.timed(lambda: reduce(array), repeats))


def backward(loss: Loss, parameters: Any, batch: Any, repeats: int) -> Backward:
    """Times the backward pass of a function: the gradients of its parameters, the forward pass done.

    Args:
        loss: The function.
        parameters: A tree of arrays on the devices of one slice.
        batch: What one slice works on in a step, there too.
        repeats: How often.
    """
    run_forward = jax.jit(lambda values, data: jax.vjp(lambda one: loss(one, data), values))
    value, pull = run_forward(parameters, batch)
    run_backward = jax.jit(lambda pull, seed: pull(seed))
    seed = jnp.ones_like(value)
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(parameters)]
    return Backward(sum(sizes), devices.timed(lambda: run_backward(pull, seed), repeats))


def load(reference: str, slice_devices: list[jax.Device]) -> tuple[Loss, Any, Any]:
    """What the function returns that `FILE.py:NAME` or `MODULE:NAME` means: loss, parameters, batch.

    Args:
        reference: The function; the code it names is run.
        slice_devices: What it is called with.

    Raises:
        UsageError: There is no such function, or it returns something else.
    """
    place, colon, name = reference.rpartition(":")
    if not colon or not place or not name:
        raise UsageError(f"{reference!r} is no function; write FILE.py:NAME or MODULE:NAME")
    function = getattr(_module(place), name, None)
    if not callable(function):
        raise UsageError(f"there is no function {name!r} in {place}")
    made = function(slice_devices)
    if not isinstance(made, tuple) or len(made) != 3 or not callable(made[0]):
        raise UsageError(f"{reference} must return (loss, parameters, batch), loss a function")
    return made


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise UsageError(f"there is no module {error.name!r} to take it from") from None
    path = Path(place)
    if not path.is_file():
        raise UsageError(f"there is no file {place!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
