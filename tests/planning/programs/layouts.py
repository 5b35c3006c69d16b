"""Takes one step of the benchmark with each layout of the page, and one that is written out plainly."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regrow.planning import Degrees
from regrow.planning.shardings import Benchmark, Workload, make_inputs, training_step

# One of many activations, one of many weights.
LARGE = [Workload(4096, 128, 4), Workload(32, 512, 4)]
WORKLOAD = Workload(batch_size=8, embedding_dimension=32, num_layers=1)
LAYOUTS = [(1, 4, 1), (1, 1, 4), (1, 2, 2)]
# So large that the step shows in bfloat16.
LEARNING_RATE = 1e3


def plain_step(inputs: Any) -> list[np.ndarray]:
    """The same step in 32 bits on one device."""
    ((up, down),), batch = jax.tree.map(lambda one: np.asarray(one, np.float32), inputs)

    def loss(up: jax.Array, down: jax.Array) -> jax.Array:
        return jax.nn.sigmoid(jax.nn.sigmoid(batch @ up.T) @ down).mean()

    slopes = jax.grad(loss, argnums=(0, 1))(up, down)
    return [
        one - LEARNING_RATE * np.asarray(slope)
        for one, slope in zip((up, down), slopes, strict=True)
    ]


def memory(layout: tuple[int, int, int], workload: Workload) -> float:
    """What XLA says that a step takes on a device, in parts of the estimate."""
    benchmark = Benchmark(workload, Degrees(*layout), Degrees())
    mesh = benchmark.device_mesh()
    inputs = jax.eval_shape(lambda: make_inputs(workload, mesh))
    with jax.set_mesh(mesh):
        made = training_step(mesh).lower(*inputs).compile().memory_analysis()
    taken = made.temp_size_in_bytes + made.argument_size_in_bytes
    return taken / benchmark.memory.total_bytes


def main() -> None:
    """Prints the shape of a weight's shard, the largest errors, in parts of the step, and memory."""
    meshes = [Benchmark(WORKLOAD, Degrees(*one), Degrees()).device_mesh() for one in LAYOUTS]
    made = make_inputs(WORKLOAD, meshes[0])
    inputs = jax.tree.map(np.asarray, made)
    wanted = plain_step(inputs)
    steps = [
        np.abs(new - np.asarray(old, np.float32)).max()
        for new, old in zip(wanted, jax.tree.leaves(inputs[0]), strict=True)
    ]
    told = []
    for layout, mesh in zip(LAYOUTS, meshes, strict=True):
        with jax.set_mesh(mesh):
            weights, batch = jax.tree.map(jnp.asarray, inputs)
            moved = jax.tree.leaves(training_step(mesh, LEARNING_RATE)(weights, batch))
        errors = [
            float(np.abs(np.asarray(got, np.float32) - want).max() / step)
            for got, want, step in zip(moved, wanted, steps, strict=True)
        ]
        shard = moved[0].addressable_shards[0].data.shape
        taken = [memory(layout, workload) for workload in LARGE]
        told.append({"shard": shard, "errors": errors, "memory": taken})
    print(json.dumps(told))


main()
