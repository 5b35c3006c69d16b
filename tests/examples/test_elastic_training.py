"""The examples, run as a user runs them, against slices that really die."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from regrow import LocalCluster

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = ["--layers", "1", "--width", "16", "--context", "8", "--poll-interval", "0.2"]
FOREVER = ["--steps", "1000000"]
WAIT_S = 60.0


class Training:
    """The training example as a process, line by line."""

    def __init__(self, cluster: LocalCluster, out: Path, *arguments: str) -> None:
        self.seen: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        script = str(EXAMPLES / "elastic_training.py")
        self._process = subprocess.Popen(
            [sys.executable, script, "--out", str(out), *TINY, *arguments],
            env=os.environ | cluster.env | {"PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first line from here on in which the pattern is found."""
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"waited {WAIT_S} s for {pattern!r} after\n" + "\n".join(self.seen))
            if line is None:
                pytest.fail(f"ended before {pattern!r}\n" + "\n".join(self.seen))
            self.seen.append(line)
            if match := re.search(pattern, line):
                return match

    def wait(self) -> int:
        """The exit status, with all output in `seen`."""
        status = self._process.wait(WAIT_S)
        while (line := self._lines.get(timeout=WAIT_S)) is not None:
            self.seen.append(line)
        return status

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(slices=3, devices_per_slice=2) as cluster:
        yield cluster


def test_undisturbed_training_draws_and_sums_up(cluster: LocalCluster, tmp_path: Path) -> None:
    training = Training(cluster, tmp_path / "out", "--steps", "30")
    try:
        assert training.wait() == 0, "\n".join(training.seen)
    finally:
        training.close()
    output = "\n".join(training.seen)
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
    training = Training(cluster, tmp_path / "out", *FOREVER, "--snapshot-interval", str(interval))
    try:
        while int(training.wait_for(r"step +(\d+)/")[1]) <= 2 * interval:
            continue
        cluster.kill(1)
        training.wait_for(r"a slice was lost: DATA_LOSS: slice 1 ")
        training.wait_for(r"going on without slice 1 ")
        restored = int(training.wait_for(r"snapshot restored; step (\d+) is next")[1])
        assert restored > interval
        assert restored % interval == 2  # Its steps are counted from 1, the snapshots' from 0.
        training.wait_for(r"first step on slices 0, 2 \+")
        training.wait_for(r"step +\d+/.* slices 0 2$")
        cluster.restore(1)
        training.wait_for(r"slice 1 healthy again")
        training.wait_for(r"first step on slices 0, 1, 2 \+")
        training.wait_for(r"step +\d+/.* slices 0 1 2$")
    finally:
        training.close()


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


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo(tmp_path: Path) -> None:
    options = ["--slices=3", "--devices-per-slice=2", "--chaos=kill:1@step=60", "--restore-after=3"]
    script = [str(EXAMPLES / "elastic_training.py"), "--steps", "160"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "regrow",
            "prove",
            *options,
            *script,
            "--out",
            f"{tmp_path}/{{run}}",
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
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
    script = [str(EXAMPLES / "elastic_training.py"), "--steps", "45"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "regrow",
            "prove",
            *options,
            *script,
            "--out",
            f"{tmp_path}/{{run}}",
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("verdict: bit-equal: 45 losses, ")
    assert done.stderr.count("is resumed") == 5
    assert "is lost" not in done.stderr
