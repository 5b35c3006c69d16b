"""The examples, run as a user runs them, against slices that really die."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from regrow import LocalCluster
from running import RunningProgram

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TRAINING = EXAMPLES / "elastic_training.py"
TINY = ["--layers", "1", "--width", "16", "--context", "8", "--poll-interval", "0.2"]
FOREVER = ["--steps", "1000000"]
WAIT_S = 60.0


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(slices=3, devices_per_slice=2) as cluster:
        yield cluster


@contextlib.contextmanager
def training(cluster: LocalCluster, out: Path, *arguments: str) -> Iterator[RunningProgram]:
    """The training example, small and with slices that are looked at often."""
    options = ("--out", str(out), *TINY, *arguments)
    program = RunningProgram(TRAINING, *options, environ=cluster.env, timeout_s=WAIT_S)
    try:
        yield program
    finally:
        program.close()


def test_undisturbed_training_draws_and_sums_up(cluster: LocalCluster, tmp_path: Path) -> None:
    with training(cluster, tmp_path / "out", "--steps", "30") as program:
        output = program.succeeds()
    assert "\x1b" not in output, "control codes where there is no terminal"
    assert "30, and 0 of them once more after a loss" in output
    assert (tmp_path / "out" / "training.png").read_bytes().startswith(b"\x89PNG")
    losses = re.search(r"([\d.]+) at first, ([\d.]+) over the last", output)
    assert losses is not None
    assert float(losses[2]) < float(losses[1])


def test_training_goes_on_without_a_slice_and_takes_it_back(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    interval = 5
    options = (*FOREVER, "--snapshot-interval", str(interval))
    with training(cluster, tmp_path / "out", *options) as program:
        while int(program.wait_for(r"step +(\d+)/")[1]) <= 2 * interval:
            continue
        cluster.kill(1)
        program.wait_for(r"a slice was lost: DATA_LOSS: slice 1 ")
        program.wait_for(r"going on without slice 1 ")
        restored = int(program.wait_for(r"snapshot restored; step (\d+) is next")[1])
        assert restored > interval
        assert restored % interval == 2  # Its steps are counted from 1, the snapshots' from 0.
        program.wait_for(r"first step on slices 0, 2 \+")
        program.wait_for(r"step +\d+/.* slices 0 2$")
        cluster.restore(1)
        program.wait_for(r"slice 1 healthy again")
        program.wait_for(r"first step on slices 0, 1, 2 \+")
        program.wait_for(r"step +\d+/.* slices 0 1 2$")


def test_quickstart() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "quickstart.py")],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "28.0",
        "DATA_LOSS as it must be",
        "[1. 2. 3. 4. 5. 6. 7. 8.]",
        "28.0",
    ]
    assert done.stderr == ""


def prove(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Proves the training example; it must succeed."""
    argv = [sys.executable, "-m", "regrow", "prove", *options, "--out", f"{out}/{{run}}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo(tmp_path: Path) -> None:
    options = ["--slices=3", "--devices-per-slice=2", "--chaos=kill:1@step=60", "--restore-after=3"]
    done = prove(tmp_path, *options, str(TRAINING), "--steps", "160")
    assert "a slice was lost: DATA_LOSS: slice 1 " in done.stdout
    assert (tmp_path / "faulted" / "training.png").exists()
    assert done.stdout.splitlines()[-1].startswith("verdict: bit-equal: 160 losses, ")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demos_job_suspended_three_times(tmp_path: Path) -> None:
    faults = (
        "suspend:0@step=10,suspend:1@step=10+0.2s,resume:1@step=10+1s,resume:0@step=10+1.2s,"
        "suspend:1@step=20,resume:1@step=20+1s,preempt:0@step=30,preempt:1@step=30+10ms"
    )
    options = [
        "--slices=2",
        "--devices-per-slice=2",
        "--num_elastic_instances=0",
        "--chaos",
        faults,
    ]
    done = prove(tmp_path, *options, str(TRAINING), "--steps", "45")
    assert done.stdout.splitlines()[-1].startswith("verdict: bit-equal: 45 losses, ")
    assert done.stderr.count("is resumed") == 5
    assert "is lost" not in done.stderr
