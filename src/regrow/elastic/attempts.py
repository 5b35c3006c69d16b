"""The attempts of `elastic_retry`: waiting for slices, running, and what follows a loss."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

import jax

from regrow.elastic import elastic, progress
from regrow.elastic.health import is_slice_down
from regrow.elastic.libraries import pathwaysutils
from regrow.elastic.retry import Backoff, Failure, RetryMachine, budget_of
from regrow.elastic.slice_sets import SliceSets

_logger = logging.getLogger(__name__)
_stock: Final = pathwaysutils("elastic.manager")

RetryPolicy: TypeAlias = Callable[[int, Exception], bool]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How attempts are made; see `Manager.elastic_retry`."""

    minimum: int
    poll_interval_s: float
    timeout_s: float | None
    pre_callback: Callable[[], Any] | None
    on_event: Callable[[], Any] | None
    policy: RetryPolicy | None
    backoff: Backoff


@final
class Attempts:
    """The attempts of one call of a decorated function."""

    def __init__(
        self, sets: SliceSets, slice_to_devices: Mapping[int, Sequence[jax.Device]], plan: Plan
    ) -> None:
        self._sets = sets
        self._slice_to_devices = slice_to_devices
        self._plan = plan
        self._machine = RetryMachine(budget_of(plan.policy), plan.backoff)

    def run(self, function: Callable[[], Any]) -> Any:
        """Calls the function until it returns; see `Manager.elastic_retry` for what it raises."""
        while True:
            try:
                return self._attempt(function)
            except _stock.ScaleUpSignalError as error:
                failure = Failure.scale_up(progress.current())
                with progress.phase("scale-up"):
                    pause_s = self._after(error, failure)
            except jax.errors.JaxRuntimeError as error:
                if not is_slice_down(error):
                    raise
                pause_s = self._after(error, Failure.of(error, progress.current()))
            # Outside of `except`: the error holds the arrays of the failed attempt.
            time.sleep(pause_s)
            self._machine.next()

    def _attempt(self, function: Callable[[], Any]) -> Any:
        plan = self._plan
        self._sets.activate(self._wait())
        self._sets.forget()
        if plan.pre_callback is not None:
            plan.pre_callback()
        with jax.default_device(self._slice_to_devices[min(self._sets.active)][0]):
            return function()

    def _wait(self) -> Set[int]:
        plan = self._plan
        try:
            with progress.phase("wait"):
                found = elastic.wait_for_slices(
                    plan.minimum,
                    plan.poll_interval_s,
                    plan.timeout_s,
                    self._slice_to_devices,
                )
        except TimeoutError as error:
            last = f"; the one before ended: {self._machine.last}" if self._machine.last else ""
            raise TimeoutError(f"elastic {self._machine.name}: {error}{last}") from None
        _logger.info("elastic %s begins on slices %s", self._machine.name, sorted(found))
        return found

    def _after(self, error: Exception, failure: Failure) -> float:
        """What follows the end of an attempt; returns the pause before the next, in seconds."""
        verdict = self._machine.failed(failure)
        _logger.warning("elastic %s", verdict.text)
        _logger.debug("elastic event", exc_info=error)
        _stop_trace()
        self._sets.forget()
        if self._plan.on_event is not None:
            self._plan.on_event()
        refusal = verdict.refusal
        if refusal is None and self._plan.policy is not None:
            allowed = self._plan.policy(self._machine.attempt, error)
            refusal = None if allowed else "the retry policy allows no further attempt"
        if refusal is None:
            if verdict.pause_s:
                _logger.warning("the next attempt begins after a pause of %g s", verdict.pause_s)
            return verdict.pause_s
        raise _stock.ElasticRuntimeError(
            f"Elastic attempt {self._machine.attempt} failed: {refusal}. {_sentence(verdict.text)}"
        ) from error


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _stop_trace() -> None:
    try:
        jax.profiler.stop_trace()  # type: ignore[no-untyped-call]
    except (RuntimeError, ValueError):
        _logger.debug("no trace of the profiler was running")
    except Exception:
        # A trace that spans a dead slice may not end cleanly; that must not end the training.
        _logger.exception("a trace of the profiler could not be stopped")
