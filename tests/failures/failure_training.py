"""A training loop that reacts to the loss of slices at once, and takes returned ones back.

Usage: failure_training.py STOP_FILE. It tells what happens in lines of JSON, until the file is there:
`{"error": AT, "text": …}`, `{"step": AT, "live": […]}` for the first step after errors, `{"grow": […]}`,
`{"wrong": TEXT}` for what must never happen, and at the end `{"done": STEPS}`. AT is the monotonic
time. Nothing in here knows of Regrow.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

LOSS = re.compile(r"DATA_LOSS: slice (\d+) ")
SAVE_EVERY = 10
LOOK_EVERY_S = 0.3


def tell(**event: Any) -> None:
    print(json.dumps(event), flush=True)


class Training:
    """Linear regression, its weights split over "model", its batch over "replica"."""

    def __init__(self) -> None:
        self.slices: dict[int, list[Any]] = {}
        for device in jax.devices():
            self.slices.setdefault(device.slice_index, []).append(device)
        self.all = sorted(self.slices)
        self.live = self.all
        random = np.random.default_rng(0)
        self.saved = random.standard_normal((64, 64)).astype(np.float32)
        self.batch = random.standard_normal((12, 64)).astype(np.float32)
        self.probe = jax.jit(lambda x: x + 1)
        self.weights: jax.Array | None = None
        self.steps = 0
        self.recovering = False

    @functools.cache  # noqa: B019 - one driver lives as long as its process
    def program(self, live: tuple[int, ...]) -> tuple[Callable[..., Any], Any, Any]:
        mesh = Mesh(np.array([self.slices[index] for index in live]), ("replica", "model"))
        weights, batch = NamedSharding(mesh, P(None, "model")), NamedSharding(mesh, P("replica"))

        def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
            return w - 0.01 * gradient, loss

        outs = (weights, NamedSharding(mesh, P()))
        jitted = jax.jit(step, donate_argnums=0, in_shardings=(weights, batch), out_shardings=outs)
        return jitted, weights, batch

    def step(self) -> None:
        program, weights, batch = self.program(tuple(self.live))
        if self.weights is None:
            self.weights = jax.device_put(self.saved, weights)
        self.weights, loss = program(self.weights, jax.device_put(self.batch, batch))
        if not np.isfinite(float(loss)):
            tell(wrong=f"a loss of {float(loss)}")
        self.steps += 1
        if self.steps % SAVE_EVERY == 0:
            self.saved = np.asarray(self.weights)

    def active(self) -> list[int]:
        """The slices that work."""
        sums = {i: self.probe(jax.device_put(np.float32(1), self.slices[i][0])) for i in self.all}
        return [index for index, array in sums.items() if self.works(array, index)]

    def works(self, array: jax.Array, index: int) -> bool:
        try:
            return float(array) == 2
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith(f"DATA_LOSS: slice {index} "):
                tell(wrong=f"slice {index}: {error}")
            if index in self.live:
                self.react(str(error))
            return False

    def react(self, text: str) -> None:
        tell(error=time.monotonic(), text=text)
        self.recovering = True
        found = LOSS.match(text)
        if found is None:
            tell(wrong=text)
        elif "lost its collective links" not in text:
            self.live = [index for index in self.live if index != int(found[1])]
        self.weights = None

    def grow(self) -> None:
        active = self.active()
        if active and active != self.live:
            self.live, self.weights = active, None
            tell(grow=active)


def main(stop: Path) -> None:
    training = Training()
    looked_at = 0.0
    tell(grow=training.live)
    while not stop.exists():
        try:
            if training.live:
                training.step()
                if training.recovering:
                    training.recovering = False
                    tell(step=time.monotonic(), live=training.live)
            if training.live != training.all and time.monotonic() > looked_at + LOOK_EVERY_S:
                training.grow()
                looked_at = time.monotonic()
        except jax.errors.JaxRuntimeError as error:
            training.react(str(error))
    tell(done=training.steps)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
