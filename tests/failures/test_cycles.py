"""Slices that die and return over and over leave nothing behind in any process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from regrow import LocalCluster

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "programs" / "cycles.py"
CYCLES = int(os.environ.get("REGROW_TEST_CYCLES", "30"))
# Memory is not given back page by page; what leaked at each cycle would be more.
SLACK_MB, SLACK_MB_A_CYCLE = 40, 0.3
# But all that ended epochs held in the worker that lives through them is given back, and the head
# keeps no more than its records, which are limited.
SLACK_MB_OF = {"worker 0": 10, "head": 5}
# The client's jaxlib starts threads up to about 110, and keeps them.
SLACK = {"descriptors": 4, "segments": 1, "threads": 80, "ports": 1}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_losses_and_returns_leave_nothing_behind() -> None:
    with LocalCluster(slices=3, devices_per_slice=2) as cluster:
        done = subprocess.run(
            [sys.executable, str(PROGRAM), str(CYCLES)],
            env=os.environ | cluster.env | {"TF_CPP_MIN_LOG_LEVEL": "3"},
            stdout=subprocess.PIPE,
            text=True,
            timeout=800,
        )
    assert done.returncode == 0
    first, *_, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert last["compiled"] == first["compiled"]
    for role in ("client", "head", "worker 0", "rg-compiler", "regrow-template"):
        before, after = first[role], last[role]
        assert before["pid"] == after["pid"]
        for name, slack in SLACK.items():
            assert after[name] <= before[name] + slack, (role, name, before, after)
        grown_mb = after["anon_mb"] - before["anon_mb"]
        slack_mb = SLACK_MB_OF.get(role, SLACK_MB + SLACK_MB_A_CYCLE * CYCLES)
        assert grown_mb < slack_mb, (role, before, after)
