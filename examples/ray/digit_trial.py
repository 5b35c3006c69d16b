"""One trial of `run_hp_search.py`: flax and optax learn digits, with a checkpoint after each epoch."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
from ray import tune

PyTree = Any
BATCH = 32
STATE_FILE = "state.msgpack"


@dataclass(frozen=True)
class Digits:
    """Images (count, height, width, 1) from 0 to 1 and their digits (count,), to learn and to test."""

    images: np.ndarray
    digits: np.ndarray
    test_images: np.ndarray
    test_digits: np.ndarray


class Network(nn.Module):
    """A small convolutional network."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """The logits of ten digits."""
        x = images
        for features in (16, 32):
            x = nn.avg_pool(nn.relu(nn.Conv(features, (3, 3))(x)), (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


def loss_of(params: PyTree, images: jax.Array, digits: jax.Array) -> jax.Array:
    """Mean cross-entropy, in nats."""
    logits = Network().apply(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, digits).mean()


def optimizer_of(config: dict[str, Any]) -> optax.GradientTransformation:
    """What the two hyperparameters make."""
    return optax.sgd(config["learning_rate"], momentum=config["momentum"])


def make_epoch(optimizer: optax.GradientTransformation) -> Any:
    """One pass over batches (steps, batch, ...), compiled as a whole."""

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], *batch)
        updates, moments = optimizer.update(gradients, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": moments}, loss

    return jax.jit(lambda state, batches: jax.lax.scan(step, state, batches))


def batches_of(data: Digits, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """All batches of an epoch, in an order that the number of the epoch decides."""
    order = np.random.default_rng(epoch).permutation(len(data.digits))
    order = order[: len(order) // BATCH * BATCH].reshape(-1, BATCH)
    return data.images[order], data.digits[order]


def hp_search(config: dict[str, Any], data: Digits, epochs: int) -> None:
    """Trains from the latest checkpoint of this trial to the last epoch, and tells of each."""
    optimizer = optimizer_of(config)
    params = Network().init(jax.random.key(0), jnp.asarray(data.images[:1]))
    state, first = restored({"params": params, "optimizer": optimizer.init(params)})
    run_epoch = make_epoch(optimizer)
    accuracy = jax.jit(
        lambda params: (
            jnp.argmax(Network().apply(params, data.test_images), -1) == data.test_digits
        ).mean()
    )
    for epoch in range(first, epochs):
        state, losses = run_epoch(state, batches_of(data, epoch))
        told = {
            "mean_accuracy": float(accuracy(state["params"])),
            "mean_loss": float(losses.mean()),
            "epoch": epoch + 1,
            "began_at_epoch": first + 1,
        }
        with tempfile.TemporaryDirectory() as directory:
            content = flax.serialization.to_bytes({"state": state, "epoch": epoch + 1})
            (Path(directory) / STATE_FILE).write_bytes(content)
            tune.report(told, checkpoint=tune.Checkpoint.from_directory(directory))


def restored(state: PyTree) -> tuple[PyTree, int]:
    """The state of the latest checkpoint and how many epochs it has seen, or what is given and 0."""
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        return state, 0
    with checkpoint.as_directory() as directory:
        content = (Path(directory) / STATE_FILE).read_bytes()
    found = flax.serialization.from_bytes({"state": state, "epoch": 0}, content)
    return found["state"], found["epoch"]
