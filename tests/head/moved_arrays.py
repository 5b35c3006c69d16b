"""Arrays of numbers, put into a world and read out of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from head_world import F32, Answer, World

from regrow.errors import Code, StatusError
from regrow.head.buffers import Array
from regrow.head.links import Lease
from regrow.head.transfers import INLINE_BYTES
from regrow.wire.dtypes import kind_of
from regrow.wire.shardings import Sharding

BIG = INLINE_BYTES // 4 + 100  # f32 elements that go through shared memory


def memory_of(world: World, data: bytes) -> Any:
    memory = world.runtime.transfers.room(len(data))
    view = memory.view if isinstance(memory, Lease) else memory
    view[:] = data
    return memory


def put(world: World, value: np.ndarray[Any, Any], sharding: Sharding, **how: Any) -> Array:
    kind = kind_of(value.dtype)
    memory = memory_of(world, value.tobytes())
    strides = how.get("strides")
    buffer = world.runtime.transfers.put(memory, kind, value.shape, strides, sharding)
    return Array(kind, value.shape, sharding, whole=buffer)


async def shards_of(world: World, array: Array, choose: Any = None) -> list[np.ndarray[Any, Any]]:
    """All shards, by way of `get`."""
    dtype = {F32: np.float32}.get(array.kind, np.int32)
    answers = []
    shapes = array.sharding.shard_shapes(array.shape)
    for piece, shape in zip(array.pieces(), shapes, strict=True):
        answer = Answer()
        world.runtime.transfers.get(piece, array.kind, shape, None, answer)
        answers.append(answer)
    await world.settle(*([choose] if choose else []))
    return [
        np.frombuffer(
            a.value.view if isinstance(a.value, Lease) else a.value, dtype, math.prod(shape)
        )
        .reshape(shape)
        .copy()
        for a, shape in zip(answers, shapes, strict=True)
    ]


def check(shards: list[Any], whole: Any, sharding: Sharding) -> None:
    for shard, region in zip(shards, sharding.indices(whole.shape), strict=True):
        np.testing.assert_array_equal(shard, whole[region])


def fail_part(world: World, host: int, array: Array) -> None:
    """The part of an array on a host is the error of a program."""
    cell = world.hosts[host].parts[array.whole().aid][0]
    cell.value, cell.error = None, StatusError(Code.UNKNOWN, "a program failed")


async def check_failed(world: World, array: Array) -> None:
    """That is what whoever waits for the array is told."""
    waited = Answer()
    world.runtime.transfers.ready(array.pieces(), waited)
    await world.settle()
    assert waited.error is not None
    assert waited.error.message == "a program failed"
