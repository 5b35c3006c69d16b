"""The two batch policies."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.elastic import Batch, ConstantGlobalBatch, ScaledGlobalBatch
from regrow.errors import UsageError


def test_constant() -> None:
    policy = ConstantGlobalBatch(12)
    assert policy.batch(4, 4) == Batch(12, 3, 1.0)
    assert policy.batch(3, 4) == Batch(12, 4, 1.0)
    with pytest.raises(UsageError, match="5 slices cannot share 12 records evenly; 60 suit any"):
        policy.batch(5, 5)


@pytest.mark.parametrize(
    ("rule", "factor"), [("linear", 0.25), ("square root", 0.5), ("none", 1.0)]
)
def test_scaled(rule: Any, factor: float) -> None:
    policy = ScaledGlobalBatch(3, rule)
    assert policy.batch(4, 4) == Batch(12, 3, 1.0)
    assert policy.batch(1, 4) == Batch(3, 3, factor)


@given(st.integers(0, 10_000), st.integers(1, 12))
def test_any_number_of_slices_shares_it(records: int, total: int) -> None:
    policy = ConstantGlobalBatch.at_least(records, total)
    assert policy.records >= records
    for active in range(1, total + 1):
        batch = policy.batch(active, total)
        assert batch.records_per_slice * active == batch.records == policy.records


def test_what_is_refused() -> None:
    for make in (
        lambda: ConstantGlobalBatch(0),
        lambda: ScaledGlobalBatch(0),
        lambda: ScaledGlobalBatch(1, "cubic"),  # type: ignore[arg-type]
        lambda: ConstantGlobalBatch.at_least(1, 0),
        lambda: ConstantGlobalBatch(4).batch(0, 4),
        lambda: ScaledGlobalBatch(4).batch(5, 4),
    ):
        with pytest.raises(UsageError):
            make()
