"""Whole trainings whose slices die and return: data, snapshots, checkpoints and retries together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from elastic_cases import cases_of

import regrow


@pytest.fixture(scope="module")
def training(start: Callable[..., Any]) -> Iterator[Any]:
    with regrow.LocalCluster(slices=4, devices_per_slice=1, hang_after_s=60) as cluster:
        yield start(cluster, "training.py")


@pytest.mark.parametrize("case", cases_of("training.py"))
def test_training(training: Any, case: str) -> None:
    training.check(case)
