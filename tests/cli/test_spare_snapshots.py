"""Replicas of snapshots for spares, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from waiting import until

PROGRAM = str(Path(__file__).parent / "programs" / "spare_snapshots_job.py")
SOUND = {
    "a slice killed": [0, 1],
    "killed again": [0, 1],
    "all slices killed": [0, 1],
    "a corrupt replica": [0],
    "the spare killed, too": [0, 1],
}


@pytest.fixture
def pool(regrow):
    def make(slices: int) -> None:
        up = regrow(*("up", "--detach", "--name", "pool", "--slices", str(slices), "--spares", "1"))
        assert up.returncode == 0, up.stderr

    return make


def start(regrow, *words: str) -> subprocess.Popen:
    job = ("run", "--cluster", "pool", "--slices", "2", "--num_elastic_instances", "2")
    return regrow.start(*job, "--spare-snapshots", PROGRAM, *words)


def check_done(process: subprocess.Popen) -> None:
    """What was loaded came from a replica where there was a sound one, and none stays behind."""
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    lines = [json.loads(line) for line in output.splitlines()]
    assert {line["what"]: line["sound"] for line in lines if line["what"] in SOUND} == SOUND
    assert "is corrupt at" in errors
    # One that is kept, and one that is being made or was freed and will be used again.
    assert all(line["segments"] <= 3 for line in lines)


def holders(home: Path) -> set[int]:
    """Processes of a home that still have memory of a head."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"REGROW_HOME={home}\0".encode() not in (entry / "environ").read_bytes():
                continue
            if "regrow-arena" in (entry / "maps").read_text():
                found.add(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.timeout(300)
def test_a_spare_has_the_latest_snapshot(regrow, pool, one_line) -> None:
    refused = regrow("run", "--spare-snapshots", PROGRAM, "1")
    assert "--spare-snapshots means nothing without --cluster" in one_line(refused, 2)
    pool(4)
    check_done(start(regrow, "1"))
    until(lambda: not holders(regrow.home), timeout_s=30)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_jobs_side_by_side_have_each_their_own(regrow, pool) -> None:
    pool(6)
    for process in [start(regrow, seed) for seed in ("2", "3")]:
        check_done(process)
    until(lambda: not holders(regrow.home), timeout_s=30)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("who", ["the head", "the job"])
def test_nothing_is_left_of_a_job_that_is_killed(regrow, pool, tmp_path, who: str) -> None:
    before = set(os.listdir("/dev/shm"))
    pool(3)
    told = tmp_path / "head"
    with start(regrow, "4", str(told)) as process:
        until(lambda: told.exists() and told.read_text(), timeout_s=120)
        assert len(holders(regrow.home)) >= 3
        status = regrow("status", "--cluster", "job-1").stdout
        assert "42 MB of snapshots kept for spares" in status
        assert regrow("suspend", "--cluster", "job-1", "--all").returncode == 0
        status = regrow("status", "--cluster", "job-1").stdout
        assert "0 of 2 slices up" in status
        assert ", 0 MB of snapshots kept for spares" in status
        assert regrow("resume", "--cluster", "job-1").returncode == 0
        os.kill(int(told.read_text()) if who == "the head" else process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
    until(lambda: not holders(regrow.home), timeout_s=60)
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "regrow" in name}
