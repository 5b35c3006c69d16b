"""The manager and its health checks, on slices that are really killed and stopped."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import run_cases
from elastic_rig import (
    DEVICES,
    LOST,
    PER_SLICE,
    SLICES,
    case,
    kill,
    logged,
    mesh_of,
    restore,
    stop,
    there,
)
from pathwaysutils.elastic import elastic as stock_elastic
from pathwaysutils.elastic import manager as stock

import regrow
from regrow.elastic import at_step, elastic, manager, progress

ALL = frozenset(range(SLICES))


def total(made: manager.Manager) -> float:
    """A program over all active slices."""
    mesh = mesh_of(*sorted(made.active_slice_indices))
    return float(jax.jit(jnp.sum)(there(np.ones(8, np.float32), mesh, None)))


def raised(function: Any) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


@case
def the_documented_properties() -> None:
    made, theirs = manager.Manager(), stock.Manager()
    assert made.active_devices == DEVICES
    assert made.default_device == DEVICES[0] == theirs.default_device
    for name in (
        "slice_to_devices",
        "all_slice_indices",
        "active_slice_indices",
        "inactive_slice_indices",
        "available_inactive_slices",
        "total_slice_count",
        "active_slice_count",
    ):
        assert getattr(made, name) == getattr(theirs, name), name
    for one in (made, theirs):
        one.active_slice_indices = {2, 0}
    assert made.inactive_slice_indices == theirs.inactive_slice_indices == {1}
    assert made.active_devices == [d for d in DEVICES if d.slice_index != 1]
    assert made.scale_by_active_slices(6) == theirs.scale_by_active_slices(6) == 4
    assert made.scale_by_active_slices(1.5) == theirs.scale_by_active_slices(1.5) == 1.0
    assert isinstance(raised(lambda: made.scale_by_active_slices(4)), ValueError)
    made.active_slice_indices = set()
    assert isinstance(raised(lambda: made.default_device), ValueError)


@case
def all_of_the_stock_modules_is_there() -> None:
    for ours, theirs in ((manager, stock), (elastic, stock_elastic)):
        public = {
            name
            for name, value in vars(theirs).items()
            if not name.startswith("_") and getattr(value, "__module__", "") == theirs.__name__
        }
        assert public <= set(vars(ours)) | {"RetryPolicy"}, public - set(vars(ours))
    made = {name for name in dir(stock.Manager) if not name.startswith("_")}
    assert made <= set(dir(manager.Manager)) | {"slice_to_devices"}


@case
def resize_goes_on_without_the_slice_and_takes_it_back() -> None:
    made = manager.Manager()
    seen: list[frozenset[int]] = []
    events: list[Exception] = []
    order: list[str] = []

    def policy(attempt: int, error: Exception) -> bool:
        order.append(f"policy {attempt}")
        events.append(error)
        return attempt < 5

    @made.elastic_retry(
        minimum_slice_count=1,
        poll_interval=0.1,
        timeout=60,
        retry_policy=policy,
        pre_callback=lambda: order.append("before"),
        on_elastic_event_callback=lambda: order.append(f"event in {progress.current().phase}"),
    )
    def loop() -> str:
        seen.append(made.active_slice_indices)
        assert jnp.zeros(()).devices() == {made.default_device}
        if len(seen) == 1:
            kill(1)
            total_of_all = jax.jit(jnp.sum)(there(np.ones(8), mesh_of(0, 1, 2)))
            total_of_all.block_until_ready()
        if len(seen) == 2:
            assert total(made) == 8.0
            assert made.available_inactive_slices == frozenset()
            restore(1)
            deadline = time.monotonic() + 60
            while made.available_inactive_slices != {1}:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            raise manager.ScaleUpSignalError
        made.active_slice_indices |= made.available_inactive_slices
        assert total(made) == 8.0
        return "done"

    with logged() as log:
        assert loop() == "done"
    assert seen == [ALL, ALL - {1}, ALL]
    assert order == [
        "before",
        "event in None",
        "policy 1",
        "before",
        "event in scale-up",
        "policy 2",
        "before",
    ]
    loss = regrow.explain(events[0])
    assert loss is not None
    assert (loss.slice_index, loss.kind) == (1, "killed")
    assert isinstance(events[1], stock.ScaleUpSignalError)
    assert "elastic attempt 1 (no limit) ended: slice 1, incarnation" in log.text
    assert not [t for t in threading.enumerate() if t.name == "regrow-elastic-monitor"]


@case
def pause_waits_for_all_slices() -> None:
    made = manager.Manager()
    seen: list[frozenset[int]] = []

    @made.elastic_retry(
        poll_interval=0.1, timeout=60, retry_policy=manager.ElasticRetryLimit(max_attempts=3)
    )
    def loop() -> float:
        seen.append(made.active_slice_indices)
        if len(seen) == 1:
            kill(2)
            threading.Timer(0.3, restore, (2,)).start()
        return total(made)

    with logged() as log:
        assert loop() == 8.0
    assert seen == [ALL, ALL]
    assert "attempt 1 of at most 3 ended: slice 2," in log.text
    assert "2 attempts are left" in log.text


@case
def the_budget_ends_it_with_attempt_and_cause() -> None:
    made = manager.Manager()

    @made.elastic_retry(
        minimum_slice_count=1, poll_interval=0.1, retry_policy=manager.ElasticRetryLimit(1)
    )
    def loop() -> None:
        kill(1)
        total(made)

    error = raised(loop)
    assert isinstance(error, stock.ElasticRuntimeError)
    assert isinstance(error.__cause__, LOST)
    text = str(error)
    assert text.startswith("Elastic attempt 1 failed: the retry policy allows no further attempt")
    assert ". Attempt 1 of at most 1 ended: slice 1," in text
    assert "0 attempts are left" in text


@case
def too_few_slices_in_time_tells_which_and_why() -> None:
    made = manager.Manager()

    # The next check would come after the timeout, so one is made, with time enough for those that live.
    @made.elastic_retry(poll_interval=10, timeout=5)
    def loop() -> None:
        kill(1)
        total(made)

    error = raised(loop)
    assert isinstance(error, TimeoutError)
    text = str(error)
    assert text.startswith("elastic attempt 2 (no limit): waited ")
    assert "for at least 3 of 3 slices (active: 0, 2; slice 1, incarnation" in text
    assert "the timeout is 5 s; the one before ended: slice 1, incarnation" in text


@case
def errors_of_the_program_are_raised_as_they_are() -> None:
    made = manager.Manager()
    calls: list[int] = []

    @made.elastic_retry(poll_interval=0.1)
    def loop(kind: type[Exception]) -> None:
        calls.append(1)
        raise kind("a text with no code")

    for kind in (ValueError, LOST):
        assert type(raised(lambda kind=kind: loop(kind))) is kind
    assert len(calls) == 2


@case
def an_error_of_the_program_that_looks_like_a_loss_is_tried_once_more() -> None:
    made = manager.Manager()
    steps: list[int] = []

    @made.elastic_retry(poll_interval=0.1, minimum_slice_count=1)
    def loop() -> None:
        for step in (6, 7):
            at_step(step)
            steps.append(step)
        raise LOST(f"INTERNAL: my own check {len(steps)} failed")

    error = raised(loop)
    assert isinstance(error, stock.ElasticRuntimeError)
    assert steps == [6, 7, 6, 7]
    assert "came 2 times in a row at step 7, and no slice was reported lost" in str(error)
    assert "INTERNAL: my own check 4 failed" in str(error.__cause__)
    assert "pause" not in str(error), "no further attempt begins"


@case
def a_hung_slice_blocks_no_check_past_its_timeout() -> None:
    # It hangs for longer than these checks take: this cluster declares it lost after a minute.
    stop(1)
    began = time.monotonic()
    assert elastic.get_active_slice_indices(timeout=2.0) == ALL - {1}
    made = manager.Manager(timeout=1.0)
    assert made.active_slice_indices == ALL - {1}
    error = raised(lambda: elastic.wait_for_slices(poll_interval=0.1, timeout=1.0))
    assert isinstance(error, TimeoutError)
    assert "slice 1: has not answered a health check for" in str(error)
    assert elastic.wait_for_slices(2, 0.1, timeout=3.0) == ALL - {1}
    assert time.monotonic() - began < 40, "the deadline of this cluster for a hung slice is 60 s"
    checks = [t for t in threading.enumerate() if t.name == "regrow-health"]
    assert len(checks) == 1, "one thread a hung slice, however often it is asked"
    checker = elastic.DefaultSliceHealthChecker(made.slice_to_devices)
    assert elastic.get_active_slice_indices(checker=checker, timeout=1.0) == frozenset()
    kill(1)
    for thread in checks:
        thread.join(20)
        assert not thread.is_alive()
    assert elastic.get_active_slice_indices(timeout=20.0) == ALL - {1}
    assert elastic.get_active_slice_indices(checker=checker) == ALL - {1}


@case
def a_check_that_fails_by_itself_is_told() -> None:
    class Broken(elastic.SliceHealthChecker):  # type: ignore[misc]
        def dispatch(self) -> None:
            raise KeyError("mine")

        def validate(self) -> set[int]:
            return set()

    assert isinstance(
        raised(lambda: elastic.get_active_slice_indices(checker=Broken({}))), KeyError
    )


@case
def what_cannot_be_asked_for() -> None:
    assert str(raised(lambda: manager.Manager([]))) == "there are no devices to manage"
    assert "timeout is 'a'; it must" in str(raised(lambda: manager.Manager(timeout="a")))  # type: ignore[arg-type]
    error = raised(lambda: elastic.wait_for_slices(SLICES + 1))
    assert str(error) == "slice_count is 4; there are 3 slices"
    made = manager.Manager()
    for count in (0, SLICES + 1):
        error = raised(lambda count=count: made.elastic_retry(minimum_slice_count=count))
        assert f"minimum_slice_count is {count}; there are 3 slices" in str(error)
    assert "write @manager.elastic_retry()" in str(raised(lambda: made.elastic_retry(print)))
    assert "timeout is -1; it must be 0 or" in str(raised(lambda: made.elastic_retry(timeout=-1)))
    error = raised(lambda: made.elastic_retry(poll_interval=-1))
    assert "poll_interval is -1; it must be 0 or more seconds" in str(error)
    assert made.elastic_retry(poll_interval=float("inf"))(lambda: 3)() == 3
    for argument, value, text in (
        ("minimum_slice_count", "two", "minimum_slice_count is 'two'; there are 3 slices"),
        ("poll_interval", "often", "poll_interval is 'often'; it must be 0 or more seconds"),
        ("retry_policy", 3, "retry_policy is 3; it must be a function or None"),
        ("pre_callback", 3, "pre_callback is 3; it must be a function or None"),
        ("backoff", 3, "backoff is 3; it must be a Backoff or None"),
        ("backoff", manager.Backoff(-1), "Backoff.first_s is -1; it must be 0 or more seconds"),
    ):
        error = raised(lambda name=argument, value=value: made.elastic_retry(**{name: value}))
        assert text in str(error)
    both = raised(lambda: made.elastic_retry(2, retry_policy=manager.ElasticRetryLimit(1)))
    assert isinstance(both, ValueError)

    def add_unknown() -> None:
        made.active_slice_indices |= {9}

    assert "there are no slices [9]" in str(raised(add_unknown))


@case
def the_deprecated_names_still_work() -> None:
    made = manager.Manager()
    for decorate in (made.pause_resume, made.replica_resize):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert decorate(2, 0.1)(lambda: 5)() == 5
        assert [one.category for one in caught] == [DeprecationWarning]
        assert caught[0].filename == __file__


@case
def steps_and_phases_stand_in_the_error() -> None:
    at_step(41)
    with regrow.elastic.phase("load"):
        kill(2)
    error = raised(lambda: there(np.ones(8), mesh_of(0, 2)).block_until_ready())
    loss = regrow.explain(error)
    assert loss is not None, error
    assert (loss.slice_index, loss.step, loss.phase, loss.kind) == (2, 41, "load", "killed")
    assert loss.incarnation is not None
    assert loss.incarnation >= 1
    assert loss.last_seen_s is not None
    assert "in step 41, phase load" in str(error)
    assert len(DEVICES) == SLICES * PER_SLICE


if __name__ == "__main__":
    sys.exit(run_cases())
