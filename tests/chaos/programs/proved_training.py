"""A small elastic training that records its steps, with faults of its own making if asked for."""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pathwaysutils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from regrow import elastic

RECORDS, WIDTH, BATCH = 4096, 16, 12
RNG = np.random.default_rng(5)
INPUTS = RNG.normal(size=(RECORDS, WIDTH)).astype(np.float32)
WANTED = np.tanh(INPUTS @ RNG.normal(size=(WIDTH, 4))).astype(np.float32)
BUGS = ("none", "wrong load", "double", "skip", "unlike", "dies")


class Loader:
    """Positions in order; its state is the next one."""

    def __init__(self) -> None:
        self.next = 0

    def batch(self) -> range:
        ids = range(self.next, self.next + BATCH)
        self.next += BATCH
        return ids


@jax.jit
def train_step(state: Any, x: Any, y: Any) -> tuple[Any, jax.Array]:
    def loss_of(w: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ w) - y) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(state["w"])
    momentum = 0.8 * state["momentum"] + gradient
    return {"w": state["w"] - 0.1 * momentum, "momentum": momentum}, loss


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kit", choices=("ours", "stock"), default="ours")
    parser.add_argument("--first", action="store_true", help="use the devices of slice 0 alone")
    parser.add_argument("--pause", action="store_true", help="wait for all slices")
    parser.add_argument("--signal", action="store_true", help="grow by ScaleUpSignalError")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--interval", type=int, default=3)
    parser.add_argument("--pace", type=float, default=0.02, help="least seconds of a step")
    parser.add_argument("--bug", choices=BUGS, default="none")
    parser.add_argument("--record", choices=("all", "loss", "nothing", "print"), default="all")
    return parser.parse_args()


def main() -> None:
    asked = parsed()
    if asked.kit == "ours":
        from regrow.elastic import manager

        snapshotter: Any = elastic.Snapshotter()
    else:
        from pathwaysutils.elastic import manager

        snapshotter = ocp.v1.training.pathways.Snapshotter(replica_axis_index=0)
    pathwaysutils.initialize()
    slices = manager.Manager([d for d in jax.devices() if not (asked.first and d.slice_index)])
    attempts = 0

    def begin() -> tuple[Any, Any, Any]:
        active = sorted(slices.active_slice_indices)
        devices = [d for index in active for d in slices.slice_to_devices[index]]
        mesh = Mesh(np.asarray(devices).reshape(len(active), -1), ("replica", "model"))
        everywhere = NamedSharding(mesh, P())
        w = np.random.default_rng(1).normal(size=(WIDTH, 4)).astype(np.float32)
        state = jax.device_put({"w": w, "momentum": np.zeros_like(w)}, everywhere)
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), state
        )
        return state, abstract, NamedSharding(mesh, P("replica"))

    @slices.elastic_retry(
        minimum_slice_count=None if asked.pause else 1, poll_interval=0.2, timeout=60
    )
    def train() -> None:
        nonlocal attempts
        attempts += 1
        state, abstract, rows = begin()
        loader, step = Loader(), 0
        if snapshotter.latest is not None:
            snapshotter.join()
            got = snapshotter.load({"state": abstract, "step": 0, "next": 0})
            state, step, loader.next = got["state"], got["step"] + 1, got["next"]
            if asked.bug == "wrong load":
                state["momentum"] = jnp.zeros_like(state["momentum"])
            if asked.bug == "double":
                loader.next -= 1
            if asked.bug == "skip":
                loader.next += 1
        while step < asked.steps:
            began = time.monotonic()
            elastic.at_step(step)
            ids = loader.batch()
            x, y = jax.device_put((INPUTS[ids], WANTED[ids]), rows)
            state, loss = train_step(state, x, y)
            jax.block_until_ready(loss)
            if asked.bug == "unlike" and step == 5:
                noise = time.time_ns() % 1000 * 1e-6
                state["w"] = state["w"].at[3, 1].add(noise)
            if asked.bug == "dies" and step == 5:
                raise SystemExit("the data are gone")
            if asked.record == "all":
                elastic.record(step, loss, state, ids)
            elif asked.record == "loss":
                elastic.record(step, float(loss))
            elif asked.record == "print":
                print(f"step {step} loss {float(loss):.6f}")
            if step % asked.interval == 0:
                snapshotter.save(step, {"state": state, "step": step, "next": loader.next})
            time.sleep(max(0.0, began + asked.pace - time.monotonic()))
            if slices.available_inactive_slices:
                if asked.signal:
                    raise manager.ScaleUpSignalError
                slices.active_slice_indices |= slices.available_inactive_slices
                _, abstract, rows = begin()
                state = jax.device_put(state, jax.tree.map(lambda x: x.sharding, abstract))
            step += 1

    train()
    snapshotter.join()
    slices.close()


if __name__ == "__main__":
    main()
