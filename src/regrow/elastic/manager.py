"""A drop-in for `pathwaysutils.elastic.manager`, with the whole documented interface.

    from regrow.elastic import manager

    elastic_manager = manager.Manager()

    @elastic_manager.elastic_retry(minimum_slice_count=1)
    def run_training_loop(): ...

Its exceptions and its retry limit are those of pathwaysutils, so code that raises or catches them
works with either.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
import threading
import warnings
from collections.abc import Callable, Sequence, Set
from typing import Any, Final, TypeAlias, TypeVar, final

import jax

from regrow.elastic import elastic
from regrow.elastic.ahead import SETS, Ahead
from regrow.elastic.attempts import Attempts, Plan, RetryPolicy
from regrow.elastic.health import check_slices
from regrow.elastic.libraries import pathwaysutils
from regrow.elastic.retry import Backoff
from regrow.elastic.slice_sets import SliceSets
from regrow.errors import UsageError

_stock: Final = pathwaysutils("elastic.manager")
_logger = logging.getLogger(__name__)
_CLOSE_DEADLINE_S: Final = 5.0
_CHECK_DEADLINE_S: Final = 60.0

ElasticRuntimeError: Any = _stock.ElasticRuntimeError
ElasticRetryLimit: Any = _stock.ElasticRetryLimit
ScaleUpSignalError: Any = _stock.ScaleUpSignalError

Callback: TypeAlias = Callable[[], Any]
_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")

__all__ = [
    "Backoff",
    "ElasticRetryLimit",
    "ElasticRuntimeError",
    "Manager",
    "RetryPolicy",
    "ScaleUpSignalError",
]


@final
class Manager:
    """Knows the slices, and runs a function again when one is lost. Make one for a process.

    Attributes:
        slice_to_devices: The devices of each slice, by its index.
    """

    def __init__(
        self, devices: Sequence[jax.Device] | None = None, *, timeout: float | None = None
    ) -> None:
        """Groups the devices by slice, and checks which slices work.

        Args:
            devices: The devices; default: `jax.devices()`.
            timeout: How long to wait for the answers of slices, in seconds; those that have not
                answered then are not active. None: until all have.

        Raises:
            UsageError: There are no devices, or the timeout is no time.
        """
        devices = jax.devices() if devices is None else devices
        if not devices:
            raise UsageError("there are no devices to manage")
        timeout = None if timeout is None else _seconds("timeout", timeout, " or None")
        self.slice_to_devices = elastic.get_slice_to_devices(devices)
        self._sets = SliceSets(self.slice_to_devices)
        self._sets.activate(
            elastic.get_active_slice_indices(self.slice_to_devices, timeout=timeout)
        )
        self._monitor: threading.Thread | None = None
        self._stop = threading.Event()
        self._aheads: list[Ahead[Any]] = []

    # --- what is known ---

    @property
    def all_slice_indices(self) -> frozenset[int]:
        """The indices of all slices."""
        return self._sets.everyone

    @property
    def active_slice_indices(self) -> frozenset[int]:
        """The indices of the slices of the mesh that computes.

        Raises:
            UsageError: When it is set to something that is not among all slices.
        """
        return self._sets.active

    @active_slice_indices.setter
    def active_slice_indices(self, value: Set[int]) -> None:
        self._sets.activate(value)

    @property
    def active_devices(self) -> list[jax.Device]:
        """The devices of the active slices, in order of slice index."""
        return [
            device for index in sorted(self._sets.active) for device in self.slice_to_devices[index]
        ]

    @property
    def inactive_slice_indices(self) -> frozenset[int]:
        """The indices of the slices that are not active."""
        return self._sets.inactive

    @property
    def available_inactive_slices(self) -> frozenset[int]:
        """The inactive slices that the monitor has found to work: they can be made active."""
        return self._sets.available

    @property
    def total_slice_count(self) -> int:
        """The number of all slices."""
        return len(self._sets.everyone)

    @property
    def active_slice_count(self) -> int:
        """The number of active slices."""
        return len(self._sets.active)

    @property
    def default_device(self) -> jax.Device:
        """Device 0 of the first active slice; `elastic_retry` makes it JAX's default device.

        Raises:
            ValueError: No slice is active.
        """
        if not self._sets.active:
            raise ValueError("no slice is active")
        return self.slice_to_devices[min(self._sets.active)][0]

    def scale_by_active_slices(self, x: float) -> float:
        """A number that holds for all slices, scaled down to the active ones.

        Args:
            x: An int stays one.

        Raises:
            ValueError: The share of an int is no whole number.
        """
        active, total = self.active_slice_count, self.total_slice_count
        if not isinstance(x, int):
            return x * active / total
        share, rest = divmod(x * active, total)
        if rest:
            raise ValueError(f"{x} cannot be scaled to {active} of {total} slices without a rest")
        return share

    # --- the monitor ---

    def start_monitoring(self, poll_interval: float = 10) -> None:
        """Begins to check inactive slices in the background; nothing happens if it does already.

        Args:
            poll_interval: Seconds between checks.
        """
        if self._monitor is not None and self._monitor.is_alive():
            return
        self._stop = threading.Event()
        self._monitor = threading.Thread(
            target=self._watch,
            args=(self._stop, poll_interval),
            name="regrow-elastic-monitor",
            daemon=True,
        )
        self._monitor.start()

    def close(self) -> None:
        """Ends the monitor; may be called more than once. A check under way is waited for 5 s."""
        self._stop.set()
        monitor, self._monitor = self._monitor, None
        if monitor is None or monitor is threading.current_thread():
            return
        monitor.join(_CLOSE_DEADLINE_S)
        if monitor.is_alive():
            _logger.warning("the monitor of slices has not ended within %g s", _CLOSE_DEADLINE_S)

    def _watch(self, stop: threading.Event, poll_interval: float) -> None:
        while not stop.wait(poll_interval):
            for ahead in self._aheads:
                ahead.looked_at()
            try:
                self._check_inactive()
            except Exception:
                # Whatever a check meets concerns slices that are not in use; the next one tells.
                _logger.exception("a check of the inactive slices %s failed", self._sets.inactive)

    def _check_inactive(self) -> None:
        inactive = {index: self.slice_to_devices[index] for index in sorted(self._sets.inactive)}
        health = check_slices(inactive, timeout_s=_CHECK_DEADLINE_S)
        new = self._sets.found(health.active)
        if new:
            _logger.info("slices %s work again and may be made active", sorted(new))

    # --- programs ---

    def compile_ahead(
        self, build: Callable[[list[jax.Device]], _T], *, sets: int = SETS
    ) -> Ahead[_T]:
        """Decorates a function that compiles for some devices; keeps what it returns by slices.

            @elastic_manager.compile_ahead
            def train_step(devices):
                mesh = create_mesh(devices)
                return jit_step(mesh).lower(abstract_state(mesh), abstract_batch(mesh)).compile()

            step = train_step()  # for the active slices

        A set of slices that was seen before costs nothing. When the program has begun its second step
        since (`at_step`, `record`; of one that tells no steps: after half a minute), the function is
        called in the background for each set of one slice fewer, so that the next loss finds its
        program compiled and traced. It must not depend on arrays.

        Args:
            build: Takes the devices of some slices, in order of slice index.
            sets: For how many sets of one slice fewer to call it at most. The server compiles once
                for all of them; the client traces for each.

        Returns:
            A callable: without arguments for the active slices, else for the given indices. Its
            `begin()` begins the background work at once, `wait(timeout)` waits for its end.

        Raises:
            UsageError: `sets` is negative.
        """
        ahead = Ahead(build, self.slice_to_devices, lambda: self._sets.active, sets)
        self._aheads.append(ahead)
        return ahead

    # --- retries ---

    def elastic_retry(
        self,
        max_retries: int | None = None,
        minimum_slice_count: int | None = None,
        poll_interval: float = 10,
        timeout: float | None = None,
        pre_callback: Callback | None = None,
        on_elastic_event_callback: Callback | None = None,
        retry_policy: RetryPolicy | None = None,
        *,
        backoff: Backoff | None = None,
    ) -> Callable[[_F], _F]:
        """Decorates a function so that it is called again when a slice is lost.

        Before each attempt it waits for slices, makes those that work active, calls `pre_callback`,
        and sets JAX's default device. After a loss it stops a trace of the profiler, calls
        `on_elastic_event_callback`, and asks `retry_policy`. An error that is not that of a lost
        slice is raised as it is. An error that comes back at the same step without any slice being
        lost, or with a slice that ends by itself each time, is not tried again.

        The function must not leave references to arrays of a failed attempt behind: as long as
        there are any, their memory stays in use.

        Args:
            max_retries: Deprecated form of `retry_policy=ElasticRetryLimit(max_retries)`.
            minimum_slice_count: How many slices an attempt needs. None, or the number of all slices:
                training pauses until all are back. Fewer: it goes on with those that are left.
            poll_interval: Seconds between checks of slices.
            timeout: How long to wait for that many slices, in seconds; None: no limit.
            pre_callback: Called before each attempt, when the active slices are known.
            on_elastic_event_callback: Called after each loss, before the next attempt.
            retry_policy: Called with the number of the attempt that failed, from 1, and its error;
                whether to go on. Default: always.
            backoff: The pauses between attempts without progress; default: none after the first,
                then 0.5 s, doubling up to 30 s.

        Raises:
            UsageError: The minimum is no number of slices, a time is no time, a callback or policy
                cannot be called, the back-off is none, or the decorator was not called
                (`@elastic_retry` without parentheses).
            ValueError: Both `max_retries` and `retry_policy` are given, or the former is not
                positive.

        What the decorated function raises, beside its own errors:

        * `ElasticRuntimeError`: the policy, or an error that comes back, ends the attempts;
        * `TimeoutError`: there are not enough slices after `timeout`.
        """
        if callable(max_retries):
            raise UsageError("elastic_retry has to be called: write @manager.elastic_retry()")
        plan = Plan(
            minimum=self._minimum(minimum_slice_count),
            poll_interval_s=_seconds("poll_interval", poll_interval),
            timeout_s=None if timeout is None else _seconds("timeout", timeout, " or None"),
            pre_callback=_called("pre_callback", pre_callback),
            on_event=_called("on_elastic_event_callback", on_elastic_event_callback),
            policy=_policy(retry_policy, max_retries),
            backoff=_backoff(backoff),
        )
        return self._decorator(plan)

    def _decorator(self, plan: Plan) -> Callable[[_F], _F]:
        def decorator(function: _F) -> _F:
            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                self.start_monitoring(plan.poll_interval_s)
                try:
                    attempts = Attempts(self._sets, self.slice_to_devices, plan)
                    return attempts.run(lambda: function(*args, **kwargs))
                finally:
                    self.close()

            return wrapper  # type: ignore[return-value]

        return decorator

    def _minimum(self, count: Any) -> int:
        if count is None:
            return self.total_slice_count
        try:
            least = operator.index(count)
        except TypeError:
            least = 0
        if not 1 <= least <= self.total_slice_count:
            raise UsageError(
                f"minimum_slice_count is {count!r}; there are {self.total_slice_count} slices"
            )
        return least

    def pause_resume(
        self,
        max_retries: int,
        poll_interval: float = 10,
        timeout: float | None = None,
        pre_callback: Callback | None = None,
        on_elastic_event_callback: Callback | None = None,
    ) -> Callable[[_F], _F]:
        """Deprecated: `elastic_retry` with all slices."""
        _deprecated("pause_resume")
        return self.elastic_retry(
            max_retries, None, poll_interval, timeout, pre_callback, on_elastic_event_callback
        )

    def replica_resize(
        self,
        max_resizes: int,
        poll_interval: float = 10,
        pre_callback: Callback | None = None,
        on_elastic_event_callback: Callback | None = None,
    ) -> Callable[[_F], _F]:
        """Deprecated: `elastic_retry` with `minimum_slice_count=1`."""
        _deprecated("replica_resize")
        return self.elastic_retry(
            max_resizes, 1, poll_interval, None, pre_callback, on_elastic_event_callback
        )


def _seconds(name: str, value: Any, others: str = "") -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not seconds >= 0:
        raise UsageError(f"{name} is {value!r}; it must be 0 or more seconds{others}")
    return min(seconds, threading.TIMEOUT_MAX)


def _backoff(value: Any) -> Backoff:
    if value is None:
        return Backoff()
    if not isinstance(value, Backoff):
        raise UsageError(f"backoff is {value!r}; it must be a Backoff or None")
    _seconds("Backoff.first_s", value.first_s)
    _seconds("Backoff.limit_s", value.limit_s)
    return value


def _called(name: str, value: Callable[..., _T] | None) -> Callable[..., _T] | None:
    if value is not None and not callable(value):
        raise UsageError(f"{name} is {value!r}; it must be a function or None")
    return value


def _policy(policy: RetryPolicy | None, max_retries: int | None) -> RetryPolicy | None:
    if max_retries is None:
        return _called("retry_policy", policy)
    if policy is not None:
        raise ValueError("give max_retries or retry_policy, not both")
    limit: RetryPolicy = ElasticRetryLimit(max_retries)
    return limit


def _deprecated(name: str) -> None:
    warnings.warn(
        f"`{name}` is deprecated; use `elastic_retry` instead", DeprecationWarning, stacklevel=3
    )
