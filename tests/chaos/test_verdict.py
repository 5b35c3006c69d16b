"""What a proof comes to: it must not be had for nothing."""

from __future__ import annotations

import math

from proofs import FEWER, loss, run, step, steps

from regrow.chaos.verdict import judge, unproved

PLAIN = run(*steps(0, 5))
RUN = run(*steps(0, 4), *steps(3, 5, FEWER))
REFERENCE = run(*steps(0, 2), *steps(3, 5, FEWER))


def test_bit_equal():
    verdict = judge(RUN, REFERENCE, PLAIN)
    assert verdict.outcome == verdict.reference.outcome == "bit-equal"
    assert verdict.text == (
        "bit-equal: 6 losses, 12 hashes of leaves of the state, the ids of 24 records"
    )
    assert verdict.ledger.breach is None


def test_without_a_fault_nothing_is_proved():
    verdict = unproved(PLAIN)
    assert verdict.outcome == "nothing proved"
    assert verdict.text == "nothing proved: no fault happened before the last step, 5"
    assert (verdict.reference, verdict.undisturbed, verdict.ledger) == (None, None, None)


def test_a_reference_that_did_not_follow_proves_nothing():
    verdict = judge(RUN, PLAIN, PLAIN)
    assert verdict.outcome == "nothing proved"
    assert "the reference did not follow: step 3: computed on slices 0, 2" in verdict.text


def test_a_step_that_is_left_out_is_a_divergence():
    verdict = judge(run(*steps(0, 2), *steps(4, 5)), PLAIN, None)
    assert verdict.outcome == "diverged"
    assert verdict.reference.text == "only the reference has this step"
    assert verdict.reference.step == 3


def test_one_differing_bit_beside_the_reference_is_a_divergence():
    other = run(*REFERENCE.steps[:5], step(5, FEWER, state={"params/w": "float32[8] 0"}))
    verdict = judge(RUN, other, PLAIN)
    assert verdict.outcome == "diverged"
    assert verdict.reference.path == "params/w"
    assert verdict.text.startswith("diverged at step 5: the state differs first at params/w")


def test_what_the_reference_does_as_well_shows_beside_the_undisturbed_run():
    wrong = [step(n, FEWER, loss=loss(9.9 - n)) for n in (3, 4, 5)]
    verdict = judge(run(*steps(0, 2), *wrong), run(*steps(0, 2), *wrong), PLAIN)
    assert verdict.reference.outcome == "bit-equal"
    assert verdict.undisturbed.outcome == verdict.outcome == "diverged"
    assert verdict.text.startswith("diverged at step 3: the loss is 6.9")


def test_a_breach_of_the_ledger_is_a_divergence():
    doubled = run(*steps(0, 2), step(3, FEWER, ids=(11, 12, 13, 14)), *steps(4, 5, FEWER))
    verdict = judge(doubled, doubled, PLAIN)
    assert verdict.outcome == "diverged"
    assert verdict.text == "diverged at step 3: record 11 was used again, in place of 12"


def test_with_unknown_slices_losses_are_compared_within_the_tolerance():
    unknown = [step(n, None, state=None, ids=None) for n in range(6)]
    close = [step(n, None, state=None, ids=None, loss=loss((10 - n) * 1.0000002)) for n in range(6)]
    verdict = judge(run(*close), None, run(*unknown))
    assert verdict.outcome == "equal within tolerance"
    assert verdict.ledger is None
    assert judge(run(*unknown), None, run(*unknown)).outcome == "bit-equal"


def test_other_batches_beside_the_undisturbed_run_take_nothing_from_the_proof():
    fewer = [step(3, FEWER, ids=(12, 13)), step(4, FEWER, ids=(14, 15)), step(5, FEWER, ids=(16,))]
    scaled = run(*steps(0, 2), *fewer)
    verdict = judge(scaled, scaled, PLAIN)
    assert verdict.outcome == "bit-equal"
    assert "not compared" in verdict.undisturbed.text


def test_records_that_are_all_the_same_prove_nothing():
    same = run(*[step(n, loss=loss(1.0), state={"w": "float32[8] 1"}, ids=None) for n in range(6)])
    verdict = judge(same, same, None)
    assert verdict.outcome == "nothing proved"
    assert verdict.text.startswith("nothing proved: each step recorded the same")
    assert judge(run(same.steps[0]), run(same.steps[0]), None).outcome == "bit-equal"


def test_faults_of_slices_that_no_step_used_prove_nothing():
    verdict = judge(PLAIN, PLAIN, PLAIN, faulted={3, 5})
    assert verdict.outcome == "nothing proved"
    assert "no step was computed on slice 3, 5, and no fault was done to another" in verdict.text
    assert judge(PLAIN, PLAIN, PLAIN, faulted={2, 3}).outcome == "bit-equal"
    fewer = run(*steps(0, 5, FEWER))
    assert judge(fewer, fewer, PLAIN, faulted={1}).outcome == "bit-equal", "lost before the first"
    unknown = run(*steps(0, 5, None))
    assert judge(unknown, None, unknown, faulted={3}).outcome == "bit-equal"


def test_losses_that_are_no_numbers_are_counted():
    nan = run(*steps(0, 3), *[step(n, loss=loss(math.nan)) for n in (4, 5)])
    assert "6 losses (2 of them infinite or no number), " in judge(nan, nan, nan).text
