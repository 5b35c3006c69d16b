"""Bytes in and out: host memory to parts, shards to host memory, shards to other devices."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from regrow.channel.arena import ArenaView
from regrow.channel.commands import Bulk, Expect, Fill, Get, Put
from regrow.wire.dtypes import STRING, numpy_dtype
from regrow.worker.platform import COPY_NOW, KEEP, Array, Domain, on_host
from regrow.worker.store import Part, PartError
from regrow.worker.strings import Strings

Strides: TypeAlias = "Sequence[int] | None"
Source: TypeAlias = "tuple[Part, int]"
"""A part, and the number of a shard of it."""


def put(command: Put, memory: ArenaView, domain: Domain, release: Callable[[], None]) -> Part:
    """A part from host memory; `release` is called when the bulk may be reused, by any thread."""
    try:
        buffer: Any = view(command.bulk, memory)
        dtype = None if command.kind == STRING else numpy_dtype(command.kind)
    except Exception:
        if command.lease:
            release()
        raise
    if dtype is None:
        return _put_strings(command, bytes(buffer), domain, release)
    semantics = KEEP if command.keep or isinstance(buffer, bytes) else COPY_NOW
    if command.lease:
        # Arrays that live in the bulk have this one as their base, whoever holds them. A memoryview
        # would not do: numpy goes past it to the mapping.
        buffer = np.frombuffer(buffer, np.uint8)
        weakref.finalize(buffer, release)
    shards = []
    for device, offset, dims, strides in command.shards:
        value: np.ndarray[Any, Any] = np.ndarray(dims, dtype, buffer, offset, strides)
        shards.append(domain.put(value, device, command.memory_kind, semantics))
    return Part(domain, [shard[0] for shard in command.shards], shards)


def _put_strings(
    command: Put, serialized: bytes, domain: Domain, release: Callable[[], None]
) -> Part:
    if command.lease:
        release()
    devices = [shard[0] for shard in command.shards]
    return Part(domain, devices, [Strings(serialized) for _ in devices])


def filled(command: Fill, expect: Expect, memory: ArenaView, domain: Domain) -> Array:
    """One shard of an expected part."""
    buffer = view(command.bulk, memory)
    if expect.kind == STRING:
        return Strings(bytes(buffer))
    value: np.ndarray[Any, Any] = np.ndarray(command.dims, numpy_dtype(expect.kind), buffer)
    return domain.put(value, expect.devices[command.shard], expect.memory_kind, COPY_NOW)


def view(bulk: Bulk, memory: ArenaView) -> bytes | memoryview:
    """The bytes of a bulk, in place."""
    return bulk if isinstance(bulk, bytes) else memory.view(bulk)


def take(sources: Sequence[Source]) -> Part:
    """A part of single shards of other parts."""
    shards, devices, epoch, domain = [], [], 0, None
    for part, shard in sources:
        shards.append(part.singles()[shard])
        devices.append(part.devices[shard])
        epoch = max(epoch, part.epoch)
        domain = domain or part.domain
    assert domain is not None, "a part of no shards is never asked for"
    for index, (part, shard) in enumerate(sources):
        if part.domain is not domain:
            part.move(domain)
            shards[index] = part.singles()[shard]
    return Part(domain, devices, shards, epoch=epoch)


def copy(
    sources: Sequence[Source], devices: Sequence[int], memory_kind: str, domain: Domain
) -> Part:
    """Copies of shards on (other) devices of this host."""
    shards, epoch = [], 0
    if len({id(part.domain) for part, _ in sources}) > 1:
        for part, _ in sources:
            part.move(domain)
    for (part, shard), device in zip(sources, devices, strict=True):
        array = part.singles()[shard]
        if device not in part.domain.devices:
            raise PartError.of(ValueError(f"device {device} is not on this host"))
        if isinstance(array, Strings):
            shards.append(array)
        else:
            shards.append(part.domain.copy(array, device, memory_kind))
        epoch, domain = max(epoch, part.epoch), part.domain
    return Part(domain, list(devices), shards, epoch=epoch)


def value(command: Get, part: Part) -> Any:
    """The value of a shard on the host: bytes of strings, else an array; waits for it.

    Most often the array is the device's own memory, which is not given away as long as this lives.

    Raises:
        PartError: The part holds an error.
    """
    try:
        shard = part.singles()[command.shard]
        return shard.serialized if isinstance(shard, Strings) else on_host(shard)
    except Exception as error:  # noqa: BLE001 - XLA raises many kinds
        raise PartError.of(error, part.epoch) from None


def hand_over(command: Get, value: Any, memory: ArenaView) -> bytes | None:
    """What a `Get` wants of a value: the bytes, or None when they are in the command's bulk."""
    if isinstance(value, bytes):
        return value
    if command.region is not None:
        value = value[tuple(slice(start, stop) for start, stop in command.region)]
    if command.bulk is None:
        if command.strides is None:
            return bytes(value.tobytes())
        buffer = bytearray(_extent(value, command.strides))
        _lay_out(value, buffer, command.strides)
        return bytes(buffer)
    _lay_out(value, view(command.bulk, memory), command.strides)
    return None


def _extent(value: np.ndarray[Any, Any], strides: Sequence[int]) -> int:
    if not value.size:
        return 0
    last: int = sum((dim - 1) * stride for dim, stride in zip(value.shape, strides, strict=True))
    return last + value.itemsize


def _lay_out(value: np.ndarray[Any, Any], buffer: Any, strides: Strides) -> None:
    if value.size:
        np.ndarray(value.shape, value.dtype, buffer, 0, strides)[...] = value
