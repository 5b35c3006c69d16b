"""Shardings in the forms that travel on the wire."""

from __future__ import annotations

import contextlib
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.errors import Code, StatusError
from regrow.wire import schema, shardings
from regrow.wire.shardings import Sharding

OpSharding = schema.xla.OpSharding
REPLICATED, OTHER = 0, 3


def hlo(devices: tuple[int, ...], **fields: Any) -> Sharding:
    return shardings.from_op_sharding(devices, None, OpSharding(**fields).SerializeToString())


def wire(kind: str, message: Any) -> Any:
    proto = schema.ifrt.ShardingProto()
    proto.serialized_sharding.type_name = f"xla::ifrt::{kind}"
    proto.serialized_sharding.data = message.SerializeToString()
    return proto


@given(st.binary(max_size=60), st.sampled_from(["Hlo", "SingleDevice", "ConcreteEven", "Opaque"]))
def test_noise_is_refused_with_a_status(data: bytes, kind: str) -> None:
    proto = schema.ifrt.ShardingProto()
    proto.serialized_sharding.type_name = f"xla::ifrt::{kind}Sharding"
    proto.serialized_sharding.data = data
    with contextlib.suppress(StatusError):
        assert shardings.parse(proto).devices


@pytest.mark.parametrize(
    "type_name", ["", "HloSharding", "xla::ifrt::", "xla::ifrt::NewSharding", "foo::HloSharding"]
)
def test_types_that_are_not_known(type_name: str) -> None:
    proto = schema.ifrt.ShardingProto()
    proto.serialized_sharding.type_name = type_name
    with pytest.raises(StatusError) as caught:
        shardings.parse(proto)
    assert caught.value.code is Code.UNIMPLEMENTED


def test_a_later_format_is_refused() -> None:
    message = schema.ifrt.SingleDeviceShardingProto(device_id=1, version_number=1)
    with pytest.raises(StatusError, match="version 1 of SingleDeviceSharding"):
        shardings.parse(wire("SingleDeviceSharding", message))


@pytest.mark.parametrize("devices", [[], [1, 1]])
def test_devices_must_be_distinct(devices: list[int]) -> None:
    message = schema.ifrt.OpaqueShardingProto()
    message.devices.device_ids.extend(devices)
    with pytest.raises(StatusError) as caught:
        shardings.parse(wire("OpaqueSharding", message))
    assert caught.value.code is Code.INVALID_ARGUMENT


TILES = {"type": OTHER, "tile_assignment_dimensions": [2, 1], "tile_assignment_devices": [1, 0]}


def _concrete(shapes: list[list[int]]) -> Sharding:
    message = schema.ifrt.ConcreteShardingProto(memory_kind="device")
    message.devices.device_ids.extend(range(len(shapes)))
    message.shape.dims.extend([3, 2])
    for shape in shapes:
        message.shard_shapes.add().dims.extend(shape)
    return shardings.parse(wire("ConcreteSharding", message))


def _opaque(count: int) -> Sharding:
    message = schema.ifrt.OpaqueShardingProto()
    message.devices.device_ids.extend(range(count))
    return shardings.parse(wire("OpaqueSharding", message))


