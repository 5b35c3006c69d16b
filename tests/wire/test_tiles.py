"""Index maps, against the arithmetic of XLA as JAX uses it and against numpy."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src import op_shardings
from jaxlib import xla_client as xc

from regrow.errors import Code, StatusError
from regrow.wire import schema, shardings, tiles
from regrow.wire.shardings import Sharding

OpSharding = schema.xla.OpSharding
REPLICATED, MAXIMAL, TUPLE, OTHER, MANUAL, UNKNOWN, UNREDUCED = range(7)


def hlo(devices: tuple[int, ...], **fields: Any) -> Sharding:
    return shardings.from_op_sharding(devices, None, OpSharding(**fields).SerializeToString())


@st.composite
def iotas(draw: st.DrawFn, count: int) -> tuple[list[int], list[int]]:
    """A way to factor `count`, and an order of the factors."""
    dims: list[int] = []
    rest = count
    while rest > 1 and draw(st.booleans()):
        dims.append(draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0])))
        rest //= dims[-1]
    dims.append(rest)
    return dims, draw(st.permutations(range(len(dims))))


@st.composite
def tiled(draw: st.DrawFn, kinds: tuple[int, ...] = (REPLICATED,)) -> tuple[Any, tuple[int, ...]]:
    """A tiled OpSharding of any form, and the number of tiles of each dimension of the data."""
    data = draw(st.lists(st.integers(1, 4), max_size=3))
    groups = draw(st.lists(st.integers(1, 3), max_size=2 if len(kinds) > 1 else 1))
    message = OpSharding(type=OTHER, tile_assignment_dimensions=[*data, *groups])
    if len(groups) == 1 and kinds == (REPLICATED,) and draw(st.booleans()):
        message.replicate_on_last_tile_dim = True
    else:
        message.last_tile_dims.extend(draw(st.sampled_from(kinds)) for _ in groups)
    count = math.prod([*data, *groups])
    if draw(st.booleans()):
        message.tile_assignment_devices.extend(draw(st.permutations(range(count))))
    else:
        dims, order = draw(iotas(count))
        message.iota_reshape_dims.extend(dims)
        message.iota_transpose_perm.extend(order)
    return message, tuple(data)


def by_jax(message: Any, shape: tuple[int, ...], count: int) -> tuple[tuple[slice, ...], ...]:
    """The index map that JAX works out, with explicit bounds."""
    proto = xc.OpSharding()
    proto.ParseFromString(message.SerializeToString())
    found = op_shardings.op_sharding_to_indices(xc.HloSharding.from_proto(proto), shape, count)
    return tuple(
        tuple(slice(*part.indices(size)[:2]) for part, size in zip(region, shape, strict=True))
        for region in found
    )


def by_numpy(message: Any, rank: int, shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """The index map by looking for each device in the array of tiles."""
    dims = tuple(message.tile_assignment_dimensions)
    if message.iota_reshape_dims:
        numbers = np.arange(math.prod(dims)).reshape(message.iota_reshape_dims)
        grid = numbers.transpose(message.iota_transpose_perm).reshape(dims)
    else:
        grid = np.array(message.tile_assignment_devices).reshape(dims)
    result = []
    for shard in range(grid.size):
        (place,) = np.argwhere(grid == shard).tolist()
        region = []
        for size, n, i in zip(shape, dims[:rank], place[:rank], strict=True):
            step = math.ceil(size / n)
            region.append(slice(min(size, i * step), min(size, i * step + step)))
        result.append(tuple(region))
    return result


@settings(max_examples=300, deadline=None)
@given(tiled(), st.data())
def test_even_tiles_lie_where_jax_says(
    case: tuple[Any, tuple[int, ...]], data: st.DataObject
) -> None:
    message, counts = case
    shape = tuple(n * data.draw(st.integers(0, 3)) for n in counts)
    devices = math.prod(message.tile_assignment_dimensions)
    sharding = shardings.from_op_sharding(
        tuple(range(100, 100 + devices)), None, message.SerializeToString()
    )
    assert sharding.indices(shape) == by_jax(message, shape, devices)
    assert list(sharding.indices(shape)) == by_numpy(message, len(counts), shape)
    assert sharding.fully_replicated == (math.prod(counts) == 1)
    for region, shard in zip(sharding.indices(shape), sharding.shard_shapes(shape), strict=True):
        assert np.empty(shape)[region].shape == shard


@settings(max_examples=200, deadline=None)
@given(tiled((REPLICATED, MANUAL, UNREDUCED)), st.data())
def test_any_tiles_lie_where_numpy_says(
    case: tuple[Any, tuple[int, ...]], data: st.DataObject
) -> None:
    message, counts = case
    shape = tuple(data.draw(st.integers(0, 9)) for _ in counts)
    devices = math.prod(message.tile_assignment_dimensions)
    grid = tiles.from_op_sharding(message.SerializeToString(), devices)
    assert list(grid.indices(shape)) == by_numpy(message, len(counts), shape)
    groups = list(message.tile_assignment_dimensions)[len(counts) :]
    plain = all(
        size == 1 or kind == REPLICATED
        for size, kind in zip(groups, message.last_tile_dims, strict=False)
    )
    assert grid.partial == (not plain)
    assert grid.fully_replicated == (plain and math.prod(counts) == 1)


@settings(max_examples=100, deadline=None)
@given(tiled(), st.data())
def test_tiles_cover_an_array_once(case: tuple[Any, tuple[int, ...]], data: st.DataObject) -> None:
    message, counts = case
    shape = tuple(data.draw(st.integers(0, 7)) for _ in counts)
    count = math.prod(message.tile_assignment_dimensions)
    grid = tiles.from_op_sharding(message.SerializeToString(), count)
    seen = np.zeros(shape, int)
    for region in grid.indices(shape):
        seen[region] += 1
    assert (seen == grid.replicas).all()


@pytest.mark.parametrize("count", [1, 2, 8])
def test_replicated_as_jax_says(count: int) -> None:
    message = OpSharding(type=REPLICATED)
    sharding = shardings.from_op_sharding(tuple(range(count)), None, message.SerializeToString())
    for shape in [(), (3,), (2, 0, 5)]:
        assert sharding.indices(shape) == by_jax(message, shape, count)
    assert sharding.fully_replicated


@pytest.mark.parametrize("kind", [MANUAL, UNREDUCED])
def test_shards_that_may_differ(kind: int) -> None:
    sharding = hlo((0, 1), type=kind)
    assert sharding.shard_shapes((3, 4)) == ((3, 4), (3, 4))
    assert not sharding.fully_replicated


def test_maximal_is_read_as_copies_as_jax_does() -> None:
    message = OpSharding(type=MAXIMAL, tile_assignment_dimensions=[1], tile_assignment_devices=[1])
    sharding = shardings.from_op_sharding((4, 5), None, message.SerializeToString())
    assert sharding.indices((3,)) == by_jax(message, (3,), 2)
    assert sharding.fully_replicated


def test_tuple_of_one() -> None:
    inner = OpSharding(type=OTHER, tile_assignment_dimensions=[2], tile_assignment_devices=[1, 0])
    sharding = hlo((4, 5), type=TUPLE, tuple_shardings=[inner])
    assert sharding.indices((6,)) == ((slice(3, 6),), (slice(0, 3),))


def wrapped(message: Any) -> Any:
    proto = schema.ifrt.ShardingProto()
    proto.serialized_sharding.type_name = "xla::ifrt::HloSharding"
    proto.serialized_sharding.data = message.SerializeToString()
    return proto


def _named() -> Any:
    message = OpSharding(type=OTHER)
    message.named_sharding.SetInParent()
    return message


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        (_named(), Code.UNIMPLEMENTED),
        (OpSharding(type=TUPLE, tuple_shardings=[_named()]), Code.UNIMPLEMENTED),
        (OpSharding(type=UNKNOWN), Code.UNIMPLEMENTED),
        (OpSharding(type=TUPLE), Code.UNIMPLEMENTED),
        (OpSharding(type=TUPLE, tuple_shardings=[OpSharding()] * 2), Code.UNIMPLEMENTED),
        (OpSharding(type=TUPLE, tuple_shardings=[OpSharding(type=TUPLE)]), Code.UNIMPLEMENTED),
        (
            OpSharding(
                type=OTHER,
                tile_assignment_dimensions=[2, 2],
                last_tile_dims=[MAXIMAL],
                iota_reshape_dims=[4],
                iota_transpose_perm=[0],
            ),
            Code.UNIMPLEMENTED,
        ),
        *(
            (OpSharding(type=OTHER, **fields), Code.INVALID_ARGUMENT)
            for fields in [
                {"tile_assignment_dimensions": [4]},
                {"tile_assignment_dimensions": [3], "tile_assignment_devices": [0, 1, 2]},
                {"tile_assignment_dimensions": [4], "tile_assignment_devices": [0, 1, 2]},
                {"tile_assignment_dimensions": [4], "tile_assignment_devices": [0, 1, 2, 2]},
                {"tile_assignment_dimensions": [4], "tile_assignment_devices": [1, 2, 3, 4]},
                {"tile_assignment_dimensions": [-2, -2], "tile_assignment_devices": [0, 1, 2, 3]},
                {"tile_assignment_dimensions": [0], "tile_assignment_devices": []},
                {"tile_assignment_dimensions": [2**62, 2**62]},
                {"tile_assignment_dimensions": [1] * 100 + [4]},
                {"tile_assignment_dimensions": [4], "iota_reshape_dims": [2, 3]},
                {"tile_assignment_dimensions": [4], "iota_reshape_dims": [-2, -2]},
                {"tile_assignment_dimensions": [4], "iota_reshape_dims": [4]},
                {
                    "tile_assignment_dimensions": [4],
                    "iota_reshape_dims": [2, 2],
                    "iota_transpose_perm": [0, 0],
                },
                {
                    "tile_assignment_dimensions": [4],
                    "last_tile_dims": [REPLICATED, REPLICATED],
                    "tile_assignment_devices": [0, 1, 2, 3],
                },
            ]
        ),
    ],
)
def test_op_shardings_that_are_refused(fields: Any, code: Code) -> None:
    message = schema.ifrt.HloShardingProto(xla_op_sharding=fields)
    message.devices.device_ids.extend(range(4))
    for make in (
        lambda: shardings.parse(wrapped(message)),
        lambda: shardings.from_op_sharding((0, 1, 2, 3), None, fields.SerializeToString()),
    ):
        with pytest.raises(StatusError) as caught:
            make()
        assert caught.value.code is code


def test_rank_that_does_not_fit() -> None:
    sharding = hlo(
        (0, 1), type=OTHER, tile_assignment_dimensions=[2], tile_assignment_devices=[0, 1]
    )
    with pytest.raises(StatusError, match="rank 1, used for shape"):
        sharding.indices((2, 2))


def test_shapes_that_are_remembered_are_bounded() -> None:
    grid = tiles.copies(2)
    for shape in itertools.product(range(20), range(20)):
        grid.shard_shapes(shape)
        assert max(len(grid._indices), len(grid._shapes)) <= tiles.CACHED_SHAPES
    assert grid.indices((4, 4)) is grid.indices((4, 4))


def test_equal_op_shardings_are_one_tiling() -> None:
    fields = {"type": OTHER, "tile_assignment_dimensions": [2], "tile_assignment_devices": [1, 0]}
    assert hlo((0, 1), **fields).tiling is hlo((2, 3), **fields).tiling
