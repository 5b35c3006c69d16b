"""examples/multislice_training.py on local slices: it resumes, also when a slice is preempted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from local_slices import LocalSlices

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "multislice_training.py"
TINY = "--layers 1 --width 16 --context 8 --batch 16"
NODES = "projects/p/locations/us-central2-b/nodes"


def command(out: Path, steps: int, every: int) -> str:
    options = f"--out {out} --steps {steps} --checkpoint-every {every} {TINY}"
    return f"exec {sys.executable} {EXAMPLE} {options}"


def run(slices: LocalSlices, name: str, line: str) -> str:
    """Runs it on every host, to its end."""
    return slices.good(
        "queued-resources", "ssh", name, "--node", "all", "--worker", "all", "--command", line
    )


def losses(out: Path) -> list[tuple[int, str]]:
    """Of each step that was taken, in the order in which they were taken."""
    path = out / "losses.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(told["step"], told["loss"]) for told in map(json.loads, lines)]


def test_it_goes_on_from_its_checkpoint(slices: LocalSlices, tmp_path: Path) -> None:
    slices.create("smoke", 2, "v4-8")
    run(slices, "smoke", command(tmp_path, 5, 2))
    assert [step for step, _ in losses(tmp_path)] == list(range(5))
    told = run(slices, "smoke", command(tmp_path, 8, 2))
    assert "going on after step 4, from its checkpoint" in told
    assert [step for step, _ in losses(tmp_path)] == list(range(8))
    slices.delete("smoke")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_preempted_slice_changes_nothing(slices: LocalSlices, tmp_path: Path) -> None:
    """Repair runs the startup script again; nobody else does anything; the losses are the same bits."""
    steps, every = 400, 10
    faulted, undisturbed = tmp_path / "faulted", tmp_path / "undisturbed"
    script = f"startup-script={command(faulted, steps, every)}"
    slices.create("train", 2, "v4-8", "--metadata", script)
    slices.until(lambda: len(losses(faulted)) > 2 * every, 100, "the first steps")
    slices.good("cloud", "preempt", f"{NODES}/train-1")

    def done() -> bool:
        return (steps - 1) in dict(losses(faulted))

    slices.until(done, 200, "the last step after the preemption")
    taken = losses(faulted)
    restarts = [at for at in range(1, len(taken)) if taken[at][0] != taken[at - 1][0] + 1]
    assert len(restarts) == 1, "it was interrupted once, and went on from a checkpoint"
    assert 0 < taken[restarts[0]][0] < steps - 1
    # Steps that were taken twice have had the same loss twice.
    assert len(set(taken)) == steps
    slices.delete("train")

    slices.create("plain", 2, "v4-8")
    run(slices, "plain", command(undisturbed, steps, every))
    assert losses(undisturbed) == sorted(dict(taken).items())
