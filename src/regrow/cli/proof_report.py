"""What `regrow prove` prints."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any, final

from regrow.chaos.committed import Committed
from regrow.chaos.schedule import FaultEvent
from regrow.chaos.verdict import NOTHING, Comparison, Verdict
from regrow.cli.proof_runs import Done


@final
@dataclass(frozen=True, slots=True)
class Proof:
    """A proof that has been made.

    Attributes:
        faults: Those that were ordered.
        run: The run with them.
        verdict: What came of it.
    """

    faults: tuple[FaultEvent, ...]
    run: Done
    verdict: Verdict


def told(proof: Proof) -> str:
    """A proof in a few lines; the last one is the verdict."""
    verdict = proof.verdict
    rows = [
        ("faults", _faults(proof)),
        ("steps", _steps(proof.run.committed)),
        ("slices", _slices(proof.run.committed)),
    ]
    if verdict.reference is not None:
        rows.append(("same slices, no faults", _comparison(verdict.reference)))
    if verdict.undisturbed is not None:
        rows.append(("all slices, no faults", _comparison(verdict.undisturbed)))
    if verdict.ledger is not None:
        rows.append(("records", verdict.ledger.text))
    lines = [f"  {name:<23} {text}" for name, text in rows]
    return "\n".join(["proof", *lines, f"verdict: {verdict.text}"])


def _faults(proof: Proof) -> str:
    happened = ", ".join(map(str, proof.run.happened)) or "none"
    missing = len(proof.faults) - len(proof.run.happened)
    never = f"; {missing} of {len(proof.faults)} did not happen" if missing else ""
    lost = ", ".join(map(str, proof.run.lost)) or "none"
    return f"{happened}{never}; slices lost: {lost}"


def _steps(run: Committed) -> str:
    back = ", ".join(f"from {one.at} to {one.to}" for one in run.rollbacks)
    were = "was" if run.taken_twice == 1 else "were"
    redone = f"; {run.taken_twice} {were} taken twice (back {back})" if back else ""
    return f"{len(run.steps)} count, {run.steps[0].step} to {run.steps[-1].step}{redone}"


def _slices(run: Committed) -> str:
    return ", ".join(
        f"{'unknown' if slices is None else ' '.join(map(str, slices))} from step {step}"
        for step, slices in _changes(run)
    )


def _changes(run: Committed) -> list[tuple[int, tuple[int, ...] | None]]:
    """From which step on the run used which slices; None: it is not known."""
    stretches = itertools.groupby(run.steps, key=lambda one: one.slices)
    return [(next(steps).step, slices) for slices, steps in stretches]


def _comparison(comparison: Comparison) -> str:
    if comparison.outcome == NOTHING:
        return comparison.text
    where = f" at step {comparison.step}" if comparison.outcome == "diverged" else ""
    return f"{comparison.outcome}{where}: {comparison.text}"


def to_json(proof: Proof) -> dict[str, Any]:
    """A proof for programs."""
    verdict = proof.verdict
    return {
        "verdict": verdict.outcome,
        "text": verdict.text,
        "faults": [str(fault) for fault in proof.faults],
        "happened": [str(fault) for fault in proof.run.happened],
        "lost_slices": list(proof.run.lost),
        "steps": len(proof.run.committed.steps),
        "slices": [
            {"from_step": step, "slices": slices} for step, slices in _changes(proof.run.committed)
        ],
        "taken_twice": proof.run.committed.taken_twice,
        "rollbacks": [asdict(one) for one in proof.run.committed.rollbacks],
        "reference": None if verdict.reference is None else asdict(verdict.reference),
        "undisturbed": None if verdict.undisturbed is None else asdict(verdict.undisturbed),
        "ledger": None if verdict.ledger is None else asdict(verdict.ledger),
    }
