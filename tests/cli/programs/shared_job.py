"""A job that bears the loss of slices: each step sums over all devices that are there now.

    shared_job.py LOG END [stateful]

Appends a JSON line to the file LOG for each step, until the file END is there. With `stateful` hosts
hold what nobody can save, so that it cannot be suspended.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LOG, END = map(Path, sys.argv[1:3])


def slices() -> dict[int, list[jax.Device]]:
    found: dict[int, list[jax.Device]] = {}
    for device in jax.devices():
        found.setdefault(device.slice_index, []).append(device)
    return found


def alive(devices: list[jax.Device]) -> bool:
    try:
        return float(jax.device_put(1.0, devices[0]) + 1) == 2
    except jax.errors.JaxRuntimeError:
        return False


@jax.jit
def total(values: jax.Array) -> jax.Array:
    return jnp.sum(values * values)


def step() -> list[int]:
    """Sums over all devices that are there; which slices those were."""
    there = {index: devices for index, devices in slices().items() if alive(devices)}
    devices = [device for index in sorted(there) for device in there[index]]
    if not devices:
        return []
    mesh = Mesh(np.array(devices), ("all",))
    values = np.arange(4.0 * len(devices))
    placed = jax.device_put(values, NamedSharding(mesh, PartitionSpec("all")))
    assert float(total(placed)) == float(np.sum(values * values))
    return sorted(there)


def hold_state() -> None:
    """Has a host run Python of ours."""
    from jax.experimental import colocated_python

    ours = colocated_python.colocated_python(lambda x: x + 1)
    (cpu,) = colocated_python.colocated_cpu_devices(jax.devices()[:1])
    assert int(ours(jax.device_put(np.int32(1), cpu))) == 2


def main() -> None:
    if "stateful" in sys.argv:
        hold_state()
    with LOG.open("a", buffering=1) as log:
        while not END.exists():
            try:
                there = step()
            except jax.errors.JaxRuntimeError as error:
                if "DATA_LOSS" not in str(error):
                    raise
                continue
            if there:
                log.write(json.dumps({"at": time.time(), "slices": there}) + "\n")
            time.sleep(0.02)


main()
