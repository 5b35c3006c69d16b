"""Times of a hot-swap, in milliseconds. Prints a JSON object.

    hotswap.py ROUNDS

Over all slices a step of 24 layers is run; one slice is killed, and the step is tried until it has run
over all slices again, the replacement among them. Its program had been run before.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from regrow.control import request

target = os.environ["JAX_BACKEND_TARGET"]
control = f"{target.removeprefix('grpc://unix:').rpartition('/')[0]}/control.sock"
devices = jax.devices()
slices = len({device.slice_index for device in devices})
mesh = Mesh(np.array(devices).reshape(slices, -1), ("replica", "model"))
LAYERS, WIDTH = 24, 128


def loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w) + x
    return (x * x).mean()


@jax.jit
def step(weights, x):
    gradients = jax.grad(loss)(weights, x)
    return [w - 1e-3 * g for w, g in zip(weights, gradients, strict=True)]


def first_step():
    sharding = NamedSharding(mesh, P(None, "model"))
    weights = [jax.device_put(np.eye(WIDTH, dtype=np.float32), sharding) for _ in range(LAYERS)]
    x = jax.device_put(np.ones((8 * slices, WIDTH), np.float32), NamedSharding(mesh, P("replica")))
    for made in step(weights, x):
        made.block_until_ready()


def swap():
    status = request(control, "status", timeout_s=10)
    pid = status["slices"][1]["hosts"][0]["pid"]
    began = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    told = None
    while True:
        try:
            first_step()
        except jax.errors.JaxRuntimeError as error:
            if "DATA_LOSS" not in str(error):
                raise
            told = told or time.perf_counter()
            time.sleep(0.002)
            continue
        if told is not None:
            return 1e3 * (told - began), 1e3 * (time.perf_counter() - began)


first_step()
swaps = []
for _ in range(int(sys.argv[1])):
    swaps.append(swap())
    # The killed slice is to be a spare again, and a warm one.
    time.sleep(2)
print(
    json.dumps(
        {
            "kill to DATA_LOSS": statistics.median(told for told, _ in swaps),
            "kill to first step": statistics.median(done for _, done in swaps),
            "worst": max(done for _, done in swaps),
        }
    )
)
