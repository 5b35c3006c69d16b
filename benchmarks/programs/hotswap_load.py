"""What a snapshot costs, and its load after a hot-swap and where every replica is there. Prints JSON.

    hotswap_load.py ROUNDS MEGABYTES

Two slices hold a state of so many MB each, and a snapshot of it. In turn it is loaded as it is, and after
one slice was killed and a spare has taken its place. The object has lists of figures: of each save its
seconds until it is committed, and seconds of processor time; of each load its seconds, those of all until
the first step, and processor time.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from regrow.control import request
from regrow.elastic import Snapshotter

ROUNDS, MEGABYTES = map(int, sys.argv[1:])
ARRAYS, COLUMNS = 24, 1024
ROWS = (MEGABYTES << 20) // (4 * COLUMNS * ARRAYS)
TICKS = os.sysconf("SC_CLK_TCK")
SETTLED_S = 2.0

target = os.environ["JAX_BACKEND_TARGET"]
control = f"{target.removeprefix('grpc://unix:').rpartition('/')[0]}/control.sock"
devices = jax.devices()
slices = len({device.slice_index for device in devices})
mesh = Mesh(np.array(devices).reshape(slices, -1), ("replica", "model"))
sharding = NamedSharding(mesh, P(None, "model"))
abstract = [jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32, sharding=sharding)] * ARRAYS


@jax.jit
def step(state):
    return [array * 1.0001 for array in state]


def processor_s() -> float:
    """What the client, the head and the hosts have used so far."""
    status = request(control, "status", timeout_s=10)
    hosts = [host["pid"] for one in status["slices"] for host in one["hosts"]]
    used = 0
    for pid in (os.getpid(), status["pid"], *hosts):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used += int(fields[11]) + int(fields[12])
    return used / TICKS


def saved(snapshotter, number, state):
    """Saves: seconds until it is committed, and of the processor until all is quiet again."""
    used, began = processor_s(), time.perf_counter()
    snapshotter.save(number, state)
    snapshotter.join(600)
    took = time.perf_counter() - began
    # A killed slice is to be a spare again, and a warm one, and the spare to have its replica.
    time.sleep(SETTLED_S)
    return took, processor_s() - used


def loaded(snapshotter, began=None):
    """Loads and makes a step: the state, and seconds of it."""
    used, began = processor_s(), began or time.perf_counter()
    load = time.perf_counter()
    state = snapshotter.load(abstract)
    load = time.perf_counter() - load
    state = jax.block_until_ready(step(state))
    return state, (load, time.perf_counter() - began, processor_s() - used)


def swap() -> float:
    """Kills slice 1; returns when it was done once there is another in its place."""
    pid = request(control, "status", timeout_s=10)["slices"][1]["hosts"][0]["pid"]
    began = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    told = False
    while True:
        try:
            (jax.device_put(1.0, devices[-1]) + 1).block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            if "DATA_LOSS" not in str(error):
                raise
            told = True
            time.sleep(0.002)
            continue
        if told:
            return began


def main() -> None:
    snapshotter = Snapshotter()
    state = step(
        [jax.device_put(np.ones((ROWS, COLUMNS), np.float32), sharding) for _ in range(ARRAYS)]
    )
    found = {"save": [], "every replica is there": [], "a spare has taken a place": []}
    for number in range(ROUNDS + 1):
        for how in list(found)[1:]:
            save = saved(snapshotter, number, state)
            began = swap() if how.startswith("a spare") else None
            state, load = loaded(snapshotter, began)
            if number:  # The first time programs are compiled.
                found["save"].append(save)
                found[how].append(load)
    print(json.dumps(found))


main()
