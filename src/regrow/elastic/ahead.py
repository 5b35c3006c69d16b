"""Programs of sets of slices, made before they are needed. See `Manager.compile_ahead`.

What was made for a set is kept, so a set that was seen before costs nothing: no tracing, no lowering,
no question to the server. Sets of one slice fewer are made in the background. They differ only in
their devices, so the server compiles the first of them and finds the others in its cache; what they
cost is the client's tracing.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from concurrent.futures import TimeoutError as StillMade
from typing import Any, Final, Generic, TypeVar, final

import jax

from regrow.elastic import progress
from regrow.errors import UsageError

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")

SETS: Final = 8
_KEPT: Final = 64
_TOLD_S: Final = 30.0
_STEPS: Final = 2
_UNTOLD_S: Final = 30.0
_SWITCH_S: Final = 0.0005


def one_fewer(active: Set[int], limit: int) -> Iterator[frozenset[int]]:
    """The sets that are left when one of these slices is lost; those of the last slices first."""
    if len(active) < 2:
        return
    for index in sorted(active, reverse=True)[:limit]:
        yield frozenset(active) - {index}


@final
class Ahead(Generic[_T]):
    """What a function makes for the devices of some slices, kept for each set of slices.

    May be used by several threads; each set is made by one of them.
    """

    def __init__(
        self,
        build: Callable[[list[jax.Device]], _T],
        slice_to_devices: Mapping[int, Sequence[jax.Device]],
        active: Callable[[], frozenset[int]],
        sets: int = SETS,
    ) -> None:
        """Calls nothing yet.

        Args:
            build: Takes the devices of some slices in order of slice index.
            slice_to_devices: All slices.
            active: Which of them are active now.
            sets: For how many sets of one slice fewer it is called in the background at most.

        Raises:
            UsageError: `sets` is negative.
        """
        if sets < 0:
            raise UsageError(f"sets is {sets}; it must be 0 or more")
        self._build = build
        self._slice_to_devices = slice_to_devices
        self._active = active
        self._sets = sets
        self._lock = threading.Lock()
        self._made: OrderedDict[frozenset[int], Future[_T]] = OrderedDict()
        self._base: frozenset[int] | None = None
        self._steps_left = 0
        self._since = 0.0
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        progress.follow(self)

    def __call__(self, slices: Set[int] | None = None) -> _T:
        """What the function makes for these slices; it is called only if it was not before.

        Args:
            slices: Their indices; default: the active ones.

        Raises:
            UsageError: There is no such slice, or none is given.
            Exception: What the function raises.
        """
        chosen = self._active() if slices is None else frozenset(slices)
        unknown = sorted(chosen - set(self._slice_to_devices))
        if unknown or not chosen:
            raise UsageError(f"there are no slices {unknown or 'in an empty set'}")
        made = self._get(chosen)
        if slices is None:
            with self._lock:
                self._base, self._steps_left = chosen, _STEPS
                self._since = time.monotonic()
        return made

    @property
    def made(self) -> frozenset[frozenset[int]]:
        """The sets of slices that are there already."""
        with self._lock:
            ended = [(key, future) for key, future in self._made.items() if future.done()]
        return frozenset(key for key, future in ended if future.exception() is None)

    def stepped(self) -> None:
        """The program says that it begins a step; after the first the background work begins."""
        if self._base is not None and self._steps_left:
            self._steps_left -= 1
            if not self._steps_left:
                self.begin()

    def looked_at(self) -> None:
        """Somebody looks from time to time: a program that tells no steps must be in them by now."""
        if self._steps_left == _STEPS and time.monotonic() > self._since + _UNTOLD_S:
            self.begin()

    def begin(self) -> None:
        """Begins to make what one slice fewer needs, in the background; nothing, if it has begun."""
        with self._lock:
            base, self._base = self._base, None
            if base is None or self._stop.is_set() or not self._sets:
                return
            thread = threading.Thread(
                # Not a daemon: one that is inside of JAX when the interpreter ends brings it down.
                target=self._work,
                args=(base, self._thread),
                name="regrow-ahead",
                daemon=False,
            )
            self._thread = thread
            thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until nothing is made in the background; whether that came true in time."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
            return not thread.is_alive()
        return True

    def close(self) -> None:
        """Begins nothing more in the background. What is there stays."""
        self._stop.set()

    def _work(self, base: frozenset[int], before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        began = time.monotonic()
        with _yielding():
            count = sum(self._made_ahead(slices, base) for slices in one_fewer(base, self._sets))
        _logger.info(
            "programs for one slice fewer: %d sets are there, after %.1f s",
            count,
            time.monotonic() - began,
        )

    def _made_ahead(self, slices: frozenset[int], base: frozenset[int]) -> bool:
        # The next loss has made other sets interesting, or the program has come to its end.
        if self._stop.is_set() or self._active() != base or not threading.main_thread().is_alive():
            return False
        try:
            self._get(slices)
        except Exception as error:  # noqa: BLE001 - who needs the set makes it, and meets the error there
            _logger.warning(
                "the programs for slices %s could not be made ahead: %s: %s",
                sorted(slices), type(error).__name__, error,
            )  # fmt: skip
            return False
        return True

    def _get(self, slices: frozenset[int]) -> _T:
        while True:
            with self._lock:
                future = self._made.get(slices)
                mine = future is None
                if future is None:
                    future = self._made[slices] = Future()
                self._made.move_to_end(slices)
            if mine:
                return self._make(slices, future)
            self._await(slices, future)
            if future.exception() is None:
                return future.result()

    def _make(self, slices: frozenset[int], future: Future[_T]) -> _T:
        devices = [d for index in sorted(slices) for d in self._slice_to_devices[index]]
        try:
            # JAX's caches depend on it; `elastic_retry` sets the same.
            with jax.default_device(devices[0]):
                made = self._build(devices)
        except BaseException as error:
            with self._lock:
                self._made.pop(slices, None)
            future.set_exception(error)
            raise
        future.set_result(made)
        self._forget_old()
        return made

    def _forget_old(self) -> None:
        with self._lock:
            for slices in list(self._made)[:-_KEPT]:
                if self._made[slices].done():
                    del self._made[slices]

    def _await(self, slices: frozenset[int], future: Future[Any]) -> None:
        began = time.monotonic()
        while not future.done():
            try:
                future.exception(_TOLD_S)
            except StillMade:
                waited_s = time.monotonic() - began
                _logger.warning(
                    "have waited %.0f s for the programs of slices %s, which another thread makes",
                    waited_s,
                    sorted(slices),
                )


@contextlib.contextmanager
def _yielding() -> Iterator[None]:
    """Has other threads wait less for the interpreter: each step of the training asks for it often."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(min(usual_s, _SWITCH_S))
    try:
        yield
    finally:
        sys.setswitchinterval(usual_s)
