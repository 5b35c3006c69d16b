"""NumPy arrays on their way to devices.

Those with negative or zero strides, which the stock client refuses, are sent as a copy. And for each kind
of array its layout is asked for at once: jit's own fast path asks for it later, and there jaxlib ends the
process if the head has died meanwhile. Whoever sends many arrays is kept from running far ahead of them.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import numpy as np

from regrow.client.marks import hides_frames

hides_frames(__file__)

_SHARDS_AHEAD: Final = 256


def install() -> None:
    """Hooks the function through which every NumPy array goes to a device."""
    jax: Any = importlib.import_module("jax")
    pxla: Any = importlib.import_module("jax._src.interpreters.pxla")
    stock = pxla.batched_device_put
    aval = jax.core.ShapedArray((), np.dtype(np.float32))
    pace = _Pace(stock, aval, jax.sharding.SingleDeviceSharding)

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
        pace.sent(made, len(xs))
        return made

    pxla.batched_device_put = batched_device_put


@final
class _Pace:
    """Bounds how many shards are on their way to the head, roughly.

    jaxlib's client has a thread for each of them and never ends one, so thousands of arrays at once, a
    restored checkpoint say, would leave it with thousands of threads, or end it where a container
    allows no more. A training loop does not wait here: what it sent so long ago has arrived.
    """

    def __init__(self, put: Callable[..., Any], aval: Any, single: Callable[[Any], Any]) -> None:
        self._put = put
        self._aval = aval
        self._single = single
        self._since = 0
        self._mark: Any = None

    def sent(self, made: Any, shards: int) -> None:
        """Takes note of an array; now and then waits until those of a while ago have arrived."""
        self._since += shards
        if self._since < _SHARDS_AHEAD:
            return
        self._since = 0
        # The head takes requests in their order. An array of the user's would be kept alive.
        sharding = self._single(made.sharding._device_assignment[0])
        zero = np.zeros(self._aval.shape, self._aval.dtype)
        before, self._mark = self._mark, self._put(self._aval, sharding, [zero], [sharding._device])
        if before is not None:
            with contextlib.suppress(RuntimeError):  # Its slice was lost: nothing waits for that.
                before.block_until_ready()


def _refused(x: Any) -> bool:
    return isinstance(x, np.ndarray) and any(stride <= 0 for stride in x.strides)


def _plain(x: Any) -> Any:
    # Not np.ascontiguousarray: it drops subclasses, which carry JAX's type with them.
    return x.copy(order="C") if _refused(x) else x
