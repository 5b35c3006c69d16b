"""Budgets: their language, and what breaks them."""

from __future__ import annotations

import pytest

from regrow.errors import UsageError
from regrow.observe import ElasticEvent, parse_budgets


def event(kind: str = "loss", took_s: float = 3.0, ended: str = "recovered") -> dict:
    return ElasticEvent(kind, 1, "SIGKILL", 0.0, 0.5).report(2, 0.0, took_s, ended).to_json()


def test_budgets() -> None:
    recover, scale_up, decide = parse_budgets("recover=2s, scale-up=600ms,decide=1.5s")
    assert (recover.limit_s, scale_up.limit_s, decide.limit_s) == (2.0, 0.6, 1.5)
    assert recover.breach(event()) == "loss 2 took 3.00 s; the budget is recover=2s"
    assert recover.breach(event(took_s=2.0)) is None
    assert recover.breach(event("scale-up")) is None
    assert scale_up.breach(event("scale-up")) is not None
    assert decide.breach(event()) == "decide of loss 2 took 2.50 s; the budget is decide=1.5s"
    gone = recover.breach(event(ended="client gone"))
    assert gone == "loss 2 took 3.00 s, and it did not recover; the budget is recover=2s"


@pytest.mark.parametrize("text", ["", "recover", "recover=2", "recover=-1s", "recover=1h", "=2s"])
def test_what_is_no_budget(text) -> None:
    with pytest.raises(UsageError, match="is no budget; write NAME=TIME"):
        parse_budgets(text)


def test_a_budget_for_nothing() -> None:
    with pytest.raises(UsageError, match="no budget for 'lunch'; allowed: recover, scale-up, det"):
        parse_budgets("recover=2s,lunch=2s")
