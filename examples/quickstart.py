"""A slice dies, its arrays are lost, the others live on; it returns and takes new work."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import regrow


def spread(devices: list[jax.Device]) -> jax.Array:
    """The numbers 0 to 7, laid out over these devices."""
    mesh = Mesh(np.array(devices), ("x",))
    return jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("x")))


with regrow.LocalCluster(slices=2, devices_per_slice=2) as cluster:
    regrow.connect(cluster.target)  # from here on this is JAX as you know it
    everywhere, on_slice_0 = spread(jax.devices()), spread(jax.devices()[:2])
    print(jax.jit(jnp.sum)(everywhere))

    cluster.kill(1)
    try:
        print(everywhere + 1)
    except jax.errors.JaxRuntimeError as error:
        print(str(error).partition(":")[0], "as it must be")
    print(on_slice_0 + 1)

    cluster.restore(1)
    cluster.wait_healthy(timeout_s=30)
    print(jax.jit(jnp.sum)(spread(jax.devices())))
