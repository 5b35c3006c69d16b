"""`jax.profiler` traces all hosts into one run, and a lost slice does not keep it from its end."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import regrow
from waiting import until

PROGRAM = Path(__file__).parent / "programs" / "profiling.py"
SOURCES = str(Path(regrow.__file__).parents[1])
SUFFIXES = (".trace.json.gz", ".xplane.pb")


def traces(directory: Path) -> dict[str, Path]:
    """The files of the only run, without that of the client."""
    [run] = (directory / "plugins" / "profile").iterdir()
    # It has the name of the machine, and is there in any case.
    assert len(list(run.glob("*.xplane.pb"))) > len(list(run.glob("slice*.xplane.pb")))
    assert not list(directory.glob(".regrow-*"))
    return {file.name: file for file in run.glob("slice*")}


def named(*slices: int) -> set[str]:
    return {f"slice{index}-host0{suffix}" for index in slices for suffix in SUFFIXES}


@pytest.mark.parametrize("how", ["plain", "pathwaysutils"])
def test_all_hosts_are_traced(tmp_path: Path, how: str) -> None:
    with (
        regrow.LocalCluster(slices=2, devices_per_slice=1) as cluster,
        subprocess.Popen(
            [sys.executable, "-u", str(PROGRAM), str(tmp_path), how],
            env=os.environ | {"PYTHONPATH": SOURCES} | cluster.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        while (line := process.stdout.readline().strip()) != "tracing":
            assert line or process.poll() is None, process.communicate()[1]
        cluster.kill(1)
        output, errors = process.communicate("go on\n", timeout=60)
        left = tmp_path / "left" / "plugins"
        until(lambda: len(list(left.rglob("slice0-host0.*"))) >= 2, "what the hosts have left")
    assert process.returncode == 0, errors
    assert output.split()[-1] == "done"
    found = traces(tmp_path / "all")
    assert set(found) == named(0, 1)
    for file in found.values():
        if file.suffix == ".gz":
            events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
            assert any(event.get("name") == "all-reduce" for event in events)
        else:
            assert b"traced_step" in file.read_bytes()
    assert set(traces(tmp_path / "lost")) == named(0)
    assert set(traces(tmp_path / "again")) == named(0)
    if how == "plain":
        assert set(traces(tmp_path / "perfetto")) == named(0, 1)
        assert list((tmp_path / "perfetto").rglob("perfetto_trace.json.gz"))
