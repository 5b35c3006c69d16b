"""The devices of the benchmarks, by slice. Imports JAX."""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

import jax

from regrow.errors import UsageError

_NO_CLUSTER: Final = "coordinator_address should be defined"


def join_processes() -> None:
    """Joins the processes of a multi-controller run, where JAX finds that this is one.

    A client of Regrow drives all slices by itself, and has nothing to join.
    """
    if os.environ.get("JAX_BACKEND_TARGET") or jax.distributed.is_initialized():
        return
    try:
        jax.distributed.initialize()
    except ValueError as error:
        if _NO_CLUSTER not in str(error):
            raise


def by_slice() -> list[list[jax.Device]]:
    """All devices, slice by slice; devices that know of no slice are one.

    Raises:
        UsageError: The slices are not of one size.
    """
    slices: dict[int, list[jax.Device]] = defaultdict(list)
    for device in jax.devices():
        slices[_slice_index(device)].append(device)
    sizes = {len(devices) for devices in slices.values()}
    if len(sizes) > 1:
        raise UsageError(f"the slices have different numbers of devices: {sorted(sizes)}")
    return [slices[index] for index in sorted(slices)]


def local_slice() -> list[jax.Device]:
    """The devices of this process's own slice: the first one, if it drives them all."""
    own = _slice_index(jax.local_devices()[0])
    return [device for device in jax.devices() if _slice_index(device) == own]


def timed(run: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds that each of `repeats` runs took to its end, after one that is not counted."""
    jax.block_until_ready(run())
    times_s = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        jax.block_until_ready(run())
        times_s.append(time.perf_counter() - start_s)
    return times_s


def median(times_s: list[float]) -> float:
    """The median, which a single disturbed run does not move."""
    return statistics.median(times_s)


def _slice_index(device: jax.Device) -> int:
    return int(getattr(device, "slice_index", 0))
