"""One of several clients that use the same devices at once; its number is its argument."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

NUMBER = int(sys.argv[1])
MESH = Mesh(np.array(jax.devices()).reshape(2, -1), ("slice", "device"))
SHARDING = NamedSharding(MESH, P("slice", "device"))


def main() -> None:
    x = jax.device_put(np.full((8, 8), NUMBER, np.float32), SHARDING)
    double = jax.jit(lambda v: v + NUMBER)
    total = jax.jit(jnp.sum)
    for turn in range(20):
        assert float(total(x)) == 64 * NUMBER * (turn + 1)
        x = double(x)
    print("ok one_of_several", flush=True)


if __name__ == "__main__":
    main()
