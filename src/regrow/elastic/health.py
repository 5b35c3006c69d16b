"""Health checks of slices that a hung slice cannot block.

Each check runs in a thread of its own, and whoever asks waits for it until a deadline. A slice has at
most one check at a time: one that hangs is waited for again by the next who asks, so hung slices
cost one thread each.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final, final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from regrow.elastic import planned
from regrow.elastic.libraries import pathwaysutils

LAGGARD_S: Final = 10.0
"""How long slices that have not answered are waited for when enough others have."""

_EXIT_S: Final = 10.0

_lock = threading.Lock()
_running: dict[Hashable, _Check] = {}


@final
@dataclass(frozen=True, slots=True)
class Health:
    """What a round of checks has found.

    Attributes:
        active: The slices that work.
        down: The other slices, each with the reason.
    """

    active: frozenset[int]
    down: Mapping[int, str]


@final
class _Check:
    """One check in a thread; ends with the set of slices that work, or with an error."""

    def __init__(self, key: Hashable, slices: frozenset[int], run: Callable[[], Set[int]]) -> None:
        self.slices = slices
        self.active: frozenset[int] | None = None
        self.error: BaseException | None = None
        self.why = ""
        self.began_at = time.monotonic()
        self.done = threading.Event()
        self._key = key
        self._run = run
        # A check of a hung slice must not keep the program from its end for ever.
        self.thread = threading.Thread(target=self._work, name="regrow-health", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            self.active = frozenset(self._run())
        except jax.errors.JaxRuntimeError as error:
            if is_slice_down(error):
                self.active, self.why = frozenset(), str(error)
            else:
                self.error = error
        except BaseException as error:  # noqa: BLE001 (raised again by whoever waits for the check)
            self.error = error
        finally:
            with _lock:
                if _running.get(self._key) is self:
                    del _running[self._key]
            self.done.set()


@atexit.register
def _wait_at_exit() -> None:
    """A thread that is inside of JAX when the interpreter ends would bring it down."""
    deadline = time.monotonic() + _EXIT_S
    for check in list(_running.values()):
        check.thread.join(max(0.0, deadline - time.monotonic()))


def is_slice_down(error: Exception) -> bool:
    """Whether pathwaysutils takes an error for that of a lost slice, without its log lines."""
    module = pathwaysutils("elastic.elastic")
    return bool(module.is_error_due_to_slice_down(error, log_traceback=False))


def check_slices(
    slice_to_devices: Mapping[int, Sequence[jax.Device]],
    checker: Any = None,
    *,
    enough: int | None = None,
    timeout_s: float | None = None,
) -> Health:
    """Checks slices, all at the same time.

    Args:
        slice_to_devices: The slices and their devices.
        checker: A `SliceHealthChecker` of pathwaysutils; default: one small computation a slice.
        enough: With so many slices found to work, the rest is waited for only `LAGGARD_S` longer.
        timeout_s: How long to wait at most; what has not answered then does not work. None: until
            all have answered, or (with `enough`) enough have.

    Raises:
        Exception: What a check has raised, if it is not the error of a lost slice.
    """
    plan = planned.follower()
    if plan is not None:
        plan.asks()
    deadline = _Deadline(time.monotonic(), timeout_s, enough)
    checks = [_joined(*plan) for plan in _plans(slice_to_devices, checker)]
    while pending := [check for check in checks if not check.done.is_set()]:
        found = sum(len(check.active or ()) for check in checks)
        left = deadline.left(time.monotonic(), found)
        if left is not None and left <= 0:
            break
        pending[0].done.wait(_SLICE_OF_WAIT_S if left is None else min(left, _SLICE_OF_WAIT_S))
    health = _health(checks)
    return health if plan is None else _as_planned(health, plan.answer(health.active))


_SLICE_OF_WAIT_S: Final = 0.05


@final
class _Deadline:
    """How long a round still waits, by what it has found so far."""

    def __init__(self, now: float, timeout_s: float | None, enough: int | None) -> None:
        self._end = None if timeout_s is None else now + timeout_s
        self._enough = enough
        self._laggards_by: float | None = None

    def left(self, now: float, found: int) -> float | None:
        """Seconds to wait on, at most; None: without end."""
        if self._laggards_by is None and self._enough is not None and found >= self._enough:
            self._laggards_by = now + LAGGARD_S
        ends = [end for end in (self._end, self._laggards_by) if end is not None]
        return min(ends) - now if ends else None


def _plans(
    slice_to_devices: Mapping[int, Sequence[jax.Device]], checker: Any
) -> list[tuple[Hashable, frozenset[int], Callable[[], Set[int]]]]:
    if checker is not None:

        def run() -> Set[int]:
            checker.dispatch()
            found: Set[int] = checker.validate()
            return found

        return [(("checker", id(checker)), frozenset(slice_to_devices), run)]
    return [
        (tuple(devices), frozenset({index}), _prober(index, tuple(devices)))
        for index, devices in slice_to_devices.items()
    ]


def _joined(key: Hashable, slices: frozenset[int], run: Callable[[], Set[int]]) -> _Check:
    with _lock:
        check = _running.get(key)
        if check is None:
            check = _running[key] = _Check(key, slices, run)
        return check


def _health(checks: Sequence[_Check]) -> Health:
    active: set[int] = set()
    down: dict[int, str] = {}
    for check in checks:
        if not check.done.is_set():
            waited = time.monotonic() - check.began_at
            why = f"has not answered a health check for {waited:.1f} s"
        elif check.error is not None:
            raise check.error
        else:
            active |= check.active or frozenset()
            why = check.why or "is not active"
        down |= dict.fromkeys(check.slices - active, why)
    return Health(frozenset(active), down)


def _as_planned(health: Health, active: frozenset[int]) -> Health:
    kept_out = dict.fromkeys(health.active - active, "has no part in this step of the plan")
    return Health(active, {**health.down, **kept_out})


def _prober(index: int, devices: tuple[jax.Device, ...]) -> Callable[[], Set[int]]:
    def run() -> Set[int]:
        numbers = np.arange(len(devices), dtype=np.float32)
        mesh = Mesh(np.asarray(devices), ("device",))
        spread = NamedSharding(mesh, PartitionSpec("device"))  # type: ignore[no-untyped-call]
        got = np.asarray(_plus_one(jax.device_put(numbers, spread)))
        if not np.array_equal(got, numbers + 1):
            raise ValueError(f"slice {index} computes wrongly: {numbers} + 1 is {got} there")
        return {index}

    return run


@jax.jit
def _plus_one(x: jax.Array) -> jax.Array:
    return x + 1
