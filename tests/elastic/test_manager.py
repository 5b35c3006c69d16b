"""`regrow.elastic.manager` and `regrow.elastic.elastic` on slices that die and hang."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from elastic_cases import cases_of, run

import regrow


@pytest.fixture(scope="module")
def managing(start: Callable[..., Any]) -> Iterator[Any]:
    # A slice that hangs must hang for longer than the checks that must not be blocked by it.
    with regrow.LocalCluster(slices=3, devices_per_slice=2, hang_after_s=60) as cluster:
        yield start(cluster, "managing.py")


@pytest.mark.parametrize("case", cases_of("managing.py"))
def test_managing(managing: Any, case: str) -> None:
    managing.check(case)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["check", "snapshot"])
def test_a_program_may_end_while_a_slice_hangs(what: str) -> None:
    with regrow.LocalCluster(slices=2, devices_per_slice=1, hang_after_s=1) as cluster:
        done = run(cluster, "leaving.py", what)
    assert done.returncode == 0, done.stdout
    assert "leaves" in done.stdout
    assert "terminate called" not in done.stdout
