"""Content hashes of sharded arrays, made by the hosts that hold them.

No bytes move and nothing is compiled: only the hashes, 16 bytes for each shard, come to the client. They
are XXH3's: they find corruption, not forgery.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from regrow.channel.digests import COPIES_IN, HASH_BYTES, CopySpec, DigestRequest
from regrow.elastic.libraries import pathwaysutils
from regrow.wire.dtypes import kind_of

# What is public of it is deprecated, and tests that take warnings for errors would fail of that.
_pxla: Final[Any] = importlib.import_module("jax._src.interpreters.pxla")

_Run: TypeAlias = Callable[[Sequence[jax.Array]], list[jax.Array]]


def digest(arrays: Sequence[jax.Array]) -> jax.Array:
    """Begins to hash arrays that lie on one mesh.

    Args:
        arrays: At least one; all with a `NamedSharding` of the same mesh.

    Returns:
        uint8 of shape (devices of the mesh, arrays, 16), each device's on itself.

    Raises:
        JaxRuntimeError: The server cannot do it: it is none of Regrow's.
    """
    (hashes,) = _program(_mesh(arrays), len(arrays), (), ())(arrays)
    return hashes


def copied(arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
    """Begins to copy arrays to pinned host memory; the copies, and `digest` of the arrays.

    Both are made in one go, in which the arrays are read once.

    Args:
        arrays: As for `digest`.

    Raises:
        JaxRuntimeError: A slice is lost, or the server cannot do it.
    """
    avals = tuple(array.aval for array in arrays)
    where = tuple(array.sharding.with_memory_kind(COPIES_IN) for array in arrays)
    hashes, *copies = _program(_mesh(arrays), len(arrays), avals, where)(arrays)
    return copies, hashes


def different(one: Any, other: Any) -> list[int]:
    """The numbers of the arrays that two digests differ at."""
    numbers: list[int] = np.flatnonzero((np.asarray(one) != np.asarray(other)).any((0, 2))).tolist()
    return numbers


def _mesh(arrays: Sequence[jax.Array]) -> Mesh:
    mesh: Mesh = arrays[0].sharding.mesh  # type: ignore[attr-defined]
    return mesh


@functools.lru_cache(maxsize=64)
def _program(mesh: Mesh, arrays: int, copies: tuple[Any, ...], where: tuple[Any, ...]) -> _Run:
    devices = tuple(device.id for device in mesh.devices.flat)
    specs = tuple(map(_copy_spec, copies, where))
    text = DigestRequest(devices, arrays, specs).text()
    compiled = pathwaysutils("plugin_executable").PluginExecutable(text).compiled
    hashes = jax.core.ShapedArray((len(devices), arrays, HASH_BYTES), np.dtype(np.uint8))
    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))  # type: ignore[no-untyped-call]
    handlers = _pxla.global_avals_to_results_handler((hashes, *copies), (split, *where), True)

    def run(given: Sequence[jax.Array]) -> list[jax.Array]:
        return list(compiled.execute_sharded(given).consume_with_handlers(handlers.handlers))

    return run


def _copy_spec(aval: Any, sharding: NamedSharding) -> CopySpec:
    op_sharding = sharding._to_xla_hlo_sharding(aval.ndim).to_proto().SerializeToString()
    return CopySpec(kind_of(np.dtype(aval.dtype)), tuple(aval.shape), op_sharding)
