"""`jax.experimental.colocated_python` through Regrow, as a client of a cluster of two slices."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import case, run_cases
from jax.experimental import colocated_python
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DEVICES = jax.devices()
MESH = Mesh(np.array(DEVICES).reshape(2, -1), ("slice", "device"))
EACH = NamedSharding(MESH, P(("slice", "device")))
X = np.arange(8, dtype=np.float32)


@colocated_python.colocated_python
def add_one(x: Any) -> Any:
    return x + 1


def error_of(function: Callable[[], Any]) -> str:
    try:
        jax.block_until_ready(function())
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    raise AssertionError("no error came")


@case
def on_one_device() -> None:
    for device in (DEVICES[0], DEVICES[-1]):
        x = jax.device_put(X, device)
        for _ in range(3):
            x = add_one(x)
        assert x.devices() == {device}
        assert np.array_equal(x, X + 3)


@case
def on_all_devices() -> None:
    @colocated_python.colocated_python
    def scale(tree: Any, by: Any) -> Any:
        def each(x: Any) -> Any:
            parts = [jax.device_put(np.asarray(s.data) * 2, s.device) for s in x.addressable_shards]
            return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)

        return {"a": each(tree["a"]), "n": each(by)}

    x = jax.device_put(X, EACH)
    for _ in range(2):
        got = scale({"a": x}, by=jax.device_put(X[:1], NamedSharding(MESH, P())))
        assert got["a"].sharding == EACH
        assert np.array_equal(got["a"], X * 2)
        assert np.array_equal(got["n"], X[:1] * 2)
    assert np.array_equal(jax.jit(lambda v: v.sum())(got["a"]), 56)


@case
def specialised() -> None:
    spec = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=EACH)
    f = colocated_python.colocated_python(lambda x: x)
    f = f.specialize(in_specs=((spec,), {}), out_specs_fn=lambda x: x, devices=DEVICES)
    assert np.array_equal(f(jax.device_put(X, EACH)), X)


@case
def in_a_process_of_its_own_and_without_arguments() -> None:
    @colocated_python.colocated_python
    def where() -> Any:
        return jax.device_put(np.int32(os.getpid()), jax.local_devices()[0])

    pids = [int(where.specialize(devices=[device])()) for device in (DEVICES[0], DEVICES[4])]
    assert len({os.getpid(), *pids}) == 3


@case
def the_user_s_default_precision() -> None:
    @colocated_python.colocated_python
    def make(x: Any) -> Any:
        return jnp.sin(jax.device_put(2.0, next(iter(x.devices())))) * x

    assert make(jax.device_put(X, DEVICES[1])).dtype == np.float32


@case
def errors_are_told() -> None:
    @colocated_python.colocated_python
    def fail(x: Any) -> Any:
        raise ValueError("a mistake of mine, INTERNAL")

    x = jax.device_put(X, DEVICES[2])
    for _ in range(2):
        text = error_of(lambda: fail(x))
        assert "ValueError: a mistake of mine" in text, text
        assert "INTERNAL" not in text, text
        assert "in fail" in text, text
    assert np.array_equal(add_one(x), X + 1)


@case
def objects() -> None:
    @colocated_python.colocated_python_class
    class Counter:
        def __init__(self, start: int) -> None:
            self.value = start

        def add(self, x: Any) -> Any:
            self.value += 1
            return x + self.value

    counter = Counter(10)
    x = jax.device_put(np.float32(0), DEVICES[3])
    assert [float(counter.add(x)) for _ in range(3)] == [11, 12, 13]


@case
def random_keys_and_programs_around() -> None:
    @colocated_python.colocated_python
    def draw(key: Any) -> Any:
        return jax.random.uniform(key, (4,))

    key = jax.device_put(jax.random.key(5), DEVICES[6])
    got = jax.jit(lambda v: v + 0)(draw(key))
    assert np.array_equal(got, jax.random.uniform(jax.random.key(5), (4,)))


if __name__ == "__main__":
    sys.exit(run_cases())
