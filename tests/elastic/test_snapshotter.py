"""`Snapshotter` on slices that die in the middle of its work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from elastic_cases import cases_of

import regrow


@pytest.fixture(scope="module")
def snapshotting(start: Callable[..., Any]) -> Iterator[Any]:
    # A slice that is stopped to hold a snapshot up must not be lost by that.
    with regrow.LocalCluster(slices=3, devices_per_slice=2, hang_after_s=60) as cluster:
        yield start(cluster, "snapshotting.py")


@pytest.mark.parametrize(
    "case",
    cases_of(
        "snapshotting.py",
        "a_second_slice_that_is_no_target_may_die_at_any_point_of_load",
        "any_axis_may_be_that_of_the_replicas",
        "onto_other_layouts",
    ),
)
def test_snapshotting(snapshotting: Any, case: str) -> None:
    snapshotting.check(case)
