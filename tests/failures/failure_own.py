"""A client whose programs across slices fail by themselves, again and again.

Prints what it saw: a JSON object that counts texts of errors.
"""

from __future__ import annotations

import collections
import json
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import regrow  # noqa: F401 - host callbacks

ROUNDS = 8
# It has the words of a broken link, and some that mean a lost slice.
TEXT = "Gloo all-reduce failed: this is INTERNAL to the user"
BAD_VALUE = 2


def check(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if x.ravel()[0] == BAD_VALUE:
        raise ValueError(TEXT)
    return x


def checked(x: jax.Array) -> jax.Array:
    x = x + 0 * jax.lax.psum(x, "slices")
    x = jax.pure_callback(check, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    return x + 0 * jax.lax.psum(x, "slices")


def total(x: jax.Array) -> jax.Array:
    return x + jax.lax.psum(x, "slices")


def raised(array: jax.Array) -> str:
    try:
        array.block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return "nothing was raised"


def main() -> None:
    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("slices",))
    both = [
        jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("slices"), out_specs=P("slices")))
        for function in (checked, total)
    ]
    fails, works = both
    sharding = NamedSharding(mesh, P("slices"))
    good = jax.device_put(np.zeros(len(devices), np.float32), sharding)
    bad = jax.device_put(np.arange(len(devices), dtype=np.float32), sharding)
    np.testing.assert_array_equal(fails(good), good)
    seen: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for _ in range(ROUNDS):
        failed = fails(bad)
        derived, innocent = works(failed), works(bad)
        for shard in failed.addressable_shards:
            seen["failed"][raised(shard.data)] += 1
        seen["failed"][raised(failed)] += 1
        seen["derived"][raised(derived)] += 1
        seen["innocent"][raised(innocent)] += 1
        np.testing.assert_array_equal(works(bad), bad + np.sum(np.asarray(bad)))
    json.dump(seen, sys.stdout)


if __name__ == "__main__":
    main()
