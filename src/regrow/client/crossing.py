"""Arrays between the cluster and other backends of this process, such as the local CPU.

`jax.device_put(x, jax.devices("cpu")[0])` asks the backend of `x` to copy it to a device that it does not
know. The backends of accelerators can do that, the stock client of a cluster cannot; here the values
take the way through NumPy.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from regrow.client.marks import hides_frames

hides_frames(__file__)


def install() -> None:
    """Hooks the function through which arrays go from devices to devices."""
    jax: Any = importlib.import_module("jax")
    xla_client: Any = importlib.import_module("jaxlib.xla_client")
    stock = xla_client.batched_copy_array_to_devices_with_sharding

    def batched_copy_array_to_devices_with_sharding(
        arrays: Sequence[Any], devices: Sequence[Any], shardings: Sequence[Any], how: Sequence[Any]
    ) -> list[Any]:
        # Refused arrays are rare, and looking at each array's devices would cost every call.
        try:
            return stock(arrays, devices, shardings, how)  # type: ignore[no-any-return]
        except jax.errors.JaxRuntimeError:
            if not any(map(_crosses, arrays, shardings)):
                raise
        return [
            _through_numpy(x, where, sharding)
            if _crosses(x, sharding)
            else stock([x], [where], [sharding], [semantics])[0]
            for x, where, sharding, semantics in zip(arrays, devices, shardings, how, strict=True)
        ]

    xla_client.batched_copy_array_to_devices_with_sharding = (
        batched_copy_array_to_devices_with_sharding
    )


def _crosses(x: Any, sharding: Any) -> bool:
    return _client(x.sharding) is not _client(sharding)


def _client(sharding: Any) -> Any:
    return next(iter(sharding.device_set)).client


def _through_numpy(x: Any, devices: Any, sharding: Any) -> Any:
    pxla: Any = importlib.import_module("jax._src.interpreters.pxla")
    value = np.asarray(x)
    indices = sharding.addressable_devices_indices_map(x.shape).values()
    return pxla.batched_device_put(
        x.aval, sharding, [value[index] for index in indices], list(devices), committed=True
    )
