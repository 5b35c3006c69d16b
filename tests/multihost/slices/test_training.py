"""examples/multislice_training.py on local slices: it resumes, also when a slice is preempted."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from local_slices import LocalSlices

from waiting import until

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "multislice_training.py"
TINY = "--layers 1 --width 16 --context 8 --batch 16"
NODES = "projects/p/locations/us-central2-b/nodes"


def command(out: Path, steps: int, every: int) -> str:
    options = f"--out {out} --steps {steps} --checkpoint-every {every} {TINY}"
    return f"{sys.executable} {EXAMPLE} {options}"


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


def resumed(slices: LocalSlices) -> list[int]:
    """After which steps the training has gone on, by what slice 0 has printed."""
    logs = slices.home.glob("cloud/logs/*-train-0/worker-0/startup-script.log")
    text = "".join(path.read_text() for path in logs)
    return [int(step) for step in re.findall(r"going on after step (\d+), from", text)]


def test_it_trains_and_leaves_a_checkpoint(slices: LocalSlices, tmp_path: Path) -> None:
    slices.create("smoke", 2, "v4-8")
    told = run(slices, "smoke", command(tmp_path, 5, 3))
    assert "8 devices on 2 hosts" in told
    assert [step for step, _ in losses(tmp_path)] == list(range(5))
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"3", "4"}
    slices.delete("smoke")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_lost_slices_change_nothing(slices: LocalSlices, tmp_path: Path) -> None:
    """Repair runs the startup script again; nobody else does anything; the losses are the same bits.

    A preemption has a notice, at which JAX and Orbax save; the death of a host has none.
    """
    steps, every = 120, 20
    faulted, undisturbed = tmp_path / "faulted", tmp_path / "undisturbed"
    script = f"startup-script=until {command(faulted, steps, every)}; do sleep 1; done"
    slices.create("train", 2, "v4-8", "--metadata", script)
    until(lambda: len(losses(faulted)) > every, "the first steps", timeout_s=200)
    slices.good("cloud", "preempt", f"{NODES}/train-1")
    until(lambda: resumed(slices), "the resumption after the preemption", timeout_s=200)
    before = len(losses(faulted))
    until(lambda: len(losses(faulted)) > before + 5, "some steps", timeout_s=200)
    slices.kill_host("train-1")
    until(lambda: (steps - 1) in dict(losses(faulted)), "the last step", timeout_s=300)

    taken = losses(faulted)
    after_notice, *_, after_death = resumed(slices)
    assert after_notice <= after_death < steps - 1
    # Steps that were taken twice have had the same loss twice.
    assert len(set(taken)) == steps < len(taken)
    slices.delete("train")
    slices.create("plain", 2, "v4-8")
    run(slices, "plain", command(undisturbed, steps, every))
    assert losses(undisturbed) == sorted(dict(taken).items())
