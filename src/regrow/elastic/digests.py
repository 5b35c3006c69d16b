"""Content hashes of sharded arrays, computed where the arrays are.

Each device hashes its own shards, so no bytes move and no collective is needed; only the hashes, 8
bytes for each 64 KiB, come to the client. They find corruption, not forgery: a single changed word
always changes the hash, anything else is missed by a chance of about 2^-32.

Small shards of a device are hashed together, as one row of words: one hash each would make a program
that takes long to compile. A large one is hashed alone and where it is, without a copy; arrays of one
shape share that program. `pieces` divides arrays so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

PIECE_BYTES: Final = 1 << 20
_BLOCK: Final = (32, 512)
_BLOCK_WORDS: Final = _BLOCK[0] * _BLOCK[1]
_ODD: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
# Of less than 8 bits; a conversion keeps every value of them apart.
_SMALL_INTEGERS: Final = frozenset({"int2", "int4", "uint2", "uint4"})
_SMALL_FLOATS: Final = ("float4_", "float6_")
_UNSIGNED: Final = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


def pieces(arrays: Sequence[Any]) -> list[slice]:
    """Stretches of arrays of which each is worth a digest: a large array, or several small ones."""
    parts, begin, size = [], 0, 0
    for number, array in enumerate(arrays):
        if number > begin and size + array.nbytes > PIECE_BYTES:
            parts.append(slice(begin, number))
            begin, size = number, 0
        size += array.nbytes
    return [*parts, slice(begin, len(arrays))]


def digest(arrays: Sequence[Any]) -> jax.Array:
    """The hashes of arrays that lie on one mesh in device memory.

    Args:
        arrays: At least one; all with a `NamedSharding` of the same mesh.

    Returns:
        uint32 of shape (devices of the mesh, 2, blocks). It is computed asynchronously.
    """
    specs = tuple(array.sharding.spec for array in arrays)
    hashes: jax.Array = _program(arrays[0].sharding.mesh, specs)(*arrays)
    return hashes


def fetched(digests: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
    """Several digests of each of several meshes, in the memory of this process.

    Args:
        digests: For each mesh as many, of the same shapes.

    Raises:
        JaxRuntimeError: A slice was lost before they were there.
    """
    rows = jax.device_get([_together(*of_mesh) for of_mesh in digests])
    ends = np.cumsum([one.shape[-1] for one in digests[0]])[:-1]
    return tuple(tuple(np.split(row, ends, axis=-1)) for row in rows)


@jax.jit
def _together(*digests: jax.Array) -> jax.Array:
    return jnp.concatenate(digests, axis=-1)


def different(arrays: Sequence[Any], one: Any, other: Any) -> list[int]:
    """Which arrays two digests of them differ at: the numbers of those that share a block with it."""
    blocks = np.flatnonzero((np.asarray(one) != np.asarray(other)).any(axis=(0, 1)))
    return [
        number
        for number, (first, last) in enumerate(_extents(arrays))
        if last > first
        and any(first // _BLOCK_WORDS <= b <= (last - 1) // _BLOCK_WORDS for b in blocks)
    ]


def _extents(arrays: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Where the words of each array begin and end in the row of a device."""
    begin = 0
    for array in arrays:
        shard = array.sharding.shard_shape(array.shape)
        end = begin + int(np.prod(shard)) * _words_each(array.dtype)
        yield begin, end
        begin = end


@functools.lru_cache(maxsize=1024)
def _program(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Callable[..., jax.Array]:
    out: Any = PartitionSpec(mesh.axis_names)  # type: ignore[no-untyped-call]
    return jax.jit(
        jax.shard_map(_of_device, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    )


def _of_device(*shards: jax.Array) -> jax.Array:
    # Whole blocks of the first are read where they are; all else is put together.
    first = shards[0].reshape(-1)
    per_block = _BLOCK_WORDS // _words_each(first.dtype)
    blocks = first.size // per_block
    rest = [_words(first[blocks * per_block :]), *(_words(shard) for shard in shards[1:])]
    missing = -sum(part.size for part in rest) % _BLOCK_WORDS
    row = jnp.concatenate([*rest, jnp.zeros(missing, jnp.uint32)]).reshape(-1, _BLOCK_WORDS)

    # A loop, so that what is computed on the way is never larger than a block.
    def of_first(number: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice(first, (number * per_block,), (per_block,))
        return _of_block(_words(part))

    hashes = [jax.lax.map(_of_block, row)]
    if blocks:
        hashes.insert(0, jax.lax.map(of_first, jnp.arange(blocks)))
    return jnp.concatenate(hashes).T[None]


def _of_block(words: jax.Array) -> jax.Array:
    """Two words. Odd weights: a single change of any word cannot cancel out."""
    block = words.reshape(_BLOCK)
    # Rows first: their sums vectorise.
    row = jax.lax.broadcasted_iota(jnp.uint32, _BLOCK, 0)
    sums = jnp.sum(block * _weights(row, 0), axis=0, dtype=jnp.uint32)
    column = jax.lax.iota(jnp.uint32, _BLOCK[1])
    low = jnp.sum(sums * _weights(column, 1), dtype=jnp.uint32)
    high = jnp.sum((sums ^ (sums >> 15)) * _weights(column, 2), dtype=jnp.uint32)
    return jnp.stack([low, high])


def _weights(place: jax.Array, which: int) -> jax.Array:
    weights: jax.Array = (place * jnp.uint32(_ODD[which])) | jnp.uint32(1)
    return weights


def _words_each(dtype: Any) -> int:
    """How many words an element has."""
    return max(1, int(dtype.itemsize) // 4)


def _words(x: jax.Array) -> jax.Array:
    """The bits of an array as 32-bit words, one or two for each element (complex128: four)."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.concatenate([_words(x.real.reshape(-1)), _words(x.imag.reshape(-1))])
    if x.dtype == jnp.bool_ or x.dtype.name in _SMALL_INTEGERS:
        x = x.astype(jnp.int8)
    elif x.dtype.name.startswith(_SMALL_FLOATS):
        x = x.astype(jnp.float32)
    bits: Any = jax.lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize])
    words: jax.Array = bits.reshape(-1).astype(jnp.uint32)
    return words
