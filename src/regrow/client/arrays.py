"""NumPy arrays on their way to devices.

Those with negative or zero strides, which the stock client refuses, are sent as a copy. And for each kind
of array its layout is asked for at once: jit's own fast path asks for it later, and there jaxlib ends the
process if the head has died meanwhile.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from regrow.client.marks import hides_frames

hides_frames(__file__)


def install() -> None:
    """Hooks the function through which every NumPy array goes to a device."""
    jax: Any = importlib.import_module("jax")
    pxla: Any = importlib.import_module("jax._src.interpreters.pxla")
    stock = pxla.batched_device_put

    def batched_device_put(
        aval: Any, sharding: Any, xs: Sequence[Any], *args: Any, **kwargs: Any
    ) -> Any:
        # Refused arrays are rare, and looking at each array's strides would cost every call.
        try:
            made = stock(aval, sharding, xs, *args, **kwargs)
        except jax.errors.JaxRuntimeError:
            if not any(map(_refused, xs)):
                raise
            made = stock(aval, sharding, [_plain(x) for x in xs], *args, **kwargs)
        made._pjrt_layout  # noqa: B018 - the client keeps it by type, shape and device
        return made

    pxla.batched_device_put = batched_device_put


def _refused(x: Any) -> bool:
    return isinstance(x, np.ndarray) and any(stride <= 0 for stride in x.strides)


def _plain(x: Any) -> Any:
    # Not np.ascontiguousarray: it drops subclasses, which carry JAX's type with them.
    return x.copy(order="C") if _refused(x) else x
