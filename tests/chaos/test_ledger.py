"""The ledger of records: what is used twice or left out is found, further epochs are not."""

from __future__ import annotations

import pytest
from proofs import FEWER, run, step, steps

from regrow.chaos.ledger import audit

PLAIN = run(*steps(0, 5))


def with_ids(number, *ids, slices=None):
    changed = {} if slices is None else {"slices": slices}
    return run(*steps(0, number - 1), step(number, ids=ids, **changed), *steps(number + 1, 5))


def test_a_run_that_went_back_used_each_record_once():
    ledger = audit(run(*steps(0, 4), *steps(3, 5, FEWER)), PLAIN)
    assert (ledger.records, ledger.breach, ledger.repeats) == (24, None, 0)
    assert ledger.text == "24 records, no gap and no double"


@pytest.mark.parametrize(
    ("ids", "kind", "text"),
    [
        ((11, 12, 13, 14), "double", "record 11 was used again, in place of 12"),
        ((12, 12, 13, 14), "double", "record 12 was used again, in place of 13"),
        ((13, 14, 15, 16), "gap", "record 12 was left out, 13 came in its place"),
        ((12, 13, 99, 15), "other", "record 99 was used in place of 14"),
        ((12, 13, 14), "gap", "record 15 was left out, 16 came in its place"),
        ((12, 13, 14, 15, 15), "double", "record 15 was used again, in place of 16"),
    ],
)
def test_what_is_wrong_is_found_where_it_is(ids, kind, text):
    breach = audit(with_ids(3, *ids), PLAIN).breach
    assert breach.kind == kind
    assert breach.text == text
    assert breach.step in (3, 4)


def test_a_last_step_with_fewer_records_is_a_gap():
    breach = audit(with_ids(5, 20, 21), PLAIN).breach
    assert (breach.step, breach.kind) == (5, "gap")
    assert breach.text == "2 records were used, 4 are right"


def test_batches_that_follow_the_slices_use_fewer_records():
    fewer = [step(n, FEWER, ids=(12 + 2 * k, 13 + 2 * k)) for k, n in enumerate((3, 4, 5))]
    assert audit(run(*steps(0, 2), *fewer), PLAIN).breach is None


def test_a_further_epoch_is_no_double():
    epochs = run(*[step(n, ids=range(4 * (n % 2), 4 * (n % 2) + 4)) for n in range(4)])
    ledger = audit(epochs, epochs)
    assert (ledger.breach, ledger.repeats) == (None, 8)
    assert ledger.text.endswith("8 of them again, as undisturbed")


def test_without_ids_there_is_no_ledger():
    assert audit(run(step(0, ids=None)), PLAIN) is None
    assert audit(PLAIN, run(step(0, ids=None))) is None
