"""Costs of single operations, in microseconds or MB/s. The last line printed is a JSON object."""

from __future__ import annotations

import json
import sys
import time
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MEGABYTES = 100
QUICK = "--quick" in sys.argv

devices = jax.devices()
mesh = Mesh(np.array(devices), ("x",))
split, whole = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
add = jax.jit(lambda x: x + 1)
one = jax.device_put(np.float32(0), devices[0])
many = jax.device_put(np.zeros(len(devices), np.float32), split)


@partial(jax.jit, donate_argnums=0)
def step(params, x):
    return [p * 0.999 + x for p in params]


def micros(work, count):
    count = count // 5 if QUICK else count
    work(max(3, count // 10))
    start = time.perf_counter()
    work(count)
    return (time.perf_counter() - start) / count * 1e6


def pipelined(x):
    def work(count):
        y = x
        for _ in range(count):
            y = add(y)
        y.block_until_ready()

    return work


def synchronous(x):
    def work(count):
        y = x
        for _ in range(count):
            y = add(y)
            y.block_until_ready()

    return work


def leaves(where):
    def work(count):
        params = [jax.device_put(np.zeros(8, np.float32), where) for _ in range(20)]
        x = jax.device_put(np.float32(1), where)
        for _ in range(count):
            params = step(params, x)
        jax.block_until_ready(params)

    return work


def fetch(count):
    results = [add(one) for _ in range(count)]
    jax.block_until_ready(results)
    for result in results:
        np.asarray(result)


def put(count):
    value = np.ones(4, np.float32)
    for _ in range(count):
        jax.device_put(value, devices[1]).block_until_ready()


def bandwidth(work):
    best = min(timed(work) for _ in range(3))
    return MEGABYTES / best


def timed(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


value = np.random.default_rng(0).random(MEGABYTES * 125_000).view(np.float32)
figures = {
    "pipelined, 1 device (µs)": micros(pipelined(one), 3000),
    "synchronous, 1 device (µs)": micros(synchronous(one), 500),
    "pipelined, all devices (µs)": micros(pipelined(many), 1000),
    "synchronous, all devices (µs)": micros(synchronous(many), 300),
    "20 donated leaves, 1 device (µs)": micros(leaves(devices[0]), 500),
    "20 donated leaves, all devices (µs)": micros(leaves(whole), 300),
    "fetch a scalar (µs)": micros(fetch, 300),
    "put 4 floats (µs)": micros(put, 300),
    "host to device (MB/s)": bandwidth(
        lambda: jax.device_put(value, devices[1]).block_until_ready()
    ),
    "host to all devices (MB/s)": bandwidth(
        lambda: jax.device_put(value, split).block_until_ready()
    ),
}
copies = iter([add(jax.device_put(value, devices[1])) for _ in range(3)])
shards = iter([add(jax.device_put(value, split)) for _ in range(3)])
jax.block_until_ready((add(one), add(many)))
figures["device to host (MB/s)"] = bandwidth(lambda: np.asarray(next(copies)).copy())
figures["all devices to host (MB/s)"] = bandwidth(lambda: np.asarray(next(shards)).copy())
figures["memcpy (MB/s)"] = bandwidth(value.copy)
print(json.dumps(figures))
