"""Times of one loss and return, in milliseconds. Prints a JSON object.

    recovery.py plain|elastic CONTROL_SOCKET

The loop reacts at once (`plain`), or is run by pathwaysutils' `elastic_retry` (`elastic`). Both have
the program for the smaller mesh at hand: it was compiled before the kill. The moment of the kill is
taken in this process, right before the signal is sent.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from regrow.control import request

how, control = sys.argv[1], sys.argv[2]
VICTIM = 1
if how == "elastic":
    import pathwaysutils

    pathwaysutils.initialize()
devices = jax.devices()
slices = sorted({device.slice_index for device in devices})
survivors = [index for index in slices if index != VICTIM]
figures: dict[str, float] = {}


@jax.jit
def step(w, x):
    return w + (jnp.tanh(x @ w)).mean() * 1e-3


def place(active):
    chosen = np.array([d for d in devices if d.slice_index in active]).reshape(len(active), -1)
    mesh = Mesh(chosen, ("replica", "model"))
    w = jax.device_put(np.ones((256, 256), np.float32), NamedSharding(mesh, P(None, "model")))
    x = jax.device_put(
        np.ones((8 * len(active), 256), np.float32), NamedSharding(mesh, P("replica"))
    )
    return w, x


def kill():
    status = request(control, "status", timeout_s=10)
    pid = status["slices"][VICTIM]["hosts"][0]["pid"]
    figures["killed"] = time.perf_counter()
    os.kill(pid, signal.SIGKILL)


def since(name, moment):
    figures[name] = (time.perf_counter() - moment) * 1e3


def lost(error):
    if "DATA_LOSS" not in str(error):
        raise error
    since("kill to DATA_LOSS (ms)", figures["killed"])


def plain():
    w, x = place(slices)
    for number in range(1000):
        try:
            w = step(w, x)
            w.block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            lost(error)
            w, x = place(survivors)
            step(w, x).block_until_ready()
            since("kill to first step on the survivors (ms)", figures["killed"])
            return
        if number == 20:
            kill()


def elastic():
    from pathwaysutils.elastic import manager

    elastic_manager = manager.Manager()

    @elastic_manager.elastic_retry(minimum_slice_count=1, poll_interval=10, timeout=60)
    def loop():
        active = sorted(elastic_manager.active_slice_indices)
        w, x = place(active)
        w = step(w, x)
        w.block_until_ready()
        if "killed" in figures:
            since("kill to first step on the survivors (ms)", figures["killed"])
            return
        try:
            for number in range(1000):
                w = step(w, x)
                w.block_until_ready()
                if number == 20:
                    kill()
        except jax.errors.JaxRuntimeError as error:
            lost(error)
            raise

    loop()


for active in (slices, survivors):
    w, x = place(active)
    step(w, x).block_until_ready()
{"plain": plain, "elastic": elastic}[how]()
begin = time.perf_counter()
request(control, "restore", index=VICTIM, timeout_s=30)
request(control, "wait_healthy", timeout_s=60)
since("relaunch to healthy (ms)", begin)
w, x = place(slices)
step(w, x).block_until_ready()
since("relaunch to first step on all slices (ms)", begin)
del figures["killed"]
print(json.dumps(figures))
