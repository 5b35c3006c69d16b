"""Content hashes of sharded arrays, made by the hosts that hold them, from the bytes in host memory.

No bytes move, nothing is compiled, and what devices are busy with does not wait: only the hashes, 16
bytes for each shard, come to the client. They are XXH3's: they find corruption, not forgery.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import pxla
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from regrow.channel.digests import HASH_BYTES, request_of
from regrow.elastic.libraries import pathwaysutils


def digest(arrays: Sequence[jax.Array]) -> jax.Array:
    """The hashes of arrays that lie on one mesh. They are made when the values are there.

    Args:
        arrays: At least one; all with a `NamedSharding` of the same mesh.

    Returns:
        uint8 of shape (devices of the mesh, arrays, 16), each device's on itself.

    Raises:
        JaxRuntimeError: The server cannot do it: it is none of Regrow's.
    """
    mesh: Mesh = arrays[0].sharding.mesh  # type: ignore[attr-defined]
    program, handler = _program(mesh, len(arrays))
    results: list[jax.Array] = program.execute_sharded(arrays).consume_with_handlers([handler])
    return results[0]


def different(one: Any, other: Any) -> list[int]:
    """The numbers of the arrays that two digests differ at."""
    return np.flatnonzero((np.asarray(one) != np.asarray(other)).any(axis=(0, 2))).tolist()


@functools.lru_cache(maxsize=64)
def _program(mesh: Mesh, arrays: int) -> tuple[Any, Any]:
    devices = [device.id for device in mesh.devices.flat]
    executable = pathwaysutils("plugin_executable").PluginExecutable(request_of(devices, arrays))
    aval = jax.core.ShapedArray((len(devices), arrays, HASH_BYTES), np.dtype(np.uint8))
    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))  # type: ignore[no-untyped-call]
    return executable.compiled, pxla.global_aval_to_result_handler(aval, split, True)
