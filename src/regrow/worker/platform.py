"""The PJRT platform of a worker, behind one small interface: `Domain`.

A domain is one PJRT client with the names of its devices. Every worker has one *home* domain for
ever: its own devices only, with collectives inside the process. Programs that span hosts run in the
domain of an epoch's gang (`regrow.worker.gang`). Arrays move between the domains of a process without
a copy.

CPU is the only platform now. GPU and TPU workers need another `make_home_client` here and another way
to abort collectives in `regrow.worker.gang`; nothing else knows the platform.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final, TypeAlias, final

import jax
import numpy as np
from jax._src.array import ArrayImpl
from jax._src.core import ShapedArray
from jax._src.sharding_impls import GSPMDSharding, SingleDeviceSharding
from jaxlib import _jax
from jaxlib import xla_client as xc

from regrow.wire.dtypes import numpy_dtype

Array: TypeAlias = Any
Device: TypeAlias = Any
Client: TypeAlias = Any

PLATFORM: Final = "cpu"
MEMORY_KINDS: Final = ("device", "pinned_host", "unpinned_host")

_SKIP_CHECKS: Final = (
    # jaxlib 0.10 checks against the process's global backend, which we have none of; 0.12 dropped it.
    {"_skip_checks": True} if "_skip_checks" in (xc.array_result_handler.__doc__ or "") else {}
)
COPY_NOW: Final = xc.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL
KEEP: Final = xc.HostBufferSemantics.ZERO_COPY


def initialise() -> None:
    """Process-wide settings that every executing process needs, before any client is made."""
    from jaxlib import lapack

    jax.config.update("jax_enable_x64", True)  # type: ignore[no-untyped-call]
    # The client side of JAX does this when it lowers linear algebra; without it the call crashes.
    lapack._lapack.initialize()  # type: ignore[attr-defined]


def collect_garbage() -> None:
    """Drops the host memory that arrays lived in which are gone; XLA itself leaves that for later."""
    _jax.collect_garbage()


_disassembling = threading.Lock()


def shards_of(whole: Array) -> list[Array]:
    """The single-device arrays that an array over several devices of this process consists of."""
    # jaxlib makes them at the first look, and lets other threads run meanwhile: two looks at once
    # would find some of them twice, and in the wrong places.
    with _disassembling:
        return list(whole._arrays)


def is_given_away(array: Array) -> bool:
    """Whether a program was given the memory of an array, or of one of its shards."""
    # jaxlib looks at the first shard alone; a launch takes those of all devices at once, in any order.
    if not isinstance(array, jax.Array):
        return False
    return array.is_deleted() or any(shard.is_deleted() for shard in shards_of(array))


def on_host(shard: Array) -> np.ndarray[Any, Any]:
    """The value of a single-device array, in place; waits until it is there.

    Raises:
        jax.errors.JaxRuntimeError: The array holds an error instead of a value.
    """
    # A poisoned array says so at once, but its memory is not given out while XLA is stuck over it.
    shard.block_until_ready()
    return np.asarray(shard)


def make_home_client(devices: int) -> Client:
    """A PJRT client of this process alone."""
    return xc.make_cpu_client(asynchronous=True, num_devices=devices)


@final
class Domain:
    """One PJRT client and the logical names of its devices.

    Attributes:
        client: The PJRT client.
        devices: PJRT device by logical id, also those of other hosts.
        local: Logical ids of the devices of this process.
        epoch: Number of the epoch, 0 for the home domain.
    """

    def __init__(self, client: Client, devices: dict[int, Device], local: Sequence[int]) -> None:
        self.client = client
        self.devices = devices
        self.local = frozenset(local)
        self.epoch = 0
        self._singles: dict[tuple[int, str], SingleDeviceSharding] = {}
        self._wholes: dict[tuple[Any, ...], tuple[ShapedArray, GSPMDSharding]] = {}
        self._avals: dict[tuple[tuple[int, ...], np.dtype[Any]], ShapedArray] = {}

    @classmethod
    def home(cls, logical: Sequence[int], client: Client = None) -> Domain:
        """The domain of this process alone, for its devices by logical id.

        Args:
            logical: Their ids.
            client: One that has been made for as many devices; None: one is made.
        """
        client = client or make_home_client(len(logical))
        return cls(client, dict(zip(logical, client.local_devices(), strict=True)), logical)

    def single(self, device: int, memory_kind: str) -> SingleDeviceSharding:
        """The sharding on one device."""
        key = (device, memory_kind)
        sharding = self._singles.get(key)
        if sharding is None:
            sharding = SingleDeviceSharding(self.devices[device], memory_kind=memory_kind)
            self._singles[key] = sharding
        return sharding

    def aval(self, dims: tuple[int, ...], dtype: np.dtype[Any]) -> ShapedArray:
        """The abstract value of a shape and dtype."""
        key = (dims, dtype)
        aval = self._avals.get(key)
        if aval is None:
            aval = self._avals[key] = ShapedArray(dims, dtype)
        return aval

    def put(
        self, value: np.ndarray[Any, Any], device: int, memory_kind: str, semantics: Any = KEEP
    ) -> Array:
        """Places a host array on a device. With KEEP an aligned one is used in place, and kept."""
        return xc.batched_device_put(
            self.aval(value.shape, value.dtype),
            self.single(device, memory_kind),
            [value],
            [self.devices[device]],
            True,
            host_buffer_semantics=semantics,
        )

    def copy(self, shard: Array, device: int, memory_kind: str) -> Array:
        """Copies a single-device array to a device of this process."""
        devices = xc.DeviceList((self.devices[device],))
        return xc.batched_copy_array_to_devices_with_sharding(
            [shard],
            [devices],
            [self.single(device, memory_kind)],
            [xc.ArrayCopySemantics.ALWAYS_COPY],
        )[0]

    def assemble(self, devices: tuple[int, ...], shards: list[Array]) -> Array:
        """Local shards as one array over `devices`, fit for an execution.

        Only the order of the devices matters to an execution, so the shards are said to lie one
        after the other along the first dimension.
        """
        if len(devices) == 1:
            return shards[0]
        dims, dtype = shards[0].shape, shards[0].dtype
        key = (devices, dims, dtype, shards[0].sharding.memory_kind)
        known = self._wholes.get(key)
        if known is None:
            known = self._wholes[key] = self._whole(devices, dims, dtype, key[3])
        return ArrayImpl(known[0], known[1], shards, committed=True, _skip_checks=True)

    def _whole(
        self, devices: tuple[int, ...], dims: tuple[int, ...], dtype: Any, memory_kind: str
    ) -> tuple[ShapedArray, GSPMDSharding]:
        op = xc.OpSharding()
        op.type = xc.OpSharding.Type.REPLICATED
        if dims:
            op.type = xc.OpSharding.Type.OTHER
            op.tile_assignment_dimensions = [len(devices)] + [1] * (len(dims) - 1)
            op.tile_assignment_devices = list(range(len(devices)))
            dims = (dims[0] * len(devices), *dims[1:])
        sharding = GSPMDSharding(
            tuple(self.devices[device] for device in devices), op, memory_kind=memory_kind
        )
        return ShapedArray(dims, dtype), sharding

    def handler(
        self,
        devices: tuple[int, ...],
        kind: int,
        dims: tuple[int, ...],
        sharding: Any | None,
        memory_kind: str,
    ) -> Any:
        """Makes an array of one result of an execution."""
        where: Any
        if len(devices) == 1:
            where = self.single(devices[0], memory_kind)
        else:
            if sharding is None:
                sharding = xc.OpSharding()
                sharding.type = xc.OpSharding.Type.REPLICATED
            pjrt = tuple(self.devices[device] for device in devices)
            where = GSPMDSharding(pjrt, sharding, memory_kind=memory_kind)
        aval = self.aval(dims, numpy_dtype(kind))
        return xc.array_result_handler(aval, where, True, **_SKIP_CHECKS)

    def device_list(self, devices: Sequence[int]) -> Any:
        """The PJRT devices of logical ids, in that order."""
        return xc.DeviceList(tuple(self.devices[device] for device in devices))

    def adopt(self, shard: Array, device: int) -> Array:
        """The same memory as an array of this domain; waits until the value is there.

        Raises:
            jax.errors.JaxRuntimeError: The array holds an error instead of a value.
        """
        return self.put(on_host(shard), device, shard.sharding.memory_kind)
