"""Kills a slice and takes it back, over and over; prints what each process holds as it goes.

    cycles.py CYCLES [EVERY]

A cycle is that of an elastic training: a snapshot, SIGKILL, the error, the snapshot loaded onto the
survivors, a step there, the return, the state laid out on all slices, a step there. Slices but the
first are killed in turn, so that the worker of the first lives through all of them. After each EVERY
cycles (default: a tenth) there is a line of JSON: `{"cycle": N, ROLE: {"pid": …, "anon_mb": …, …}}`,
and one more when what was put aside has gone, or after a minute and a half.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from regrow.control import request
from regrow.elastic import Snapshotter

CYCLES = int(sys.argv[1])
EVERY = int(sys.argv[2]) if len(sys.argv) > 2 else max(1, CYCLES // 10)
CONTROL = str(
    Path(os.environ["JAX_BACKEND_TARGET"].removeprefix("grpc://unix:")).parent / "control.sock"
)
WIDTH = 512
# What was put aside is ended after 5 s, and what is stuck in a collective when XLA gives it up.
SETTLED_S, SETTLE_LIMIT_S = 8.0, 90.0
# Memory is not given back page by page.
NEAR_MB = 4

devices = jax.devices()
slices = sorted({device.slice_index for device in devices})
snapshotter = Snapshotter()


@jax.jit
def step(state: Any, x: jax.Array) -> Any:
    return {name: w + jnp.tanh(x @ w).mean() * 1e-3 for name, w in state.items()}


def mesh_of(active: list[int]) -> Mesh:
    chosen = [device for device in devices if device.slice_index in active]
    return Mesh(np.array(chosen).reshape(len(active), -1), ("replica", "model"))


def batch(mesh: Mesh) -> jax.Array:
    rows = np.ones((12, WIDTH), np.float32)
    return jax.device_put(rows, NamedSharding(mesh, P("replica")))


def first_state() -> Any:
    return {f"w{number}": np.ones((WIDTH, WIDTH), np.float32) for number in range(4)}


def laid_out(state: Any, mesh: Mesh) -> Any:
    return jax.device_put(state, NamedSharding(mesh, P(None, "model")))


def target(mesh: Mesh) -> Any:
    sharding = NamedSharding(mesh, P(None, "model"))
    return jax.tree.map(
        lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=sharding), first_state()
    )


def cycle(state: Any, victim: int) -> Any:
    """One loss and return; the state on all slices, before and after."""
    whole, rest = mesh_of(slices), mesh_of([index for index in slices if index != victim])
    snapshotter.save(0, state)
    snapshotter.join(60)
    pid = request(CONTROL, "status")["slices"][victim]["hosts"][0]["pid"]
    os.kill(pid, signal.SIGKILL)
    state = until_lost(state, batch(whole))
    state = jax.block_until_ready(step(snapshotter.load(target(rest)), batch(rest)))
    request(CONTROL, "restore", index=victim)
    request(CONTROL, "wait_healthy", timeout_s=60)
    return jax.block_until_ready(step(laid_out(state, whole), batch(whole)))


def until_lost(state: Any, x: jax.Array) -> None:
    try:
        while True:
            state = jax.block_until_ready(step(state, x))
    except jax.errors.JaxRuntimeError as error:
        if "DATA_LOSS" not in str(error):
            raise


def held(pid: int) -> dict[str, Any]:
    """What a process holds: memory of its own and shared (MB), descriptors, threads, ports."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    links = [_target(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    return {
        "pid": pid,
        "anon_mb": int(status["RssAnon"].split()[0]) / 1024,
        "shared_mb": int(status["RssShmem"].split()[0]) / 1024,
        "descriptors": len(links),
        "segments": sum("memfd:" in link or "/dev/shm/" in link for link in links),
        "threads": int(status["Threads"]),
        "ports": len(_listening() & set(links)),
    }


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return ""


def _listening() -> set[str]:
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}


def settle(first: dict[str, Any]) -> None:
    """Waits until a worker has no more threads and memory than it had, or one minute and a half."""
    deadline = time.monotonic() + SETTLE_LIMIT_S
    time.sleep(SETTLED_S)
    while time.monotonic() < deadline:
        now = held(first["pid"])
        if now["threads"] <= first["threads"] and now["anon_mb"] <= first["anon_mb"] + NEAR_MB:
            return
        time.sleep(1)


def tell(number: int) -> dict[str, Any]:
    gc.collect()
    status = request(CONTROL, "status")
    roles = {"client": os.getpid(), "head": status["pid"]}
    roles |= {f"worker {one['index']}": one["hosts"][0]["pid"] for one in status["slices"]}
    roles |= helpers(status["pid"], set(roles.values()))
    line = {"cycle": number, "compiled": status["compiled"]}
    line |= {role: held(pid) for role, pid in roles.items()}
    print(json.dumps(line), flush=True)
    return line


def helpers(head: int, known: set[int]) -> dict[str, int]:
    """The other processes of the head, by their names."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            before, _, after = path.read_text().rpartition(")")
        except OSError:
            continue
        pid, parent = int(path.parent.name), int(after.split()[1])
        if parent == head and pid not in known:
            found[before.partition("(")[2]] = pid
    return found


def main() -> None:
    logging.getLogger("regrow.elastic").setLevel(logging.ERROR)
    whole = mesh_of(slices)
    state = jax.block_until_ready(step(laid_out(first_state(), whole), batch(whole)))
    for victim in slices[1:]:
        state = cycle(state, victim)
    first = tell(0)["worker 0"]
    for number in range(1, CYCLES + 1):
        state = cycle(state, slices[1:][number % (len(slices) - 1)])
        if number % EVERY == 0:
            tell(number)
    settle(first)
    tell(CYCLES)


main()
