"""Prints how many devices there are, on all hosts together: what `run_basic_jax.py` has every host run."""

import os

import jax

jax.distributed.initialize(
    os.environ["REGROW_COORDINATOR_ADDRESS"],
    int(os.environ["REGROW_RANKS"]),
    int(os.environ["REGROW_RANK"]),
)
print(jax.device_count(), flush=True)
