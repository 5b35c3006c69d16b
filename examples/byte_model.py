"""A byte-level transformer and its text, for `elastic_training.py`: plain JAX, nothing elastic.

The weights are split over the mesh axis "model" and the batch over "replica"; each replica holds a whole
copy of the weights, so one replica is enough to bring the training state back.
"""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

PyTree = Any

BYTES = 256
# How each weight lies on the mesh, by name; what is not named lies whole on every device.
PARTITION = {
    "qkv": PartitionSpec(None, None, None, "model", None),  # layer, width, 3, head, head width
    "out": PartitionSpec(None, "model", None, None),  # layer, head, head width, width
    "up": PartitionSpec(None, None, "model"),  # layer, width, hidden
    "down": PartitionSpec(None, "model", None),  # layer, hidden, width
}


@dataclass(frozen=True)
class ModelSize:
    """The shape of the transformer; some 0.4 million weights as it stands."""

    layers: int = 2
    width: int = 128
    heads: int = 4
    context: int = 64


def init_params(size: ModelSize, seed: int = 0) -> PyTree:
    """Random weights, in the host's memory."""
    random = np.random.default_rng(seed)
    layers, width, heads = size.layers, size.width, size.heads

    def normal(*shape: int, fan_in: int) -> np.ndarray:
        return random.normal(0, fan_in**-0.5, shape).astype(np.float32)

    return {
        "bytes": normal(BYTES, width, fan_in=width),
        "places": normal(size.context, width, fan_in=width),
        "qkv": normal(layers, width, 3, heads, width // heads, fan_in=width),
        "out": normal(layers, heads, width // heads, width, fan_in=width * layers),
        "up": normal(layers, width, 4 * width, fan_in=width),
        "down": normal(layers, 4 * width, width, fan_in=4 * width * layers),
    }


def _norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def _layer(x: jax.Array, weights: PyTree) -> jax.Array:
    q, k, v = jnp.einsum("btd,dchk->cbthk", _norm(x), weights["qkv"])
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) * q.shape[-1] ** -0.5
    causal = jnp.tri(x.shape[1], dtype=bool)
    attention = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    x = x + jnp.einsum("bhqs,bshk,hkd->bqd", attention, v, weights["out"])
    return x + jax.nn.relu(_norm(x) @ weights["up"]) ** 2 @ weights["down"]


def loss_fn(params: PyTree, batch: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next byte, in nats."""
    seen, expected = batch[:, :-1], batch[:, 1:]
    x = params["bytes"][seen] + params["places"]
    for layer in range(len(params["up"])):
        x = _layer(x, {name: params[name][layer] for name in PARTITION})
    logits = _norm(x) @ params["bytes"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, expected).mean()


def shardings(mesh: Mesh, tree: PyTree) -> PyTree:
    """A sharding for each leaf; what Adam keeps of a weight lies as the weight does."""

    def sharding(path: tuple[Any, ...], _leaf: Any) -> NamedSharding:
        name = getattr(path[-1], "key", None)
        return NamedSharding(mesh, PARTITION.get(name, PartitionSpec()))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def init_state(mesh: Mesh, size: ModelSize, optimizer: optax.GradientTransformation) -> PyTree:
    """The first training state, laid out on the mesh."""
    params = init_params(size)
    params = jax.device_put(params, shardings(mesh, params))
    abstract = jax.eval_shape(optimizer.init, params)
    init_optimizer = jax.jit(optimizer.init, out_shardings=shardings(mesh, abstract))
    return {"params": params, "optimizer": init_optimizer(params)}


@functools.cache
def make_train_step(
    mesh: Mesh, optimizer: optax.GradientTransformation
) -> Callable[[PyTree, np.ndarray], tuple[PyTree, jax.Array]]:
    """The compiled step; made once for a mesh, so a mesh that returns finds it again."""

    def train_step(state: PyTree, batch: jax.Array) -> tuple[PyTree, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, optimizer_state = optimizer.update(gradients, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        params = jax.lax.with_sharding_constraint(params, shardings(mesh, params))
        optimizer_state = jax.lax.with_sharding_constraint(
            optimizer_state, shardings(mesh, optimizer_state)
        )
        return {"params": params, "optimizer": optimizer_state}, loss

    by_replica = NamedSharding(mesh, PartitionSpec("replica"))
    return jax.jit(train_step, in_shardings=(None, by_replica), donate_argnums=0)


class StandardLibrary:
    """The sources of Python's standard library as windows of bytes: real text on every machine."""

    def __init__(self, window: int, limit_bytes: int = 8 << 20) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"\n".join(file.read_bytes() for file in files)[:limit_bytes]
        self._windows = np.frombuffer(text, np.uint8)[: len(text) // window * window]
        self._windows = self._windows.reshape(-1, window)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> np.ndarray:
        return self._windows[index].astype(np.int32)


def make_iterator(context: int, global_batch_size: int) -> grain.experimental.ElasticIterator:
    """Shuffled batches without end; its state is one position, good for any number of slices."""
    windows = grain.MapDataset.source(StandardLibrary(context + 1)).seed(0).shuffle().repeat()
    return grain.experimental.ElasticIterator(
        windows,
        global_batch_size,
        # One program drives all slices, so it reads whole batches; JAX deals them out.
        grain.sharding.ShardOptions(shard_index=0, shard_count=1),
        read_options=grain.ReadOptions(num_threads=1, prefetch_buffer_size=8),
    )
