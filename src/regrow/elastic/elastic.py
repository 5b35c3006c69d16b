"""A drop-in for `pathwaysutils.elastic.elastic`: which slices are there, and waiting for them.

It differs in that no wait is longer than it was asked to be: a slice that hangs counts as one that
is not there, until it answers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence, Set
from typing import Any, Final

import jax

from regrow.elastic.causes import explain
from regrow.elastic.health import Health, check_slices
from regrow.elastic.libraries import pathwaysutils
from regrow.errors import UsageError

_stock: Final = pathwaysutils("elastic.elastic")
_logger = logging.getLogger(__name__)

SliceHealthChecker: Any = _stock.SliceHealthChecker
DefaultSliceHealthChecker: Any = _stock.DefaultSliceHealthChecker

__all__ = [
    "DefaultSliceHealthChecker",
    "SliceHealthChecker",
    "get_active_slice_indices",
    "get_slice_to_devices",
    "is_error_due_to_slice_down",
    "wait_for_slices",
]


def get_slice_to_devices(devices: Sequence[jax.Device]) -> Mapping[int, Sequence[jax.Device]]:
    """The devices of each slice, by its index."""
    slices: Mapping[int, Sequence[jax.Device]] = _stock.get_slice_to_devices(devices)
    return slices


def get_active_slice_indices(
    slice_to_devices: Mapping[int, Sequence[jax.Device]] | None = None,
    checker: Any = None,
    *,
    timeout: float | None = None,
) -> Set[int]:
    """The slices that work now.

    Args:
        slice_to_devices: The slices to look at; default: all of `jax.devices()`.
        checker: A `SliceHealthChecker`; default: one small computation a slice.
        timeout: How long to wait for answers, in seconds; a slice that has not answered then does
            not work. None: until all have answered (Regrow declares a slice that hangs lost within
            its `--hang-after`, and so answers for it).

    Raises:
        Exception: What a check has raised, if it is not the error of a lost slice.
    """
    slices = _slices(slice_to_devices)
    return check_slices(slices, checker, timeout_s=timeout).active


def wait_for_slices(
    slice_count: int | None = None,
    poll_interval: float = 10,
    timeout: float | None = None,
    slice_to_devices: Mapping[int, Sequence[jax.Device]] | None = None,
    checker: Any = None,
) -> Set[int]:
    """Waits until at least `slice_count` slices work.

    When enough have answered, the others are waited for at most 10 seconds longer, so that a slice
    that hangs does not hold up those that work.

    Args:
        slice_count: How many; default: all.
        poll_interval: Seconds from the begin of one check to that of the next.
        timeout: How long to wait at most, in seconds; also a check that hangs ends then. None: no
            limit.
        slice_to_devices: The slices to look at; default: all of `jax.devices()`.
        checker: A `SliceHealthChecker`; default: one small computation a slice.

    Returns:
        The indices of all slices that work.

    Raises:
        UsageError: There will never be so many.
        TimeoutError: There are not enough, and the next check would come after the timeout; says
            which are missing, and why.
        Exception: What a check has raised, if it is not the error of a lost slice.
    """
    slices = _slices(slice_to_devices)
    wanted = len(slices) if slice_count is None else slice_count
    if wanted > len(slices):
        raise UsageError(f"slice_count is {wanted}; there are {len(slices)} slices")
    began = time.monotonic()
    while True:
        checked = time.monotonic()
        left = None if timeout is None else max(0.0, timeout - (checked - began))
        health = check_slices(slices, checker, enough=wanted, timeout_s=left)
        if len(health.active) >= wanted:
            _logger.info("slices %s are active, %d are needed", sorted(health.active), wanted)
            return health.active
        now = time.monotonic()
        pause = max(0.0, poll_interval - (now - checked))
        text = f"{now - began:.1f} s for {_missing(health, wanted, len(slices))}"
        if timeout is not None and now - began + pause >= timeout:
            raise TimeoutError(f"waited {text}; the timeout is {timeout:g} s")
        _logger.info("have waited %s", text)
        time.sleep(pause)


def is_error_due_to_slice_down(error: Exception, log_traceback: bool = True) -> bool:
    """Whether an error comes from a lost slice, by the words that pathwaysutils looks for.

    They are DATA_LOSS, DEADLINE_EXCEEDED, NOT_FOUND and INTERNAL, in a `jax.errors.JaxRuntimeError`.

    Args:
        error: The error.
        log_traceback: Whether the traceback of any other error is logged.
    """
    return bool(_stock.is_error_due_to_slice_down(error, log_traceback=log_traceback))


def _slices(
    slice_to_devices: Mapping[int, Sequence[jax.Device]] | None,
) -> Mapping[int, Sequence[jax.Device]]:
    return get_slice_to_devices(jax.devices()) if slice_to_devices is None else slice_to_devices


def _missing(health: Health, wanted: int, total: int) -> str:
    down = "; ".join(_why(index, why) for index, why in sorted(health.down.items()))
    active = ", ".join(map(str, sorted(health.active))) or "none"
    return f"at least {wanted} of {total} slices (active: {active}; {down or 'none is down'})"


def _why(index: int, text: str) -> str:
    loss = explain(text)
    if loss is not None and loss.slice_index == index:
        return str(loss)
    return f"slice {index}: {text.splitlines()[0][:200] if loss is None else loss}"
