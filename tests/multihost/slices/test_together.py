"""JAX on the hosts of local slices, as processes: all devices, data, traces, and hosts that fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest
from local_slices import LocalSlices

BATCH = 96


@pytest.fixture(scope="module")
def two(slices: LocalSlices) -> str:
    """Two slices of two hosts with four devices each."""
    slices.create("two", 2, "v4-16")
    return "two"


def told(out: Path) -> list[Any]:
    paths = sorted(out.glob("process-*.json"), key=lambda path: int(path.stem.split("-")[1]))
    return [json.loads(path.read_text()) for path in paths]


def digests(position: int, number: int) -> list[str]:
    import hashlib

    data = grain.MapDataset.source(np.arange(10_000)).seed(2).shuffle()
    parts = [
        np.array([data[index] for index in range(begin, begin + BATCH)])
        for begin in range(position, position + number * BATCH, BATCH)
    ]
    # JAX has 32 bits where NumPy has 64.
    return [hashlib.sha256(part.astype(np.int32).tobytes()).hexdigest() for part in parts]


def test_all_hosts_are_one_program(slices: LocalSlices, two: str, tmp_path: Path) -> None:
    done = slices.run(two, "together.py", str(tmp_path), "0")
    assert done.returncode == 0, done.stdout + done.stderr
    all_told = told(tmp_path)
    assert [one["own"] for one in all_told] == [[0], [0], [1], [1]]
    for one in all_told:
        assert one["devices"] == 16
        assert one["slices"] == [0, 1]
        assert one["mesh"] == [[0] * 8, [1] * 8]
        # The batches of one process that reads it all.
        assert one["digests"] == digests(0, 4)
    (run,) = (tmp_path / "traces" / "plugins" / "profile").iterdir()
    assert sorted(path.name for path in run.iterdir()) == [
        f"process-{process}-slice-{process // 2}.xplane.pb" for process in range(4)
    ]
    assert all(path.stat().st_size > 1000 for path in run.iterdir())


def statuses(errors: str, name: str) -> list[int]:
    """The exit statuses in the table of `ssh`."""
    lines = [line.split() for line in errors.splitlines()]
    return [int(line[4]) for line in lines if len(line) == 6 and line[2].startswith(f"{name}-")]


def others_end(slices: LocalSlices, name: str, way: str) -> tuple[list[int], str]:
    """Runs the steps until process 1 fails; the others have to end by themselves."""
    limit = "timeout -s KILL 150 " if way == "hang" else ""
    done = slices.run(name, "failing.py", way, python=f"{limit}{sys.executable}")
    found = statuses(done.stderr, name)
    assert 0 not in found, done.stdout + done.stderr
    assert "now" in done.stdout
    return found, done.stderr


def test_an_error_on_one_host_ends_all(slices: LocalSlices, two: str) -> None:
    found, errors = others_end(slices, two, "raise")
    assert found[1] == 1
    assert len(found) == 4
    assert "[slice 0 worker 1] ValueError: the batch is empty" in errors
    assert "this process ends without waiting for the other hosts" in errors


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("way", "status", "words"),
    [
        ("kill", 137, ""),
        ("stuck", 124, "step 3 has not ended within 3 s; this process ends"),
        # The stopped process itself is ended by timeout(1); the others do not wait for that.
        ("hang", 137, ""),
    ],
)
def test_whatever_fails_on_one_host_ends_all(
    slices: LocalSlices, two: str, way: str, status: int, words: str
) -> None:
    found, errors = others_end(slices, two, way)
    assert found[1] == status
    assert 137 not in found[:1] + found[2:]
    assert words in errors


@pytest.mark.slow
def test_four_slices_of_v4_16_have_32_devices(
    slices: LocalSlices, two: str, tmp_path: Path
) -> None:
    """The page's own number; and other hosts go on with the data where the first ones stopped."""
    slices.delete(two)
    slices.create("four", 4, "v4-16")
    done = slices.run("four", "together.py", str(tmp_path), str(4 * BATCH))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [one["devices"] for one in told(tmp_path)] == [32] * 8
    assert {tuple(one["digests"]) for one in told(tmp_path)} == {tuple(digests(4 * BATCH, 4))}
