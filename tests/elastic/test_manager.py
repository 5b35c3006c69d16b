"""`regrow.elastic.manager` and `regrow.elastic.elastic` on slices that die and hang."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from elastic_cases import cases_of

import regrow


@pytest.fixture(scope="module")
def managing(start: Callable[..., Any]) -> Iterator[Any]:
    # A slice that hangs must hang for longer than the checks that must not be blocked by it.
    with regrow.LocalCluster(slices=3, devices_per_slice=2, hang_after_s=60) as cluster:
        yield start(cluster, "managing.py")


@pytest.mark.parametrize("case", cases_of("managing.py"))
def test_managing(managing: Any, case: str) -> None:
    managing.check(case)
