"""Prints how many devices there are, on all hosts together: what `run_basic_jax.py` has every host run."""

import jax

jax.distributed.initialize()
print(jax.device_count(), flush=True)
