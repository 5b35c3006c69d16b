"""Shardings: which device holds which part of an array, in the forms that travel on the wire.

A `Sharding` is made by `parse` from what a client sent, or by one of the builders. Both remember
what they made, so equal shardings are mostly one object, and their index maps are worked out once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, final

from google.protobuf.message import DecodeError

from regrow.errors import Code, StatusError
from regrow.wire import schema, tiles
from regrow.wire.tiles import Region, Shape, Tiling

CACHED_SHARDINGS: Final = 4096

_PREFIX: Final = "xla::ifrt::"


@final
@dataclass(frozen=True, slots=True)
class Sharding:
    """The devices of an array, the kind of memory and the way it is cut. Immutable.

    Shard `i` of the array is on `devices[i]`. Equal means: equal on the wire.

    Attributes:
        serialized: The `ShardingProto`, as it goes to a client.
        devices: Logical device ids, one for each shard.
        memory_kind: Such as "pinned_host"; None is the default of the device.
        tiling: How the array is cut, whatever the devices.
    """

    serialized: bytes
    devices: tuple[int, ...] = field(compare=False)
    memory_kind: str | None = field(compare=False)
    tiling: Tiling = field(compare=False, repr=False)

    @property
    def fully_replicated(self) -> bool:
        """Whether each shard is known to be the whole array."""
        return self.tiling.fully_replicated

    def indices(self, shape: Shape) -> tuple[Region, ...]:
        """The part of an array of this shape that each shard holds, with explicit start and stop.

        Raises:
            StatusError: This is not known, or `shape` cannot be cut so.
        """
        return self.tiling.indices(shape)

    def shard_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """The shape of each shard of an array of this shape.

        Raises:
            StatusError: This is not known, or `shape` cannot be cut so.
        """
        return self.tiling.shard_shapes(shape)

    def same_tiling(self, other: Sharding, shape: Shape) -> bool:
        """Whether `other` cuts this shape in the same way, shard by shard."""
        mine, theirs = self.tiling, other.tiling
        if mine is theirs:
            return True
        if mine.count != theirs.count:
            return False
        try:
            return mine.indices(shape) == theirs.indices(shape)
        except StatusError:
            return False

    def rebased(self, devices: tuple[int, ...] | None, memory_kind: str | None) -> Sharding:
        """The same tiling on other devices or in another memory; None keeps what it is.

        The memory kind "" is the default of the device.

        Raises:
            StatusError: INVALID_ARGUMENT if the number of devices differs.
        """
        return _rebased(self, devices, memory_kind)

    def single(self, i: int) -> Sharding:
        """The sharding of shard `i` as an array of its own."""
        return single_device(self.devices[i], self.memory_kind)


_parsed: dict[tuple[str, bytes], Sharding] = {}


def parse(sharding_proto: Any) -> Sharding:
    """Reads a `ShardingProto`.

    Raises:
        StatusError: INVALID_ARGUMENT for what is no sharding, UNIMPLEMENTED for a form that is not
            supported.
    """
    serialized = sharding_proto.serialized_sharding
    key = (serialized.type_name, serialized.data)
    return _parsed.get(key) or _parse(*key)


def _parse(type_name: str, data: bytes) -> Sharding:
    name = type_name.removeprefix(_PREFIX)
    reader = _READERS.get(name)
    if reader is None or name == type_name:
        raise StatusError(Code.UNIMPLEMENTED, f"sharding type {type_name!r} is not supported")
    try:
        message = getattr(schema.ifrt, f"{name}Proto").FromString(data)
    except DecodeError:
        raise StatusError(Code.INVALID_ARGUMENT, f"no valid {name} message") from None
    if message.version_number:
        raise StatusError(
            Code.UNIMPLEMENTED, f"version {message.version_number} of {name} is not supported"
        )
    devices = _devices(message)
    sharding = Sharding(
        _wrapped(type_name, data), devices, message.memory_kind or None, reader(message, devices)
    )
    if len(_parsed) >= CACHED_SHARDINGS:
        _parsed.clear()
    _parsed[type_name, data] = sharding
    return sharding


def _devices(message: Any) -> tuple[int, ...]:
    if not hasattr(message, "devices"):
        return (message.device_id,)
    devices = tuple(message.devices.device_ids)
    if not devices or len(set(devices)) != len(devices):
        raise StatusError(
            Code.INVALID_ARGUMENT, f"a sharding needs distinct devices, not {list(devices)}"
        )
    return devices


def _wrapped(type_name: str, data: bytes) -> bytes:
    proto = schema.ifrt.ShardingProto()
    proto.serialized_sharding.type_name = type_name
    proto.serialized_sharding.data = data
    serialized: bytes = proto.SerializeToString()
    return serialized


def _single_tiling(message: Any, devices: tuple[int, ...]) -> Tiling:
    return tiles.copies(1)


def _hlo_tiling(message: Any, devices: tuple[int, ...]) -> Tiling:
    return tiles.from_op_sharding(message.xla_op_sharding.SerializeToString(), len(devices))


def _even_tiling(message: Any, devices: tuple[int, ...]) -> Tiling:
    if message.is_fully_replicated or len(devices) == 1:
        return tiles.copies(len(devices))
    shard_shape = tuple(message.shard_shape.dims)
    return tiles.known_shapes(tuple(message.shape.dims), (shard_shape,) * len(devices))


def _concrete_tiling(message: Any, devices: tuple[int, ...]) -> Tiling:
    if message.HasField("dynamic_shape") or message.shard_dynamic_shapes:
        raise StatusError(Code.UNIMPLEMENTED, "shardings of dynamic shapes are not supported")
    shapes = tuple(tuple(shape.dims) for shape in message.shard_shapes)
    if len(shapes) != len(devices):
        raise StatusError(
            Code.INVALID_ARGUMENT, f"{len(shapes)} shard shapes over {len(devices)} devices"
        )
    return tiles.known_shapes(tuple(message.shape.dims), shapes)


def _opaque_tiling(message: Any, devices: tuple[int, ...]) -> Tiling:
    return tiles.copies(1) if len(devices) == 1 else tiles.Unknown(len(devices))


_READERS: Final[dict[str, Callable[[Any, tuple[int, ...]], Tiling]]] = {
    "SingleDeviceSharding": _single_tiling,
    "HloSharding": _hlo_tiling,
    "ConcreteEvenSharding": _even_tiling,
    "ConcreteSharding": _concrete_tiling,
    "OpaqueSharding": _opaque_tiling,
}


def _built(name: str, message: Any, memory_kind: str | None) -> Sharding:
    if memory_kind:
        message.memory_kind = memory_kind
    key = (_PREFIX + name, message.SerializeToString(deterministic=True))
    return _parsed.get(key) or _parse(*key)


@functools.lru_cache(CACHED_SHARDINGS)
def single_device(device: int, memory_kind: str | None) -> Sharding:
    """The sharding of an array on one device."""
    message = schema.ifrt.SingleDeviceShardingProto(device_id=device)
    return _built("SingleDeviceSharding", message, memory_kind)


@functools.lru_cache(CACHED_SHARDINGS)
def from_op_sharding(
    devices: tuple[int, ...], memory_kind: str | None, op_sharding: bytes
) -> Sharding:
    """The sharding that XLA describes by a serialized `xla.OpSharding`.

    Raises:
        StatusError: It does not fit the devices, or is of a form that is not supported.
    """
    message = schema.ifrt.HloShardingProto()
    message.devices.device_ids.extend(devices)
    try:
        message.xla_op_sharding.ParseFromString(op_sharding)
    except DecodeError:
        raise StatusError(Code.INVALID_ARGUMENT, "no valid OpSharding message") from None
    message.xla_op_sharding.ClearField("metadata")  # where in the user's source it came from
    return _built("HloSharding", message, memory_kind)


@functools.lru_cache(CACHED_SHARDINGS)
def even(
    devices: tuple[int, ...],
    memory_kind: str | None,
    shape: Shape,
    shard_shape: Shape,
    replicated: bool,
) -> Sharding:
    """The sharding of an array of which only the shapes are known, shards being equal in shape."""
    if len(devices) == 1:
        return single_device(devices[0], memory_kind)
    message = schema.ifrt.ConcreteEvenShardingProto(is_fully_replicated=replicated)
    message.devices.device_ids.extend(devices)
    message.shape.dims.extend(shape)
    message.shard_shape.dims.extend(shard_shape)
    return _built("ConcreteEvenSharding", message, memory_kind)


@functools.lru_cache(CACHED_SHARDINGS)
def _rebased(
    sharding: Sharding, devices: tuple[int, ...] | None, memory_kind: str | None
) -> Sharding:
    wrapped = schema.ifrt.ShardingProto.FromString(sharding.serialized).serialized_sharding
    name = wrapped.type_name.removeprefix(_PREFIX)
    message = getattr(schema.ifrt, f"{name}Proto").FromString(wrapped.data)
    if devices is not None:
        if len(devices) != len(sharding.devices):
            raise StatusError(
                Code.INVALID_ARGUMENT,
                f"an array of {len(sharding.devices)} shards cannot be on {len(devices)} devices",
            )
        _set_devices(message, devices)
    if memory_kind == "":
        message.ClearField("memory_kind")
    return _built(name, message, memory_kind)


def _set_devices(message: Any, devices: tuple[int, ...]) -> None:
    if hasattr(message, "devices"):
        message.devices.device_ids[:] = devices
    else:
        message.device_id = devices[0]
