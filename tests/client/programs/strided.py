"""NumPy arrays with negative and zero strides, on every way from the host to devices."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

BASE = np.arange(48, dtype=np.float32).reshape(8, 6)
ARRAYS = {
    "reversed": BASE[0, ::-1],
    "rows reversed": BASE[::-1],
    "all reversed and cut": BASE[::-1, ::-2],
    "broadcast": np.broadcast_to(np.float32(3), (8,)),
    "broadcast row": np.broadcast_to(BASE[0], (8, 6)),
    "broadcast of one": np.broadcast_to(np.float32(3), (1, 1)),
    "bytes": np.arange(6, dtype=np.int8)[::-1],
    "needs another type": np.arange(6.0)[::-1],
    "transposed": BASE.T[::-1],
    "half": BASE.astype(jnp.bfloat16)[:, ::-1],
}
MESH = Mesh(np.array(jax.devices()), "x")


def check(name: str, got: Any, want: Any) -> None:
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want), err_msg=name)


def main() -> int:
    add = jax.jit(lambda v: v + v)
    pair = jax.jit(lambda u, v: (u + u, v))
    last = jax.devices()[-1]
    for name, array in ARRAYS.items():
        plain = np.ascontiguousarray(array)
        want = jnp.asarray(plain)
        for _ in range(3):
            check(name, add(array), want + want)
        check(name, pair(array, plain)[0], want + want)
        check(name, jax.device_put(array), want)
        check(name, jax.device_put(array, last), want)
        check(name, jnp.asarray(array), want)
        check(name, jnp.array(array), want)
        check(name, jax.device_put([array, {"a": array}])[1]["a"], want)
        check(name, jax.device_put(array, NamedSharding(MESH, P())), want)
        check(name, jax.jit(lambda v, array=array: v + array)(plain), want + want)
        if array.shape and array.shape[0] % len(jax.devices()) == 0:
            split = NamedSharding(MESH, P("x"))
            check(name, jax.device_put(array, split), want)
            check(name, jax.jit(lambda v: v + v, in_shardings=split)(array), want + want)
            check(
                name,
                jax.make_array_from_callback(array.shape, split, lambda i, a=array: a[i]),
                want,
            )
        print("ok", name, flush=True)
    try:
        jax.device_put(np.array(["text"]))
    except TypeError:
        print("ok other errors stay")
    return 0


if __name__ == "__main__":
    sys.exit(main())