ALL = {
    "single": lambda: shardings.single_device(0, None),
    "single pinned": lambda: shardings.single_device(0, "pinned_host"),
    "hlo": lambda: hlo((0, 1), **TILES),
    "hlo one": lambda: hlo((0,), type=REPLICATED),
    "even": lambda: shardings.even((0, 1), "device", (4, 2), (2, 2), False),
    "even replicated": lambda: shardings.even((0, 1), None, (4, 2), (4, 2), True),
    "concrete": lambda: _concrete([[1, 2], [2, 2]]),
    "opaque": lambda: _opaque(2),
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("memory_kind", [None, "", "device", "unpinned_host"])
@pytest.mark.parametrize("move", [False, True])
def test_build_parse_and_rebase_round_trip(name: str, memory_kind: str | None, move: bool) -> None:
    sharding = ALL[name]()
    again = shardings.parse(schema.ifrt.ShardingProto.FromString(sharding.serialized))
    assert again is sharding
    devices = tuple(device + 7 for device in sharding.devices) if move else None
    moved = sharding.rebased(devices, memory_kind)
    assert moved.devices == (devices or sharding.devices)
    assert moved.memory_kind == (
        sharding.memory_kind if memory_kind is None else memory_kind or None
    )
    # Of two opaque shardings nobody knows whether they cut alike.
    alike = moved is sharding or not name.startswith("opaque")
    assert moved.same_tiling(sharding, (4, 2)) == alike
    assert shardings.parse(schema.ifrt.ShardingProto.FromString(moved.serialized)) is moved
    back = moved.rebased(sharding.devices, sharding.memory_kind or "")
    assert back == sharding
    assert hash(back) == hash(sharding)
    if not move and memory_kind is None:
        assert moved is sharding


@pytest.mark.parametrize("name", ALL)
def test_version_numbers_stay_zero(name: str) -> None:
    outer = schema.ifrt.ShardingProto.FromString(ALL[name]().serialized).serialized_sharding
    kind = outer.type_name.removeprefix("xla::ifrt::")
    message = getattr(schema.ifrt, f"{kind}Proto").FromString(outer.data)
    assert not message.version_number
    for part in ("devices", "shape", "shard_shape"):
        assert not getattr(getattr(message, part, None), "version_number", 0)


def test_rebase_needs_as_many_devices() -> None:
    with pytest.raises(StatusError, match="2 shards cannot be on 3 devices") as caught:
        hlo((0, 1), **TILES).rebased((0, 1, 2), None)
    assert caught.value.code is Code.INVALID_ARGUMENT


def test_source_locations_are_dropped_from_what_is_built() -> None:
    message = OpSharding(**TILES)
    message.metadata.add().op_name = "somewhere"
    assert shardings.from_op_sharding((0, 1), None, message.SerializeToString()) is hlo(
        (0, 1), **TILES
    )


def test_single_shards() -> None:
    sharding = hlo((5, 6), **TILES).rebased(None, "pinned_host")
    assert sharding.single(1) is shardings.single_device(6, "pinned_host")
    assert sharding.single(1).shard_shapes((2, 3)) == ((2, 3),)
    assert sharding.single(1).fully_replicated


def test_even_of_one_device_is_single() -> None:
    assert shardings.even((3,), None, (4,), (4,), False) is shardings.single_device(3, None)


def test_known_shapes() -> None:
    for sharding, shape, shards in [
        (shardings.even((0, 1), None, (4, 2), (2, 2), False), (4, 2), ((2, 2), (2, 2))),
        (_concrete([[1, 2], [2, 2]]), (3, 2), ((1, 2), (2, 2))),
    ]:
        assert sharding.shard_shapes(shape) == shards
        assert not sharding.fully_replicated
        with pytest.raises(StatusError, match="is not known"):
            sharding.indices(shape)
        with pytest.raises(StatusError, match="made for shape"):
            sharding.shard_shapes((9, 9))
    assert shardings.even((0, 1), None, (4,), (4,), True).indices((4,)) == ((slice(0, 4),),) * 2


def test_concrete_must_be_whole() -> None:
    message = schema.ifrt.ConcreteShardingProto()
    message.devices.device_ids.extend([0, 1])
    message.shard_shapes.add().dims.extend([2])
    with pytest.raises(StatusError, match="1 shard shapes over 2 devices"):
        shardings.parse(wire("ConcreteSharding", message))
    message.dynamic_shape.SetInParent()
    with pytest.raises(StatusError, match="dynamic shapes"):
        shardings.parse(wire("ConcreteSharding", message))


def test_opaque_tells_nothing() -> None:
    sharding = _opaque(2)
    for ask in (sharding.indices, sharding.shard_shapes):
        with pytest.raises(StatusError) as caught:
            ask((2,))
        assert caught.value.code is Code.UNIMPLEMENTED
    assert not sharding.fully_replicated
    assert _opaque(1).indices((2,)) == ((slice(0, 2),),)


def test_same_tiling() -> None:
    rows = hlo((0, 1), **TILES)
    split = {"tile_assignment_dimensions": [2, 1], "iota_reshape_dims": [2]}
    other = hlo((2, 3), type=OTHER, iota_transpose_perm=[0], **split)
    assert not rows.same_tiling(other, (4, 2))
    assert rows.same_tiling(other, (0, 2))  # both are empty
    assert not rows.same_tiling(hlo((0,), type=REPLICATED), (4, 2))
    assert not rows.same_tiling(_opaque(2), (4, 2))
    assert not rows.same_tiling(other, (4,))
    assert hlo((0, 1), type=REPLICATED).same_tiling(
        shardings.even((4, 5), None, (2,), (2,), True), (2,)
    )


def test_a_sharding_cannot_change() -> None:
    with pytest.raises(FrozenInstanceError):
        shardings.single_device(0, None).devices = (1,)  # type: ignore[misc]


def test_the_cache_is_bounded() -> None:
    before = shardings.single_device(0, None)
    for device in range(shardings.CACHED_SHARDINGS + 10):
        message = schema.ifrt.SingleDeviceShardingProto(device_id=device)
        assert shardings.parse(wire("SingleDeviceSharding", message)).devices == (device,)
        assert len(shardings._parsed) <= shardings.CACHED_SHARDINGS
    message = schema.ifrt.SingleDeviceShardingProto(device_id=0)
    assert shardings.parse(wire("SingleDeviceSharding", message)) == before
