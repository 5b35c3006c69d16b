"""A job that loses slices after snapshots whose replica is kept for spares; prints JSON lines.

    spare_snapshots_job.py SEED [FILE]

It does each of the faults below once and checks each time that what it loads is what it saved. With a
FILE it tells there its head once a replica is kept, and waits for its end.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import signal
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

from regrow.control import request
from regrow.elastic import Snapshotter, snapshots

SEED = int(sys.argv[1])
WAIT_S = 120.0
ARRAYS, SHAPE = 5, (1024, 2048)  # More than 32 MB, so that a replica has a segment of its own.
NBYTES = ARRAYS * 4 * SHAPE[0] * SHAPE[1]

target = os.environ["JAX_BACKEND_TARGET"]
control = f"{target.removeprefix('grpc://unix:').rpartition('/')[0]}/control.sock"
devices = jax.devices()
mesh = Mesh(np.array(devices).reshape(2, -1), ("replica", "model"))
sharding = NamedSharding(mesh, P(None, "model"))
abstract = [jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=sharding)] * ARRAYS
random = np.random.default_rng(SEED)
snapshotter = Snapshotter()


def status() -> dict[str, Any]:
    told: dict[str, Any] = request(control, "status", timeout_s=30)
    return told


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: {status()}"
        time.sleep(0.01)


def pids(index: int) -> list[int]:
    hosts = status()["slices"][index]["hosts"]
    return [host["pid"] for host in hosts if host["pid"] is not None and host["state"] != "gone"]


def kill(index: int) -> None:
    """Kills a slice; returns when the head knows."""
    before = status()["slices"][index]["incarnation"]
    for pid in pids(index):
        os.kill(pid, signal.SIGKILL)
    until(
        lambda: (
            status()["slices"][index]["state"] == "lost"
            or status()["slices"][index]["incarnation"] > before
        ),
        "the loss",
    )


def all_up() -> None:
    until(lambda: all(one["state"] == "up" for one in status()["slices"]), "new slices")


def saved(step: int) -> list[np.ndarray[Any, Any]]:
    """Saves a state that nobody else has; what it is. Returns when its replica is there."""
    made = status()["spare_snapshots"]["made"]
    values = begun(step)
    snapshotter.join(WAIT_S)
    until(lambda: status()["spare_snapshots"]["made"] == made + 1, "a replica")
    return values


def begun(step: int) -> list[np.ndarray[Any, Any]]:
    values = [random.random(SHAPE, np.float32) for _ in range(ARRAYS)]
    assert snapshotter.save(step, [jax.device_put(value, sharding) for value in values])
    return values


def sound() -> list[int]:
    latest = snapshotter._slot.latest
    assert latest is not None
    return snapshots.sound_replicas(latest[1])


def check_loaded(values: list[np.ndarray[Any, Any]]) -> None:
    loaded = snapshotter.load(abstract)
    for array, value in zip(loaded, values, strict=True):
        for shard in array.addressable_shards:
            assert np.array_equal(np.asarray(shard.data), value[shard.index])


def replicas() -> dict[int, Path]:
    """The memory of the head that can be that of a replica, by age."""
    segments: dict[int, Path] = {}
    for path in Path(f"/proc/{status()['pid']}/fd").iterdir():
        with contextlib.suppress(OSError):
            found = re.match(r"/memfd:regrow-arena-(\d+)", str(path.readlink()))
            if found and path.stat().st_size >= NBYTES:
                segments[int(found[1])] = path
    return segments


def flip_a_bit_of_the_replicas() -> None:
    for path in replicas().values():
        with path.open("r+b") as file, mmap.mmap(file.fileno(), NBYTES) as segment:
            segment[NBYTES // 3] ^= 1


def tell(what: str) -> None:
    print(json.dumps({"what": what, "sound": sound(), "segments": len(replicas())}), flush=True)


def main() -> None:
    values = saved(1)
    kill(1)
    all_up()
    tell("a slice killed")
    check_loaded(values)

    # What was loaded is a snapshot as well, and of the same memory.
    kill(1)
    all_up()
    tell("killed again")
    check_loaded(values)

    values = saved(2)
    kill(0)
    kill(1)
    all_up()
    tell("all slices killed")
    check_loaded(values)

    values = saved(3)
    flip_a_bit_of_the_replicas()
    kill(1)
    all_up()
    tell("a corrupt replica")
    check_loaded(values)

    values = saved(4)
    kill(0)
    until(lambda: pids(0), "a spare")
    kill(0)  # While it takes the place.
    all_up()
    tell("the spare killed, too")
    check_loaded(values)

    newer = begun(5)
    kill(1)  # While a replica is made.
    snapshotter.join(WAIT_S)
    all_up()
    assert snapshotter.latest is not None
    tell("killed while it is made")
    check_loaded(newer if snapshotter.latest.step == 5 else values)


def wait_for_the_end(file: Path) -> None:
    saved(1)
    file.write_text(str(status()["pid"]))
    time.sleep(WAIT_S)


if len(sys.argv) > 2:
    wait_for_the_end(Path(sys.argv[2]))
else:
    main()
