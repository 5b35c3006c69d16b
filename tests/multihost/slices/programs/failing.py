"""On every host: steps that need all hosts; process 1 fails in one of the ways in which one can."""

from __future__ import annotations

import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from regrow.multihost import StepDeadline

STEPS = 1_000_000


def fail(way: str) -> None:
    match way:
        case "raise":
            raise ValueError("the batch is empty")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "stuck":
            time.sleep(1000)


def main() -> None:
    way = sys.argv[1]
    jax.distributed.initialize()
    mesh = Mesh(np.array(jax.devices()), ("all",))
    everywhere = NamedSharding(mesh, PartitionSpec("all"))
    x = jax.make_array_from_callback(
        (jax.device_count(),), everywhere, lambda index: np.ones(jax.device_count())[index]
    )
    step = jax.jit(lambda x: x + jnp.sum(x) * 0)
    with StepDeadline(3, first_s=60) as deadline:
        for number in range(STEPS):
            deadline.begin(f"step {number}")
            x = jax.block_until_ready(step(x))
            if number == 3 and jax.process_index() == 1:
                print("now", flush=True)
                fail(way)


if __name__ == "__main__":
    main()
