"""Computations whose bits must not depend on where they run: prints `NAME DIGEST` for each.

Runs alike on a plain CPU backend of four devices and on a cluster of two slices of two.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DEVICES = jax.devices()
MESH = Mesh(np.array(DEVICES).reshape(2, 2), ("slice", "device"))
BOTH = ("slice", "device")
GRID = NamedSharding(MESH, P("slice", "device"))
RNG = np.random.default_rng(11)
A = RNG.standard_normal((16, 16), dtype=np.float32)
B = RNG.standard_normal((16, 16), dtype=np.float32)
S = A @ A.T + 16 * np.eye(16, dtype=np.float32)
# Sums of these are exact in any order: four ranks may add in another order than one process does.
WHOLE_NUMBERS = RNG.integers(-1000, 1000, (8, 16)).astype(np.float32)
Tree = Any


def here(x: Any, sharding: Any = GRID) -> Any:
    return jax.device_put(x, sharding)


def mapped(function: Callable[..., Any], ins: Any, outs: Any) -> Any:
    return jax.jit(jax.shard_map(function, mesh=MESH, in_specs=ins, out_specs=outs))


def mlp(params: Any, x: Any, y: Any) -> Any:
    return ((jnp.tanh(x @ params[0]) @ params[1] - y) ** 2).mean()


def dtypes() -> Tree:
    names = ("int8", "uint16", "int32", "float16", "bfloat16", "float8_e4m3fn", "complex64")
    f = jax.jit(lambda v: (v * v + v, v.T))
    return [f(here((WHOLE_NUMBERS % 5).astype(jnp.dtype(name)))) for name in names]


def matmul() -> Tree:
    return jax.jit(lambda a, b: a @ b)(A, B)


def sharded_matmul() -> Tree:
    right = here(B, NamedSharding(MESH, P(None, "device")))
    return jax.jit(lambda a, b: a @ b)(here(A, NamedSharding(MESH, P("slice", None))), right)


def gradient() -> Tree:
    return jax.jit(jax.value_and_grad(mlp))((A, B), A[:8], B[:8])


def trained_on_two_ranks() -> Tree:
    @partial(jax.jit, donate_argnums=0)
    def step(params: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(mlp)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), loss

    pair = Mesh(np.array([DEVICES[0], DEVICES[2]]), "data")
    params = here((A, B), NamedSharding(pair, P()))
    x, y = here((A, B), NamedSharding(pair, P("data")))
    losses = []
    for _ in range(5):
        params, loss = step(params, x, y)
        losses.append(loss)
    return params, losses


def scan() -> Tree:
    return jax.jit(lambda x: jax.lax.scan(lambda c, v: (jnp.sin(c + v), c * v), x[0], x))(A)


def while_and_cond() -> Tree:
    def body(x: Any) -> Any:
        return jax.lax.cond(x.sum() > 0, lambda v: v * 0.9 - 1, lambda v: v * 1.1 + 0.5, x)

    return jax.jit(lambda x: jax.lax.while_loop(lambda v: jnp.abs(v).max() > 0.7, body, x))(
        A[0] / 9
    )


def psum_of_two() -> Tree:
    return mapped(lambda v: jax.lax.psum(v, "slice"), P("slice", "device"), P(None, "device"))(A)


def psum_of_all() -> Tree:
    return mapped(lambda v: jax.lax.psum(v, BOTH), P(BOTH), P())(WHOLE_NUMBERS)


def extremes_of_all() -> Tree:
    def both(v: Any) -> Any:
        return jax.lax.pmax(v, BOTH), jax.lax.pmin(v, BOTH)

    return mapped(both, P(BOTH), P())(A)


def all_to_all() -> Tree:
    turn = mapped(
        lambda v: jax.lax.all_to_all(v, BOTH, 1, 0, tiled=True), P(BOTH, None), P(None, BOTH)
    )
    return turn(A)


def ppermute() -> Tree:
    ring = [(i, (i + 1) % 4) for i in range(4)]
    return mapped(lambda v: jax.lax.ppermute(v, BOTH, ring), P(BOTH), P(BOTH))(A)


def all_gather() -> Tree:
    return mapped(lambda v: jax.lax.all_gather(v, BOTH, tiled=True) * 2, P(BOTH), P(BOTH))(A)


def sort() -> Tree:
    return jax.jit(lambda x: (jnp.sort(x, 1), jnp.argsort(x, 0)))(here(A))


def fft() -> Tree:
    return jax.jit(lambda x: jnp.fft.irfft2(jnp.fft.rfft2(x) * 2))(A)


def linear_algebra() -> Tree:
    @jax.jit
    def f(a: Any, s: Any) -> Any:
        linalg = jnp.linalg
        return linalg.qr(a), linalg.eigh(s), linalg.svd(a), linalg.solve(s, a), linalg.cholesky(s)

    return f(A, S)


def pinned_host() -> Tree:
    host = here(here(A), GRID.with_memory_kind("pinned_host"))
    f = jax.jit(lambda x: x * 3, out_shardings=GRID.with_memory_kind("pinned_host"))
    return host, f(here(host))


def resharded() -> Tree:
    turned = Mesh(np.array(DEVICES[::-1]).reshape(2, 2), ("a", "b"))
    x = here(A)
    return [
        here(x, NamedSharding(turned, spec)) for spec in (P("b", "a"), P(None, ("a", "b")), P())
    ]


def donated() -> Tree:
    f = jax.jit(lambda x, y: (x + y, x * y), donate_argnums=(0, 1))
    x, y = here(A), here(B)
    for _ in range(6):
        x, y = f(x, y)
    return x, y


def random_numbers() -> Tree:
    key = jax.random.key(3)
    return (
        jax.random.normal(key, (32,)),
        jax.random.permutation(key, 64),
        jax.jit(lambda k: jax.random.uniform(k, (8, 8)), out_shardings=GRID)(key),
    )


def convolution() -> Tree:
    return jax.jit(partial(jax.lax.conv, window_strides=(1, 1), padding="SAME"))(
        A.reshape(1, 4, 8, 8), B.reshape(4, 4, 4, 4)
    )


def reductions_and_indices() -> Tree:
    @jax.jit
    def f(x: Any) -> Any:
        return x.sum(1), jnp.cumsum(x, 1), x.argmax(0), x[jnp.array([3, 1]), 2:5], jnp.var(x)

    return f(A)


def transcendental() -> Tree:
    f = jax.jit(lambda x: (jnp.exp(x), jnp.log1p(x * x), jax.nn.gelu(x), jax.scipy.special.erf(x)))
    return f(here(A))


def wide_numbers() -> Tree:
    with jax.enable_x64(True):
        return jax.jit(lambda x: jnp.cos(x) @ x)(A.astype(np.float64))


COMPUTATIONS = (
    *(dtypes, matmul, sharded_matmul, gradient, trained_on_two_ranks, scan, while_and_cond),
    *(psum_of_two, psum_of_all, extremes_of_all, all_to_all, ppermute, all_gather, sort, fft),
    *(linear_algebra, pinned_host, resharded, donated, random_numbers, convolution),
    *(reductions_and_indices, transcendental, wide_numbers),
)


def digest(tree: Tree) -> str:
    told = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        value = np.asarray(leaf)
        told.update(f"{value.dtype} {value.shape} ".encode() + value.tobytes())
    return told.hexdigest()[:16]


def main() -> None:
    for computation in COMPUTATIONS:
        print(computation.__name__, digest(computation()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
