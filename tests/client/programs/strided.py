"""NumPy arrays with negative and zero strides, on every way from the host to devices."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
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
THREADS = 4
MESH = Mesh(np.array(jax.devices()), "x")


def check(name: str, got: Any, want: Any) -> None:
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want), err_msg=name)


ADD = jax.jit(lambda v: v + v)
PAIR = jax.jit(lambda u, v: (u + u, v))
TREE = jax.jit(lambda tree: tree["a"] + tree["b"][0])
SPLIT = NamedSharding(MESH, P("x"))
ADD_SPLIT = jax.jit(lambda v: v + v, in_shardings=SPLIT)
WHOLE = NamedSharding(MESH, P())


def compiled_ways(name: str, array: np.ndarray[Any, Any]) -> None:
    """Takes an array to the devices as an argument, by `device_put` and by a callback."""
    plain, last = np.ascontiguousarray(array), jax.devices()[-1]
    want = jnp.asarray(plain)
    for _ in range(3):
        check(name, ADD(array), want + want)
    check(name, PAIR(array, plain)[0], want + want)
    check(name, TREE({"a": array, "b": [array]}), want + want)
    check(name, jax.device_put(array), want)
    check(name, jax.device_put(array, last), want)
    check(name, jnp.asarray(array), want)
    check(name, jnp.array(array), want)
    check(name, jax.device_put(array, WHOLE), want)
    check(name, jax.make_array_from_process_local_data(WHOLE, array), want)
    if array.shape[0] % len(jax.devices()) == 0:
        check(name, jax.device_put(array, SPLIT), want)
        check(name, ADD_SPLIT(array), want + want)
        check(name, jax.make_array_from_callback(array.shape, SPLIT, array.__getitem__), want)


def other_ways(name: str, array: np.ndarray[Any, Any]) -> None:
    """The same as a constant, and all at once."""
    want = jnp.asarray(np.ascontiguousarray(array))
    check(name, jax.jit(lambda v: v + array)(want), want + want)
    check(name, jax.device_put([array, {"a": array}])[1]["a"], want)
    check(name, jax.lax.scan(lambda carry, row: (carry, row), 0, array)[1], want)


def main() -> int:
    for name, array in ARRAYS.items():
        compiled_ways(name, array)
        other_ways(name, array)
        print("ok", name, flush=True)
    with ThreadPoolExecutor(THREADS) as pool:
        for done in [
            pool.submit(compiled_ways, *item) for _ in range(2) for item in ARRAYS.items()
        ]:
            done.result()
    print("ok from several threads at once")
    try:
        jax.device_put(np.array(["text"]))
    except TypeError:
        print("ok other errors stay")
    return 0


if __name__ == "__main__":
    sys.exit(main())
