"""Faults at named points of a suspension and of a resumption: the old state or the new, never a mixture.

`make test` draws a few cells (REGROW_TEST_SEED chooses others), `make test-all` takes all of them.
"""

from __future__ import annotations

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from suspend_rig import STEPS, Rig, outcome

from regrow.suspend import Manifest, Snapshots, open_storage
from regrow.suspend.export import export, verify
from regrow.suspend.sweep import PART_SUFFIX
from waiting import until

SAVE_POINTS = (
    "worker-drain",
    "worker-save-begins",
    "worker-chunk-hashed",
    "aside",
    "worker-chunk-written",
    "worker-chunks-synced",
    "worker-saved",
)
LOAD_POINTS = ("worker-load-begins", "worker-chunk-read", "worker-loaded", "worker-placed")
OLD_HEAD = ("head-gate-closed", "head-drained", "head-saves-in", "head-manifest-made", "aside")
NEW_HEAD = ("head-committed", "head-left", "head-swept")
RESUME_HEAD = ("head-resume-asked", "head-slice-up", "head-loads-in", "head-resumed")
MANY = frozenset({"worker-chunk-hashed", "aside", "worker-chunk-written", "worker-chunk-read"})

# (when, point, action): what happens where while a slice is suspended or resumed.
SHARED = (
    [("suspend", point, "kill") for point in SAVE_POINTS]
    + [("suspend", point, "fail") for point in SAVE_POINTS[1:]]
    + [("suspend", point, "stop") for point in ("worker-chunk-written", "worker-saved")]
    + [("suspend", "worker-leaves", "kill"), ("suspend", "worker-leaves", "stop")]
    + [("head", point, "fail") for point in ("head-drained", "aside", "head-committed")]
    + [("resume", point, "kill") for point in LOAD_POINTS]
    + [("resume", point, "fail") for point in LOAD_POINTS]
    + [("resume", "worker-loaded", "stop")]
)
OF_HEAD = (
    [("suspend", point) for point in OLD_HEAD + NEW_HEAD]
    + [("resume", point) for point in RESUME_HEAD]
)  # fmt: skip
_DRAW = random.Random(int(os.environ.get("REGROW_TEST_SEED", "1")))
_SAMPLE = set(_DRAW.sample(range(len(SHARED)), 2))


def cells(every: list[Any], sample: set[int]) -> list[Any]:
    marks = [[] if number in sample else [pytest.mark.slow] for number in range(len(every))]
    return [
        pytest.param(*cell, id="-".join(cell), marks=mark)
        for cell, mark in zip(every, marks, strict=True)
    ]


def latest(url: str) -> Manifest:
    """The latest snapshot, every chunk of which is as it was written."""
    store = Snapshots(open_storage(url))
    manifest = store.read()
    verify(store, manifest)
    return manifest


@pytest.mark.parametrize(("when", "point", "action"), cells(SHARED, _SAMPLE))
def test_one_fault(
    rig: Rig, expected: list[dict[str, str]], when: str, point: str, action: str
) -> None:
    rig.client.do("begin")
    rig.client.do("steps", count=STEPS)
    before = rig.cluster.suspend()["snapshot"]
    rig.cluster.resume()
    rig.client.do("steps", count=STEPS)
    nth = _DRAW.randint(1, 3) if point in MANY and when != "head" else 1
    trap = f"{point}={action}={nth}"
    if when == "resume":
        rig.cluster.suspend()
        rig.trap(1, trap)
        _resume_under(rig, action)
        whole = True
    else:
        rig.trap(-1 if when == "head" else 1, trap)
        whole = _suspend_under(rig, before, point, action)
    assert rig.states() == ["up", "up"]
    if whole:
        assert rig.client.do("digest") == expected[1]
        rig.client.do("steps", count=STEPS)
        assert rig.client.do("digest") == expected[2]


def _suspend_under(rig: Rig, before: int, point: str, action: str) -> bool:
    """Suspends slice 1; whether its state must be whole afterwards."""
    error = outcome(lambda: rig.cluster.suspend([1]))
    snapshot = latest(rig.place()).number
    if point == "worker-leaves":
        assert error is None
        assert snapshot == before + 1
        rig.cluster.resume()
        return True
    assert error is not None
    if action == "fail":
        assert rig.states() == ["up", "up"]
        if point == "head-committed":
            assert snapshot == before + 1
            told = f"; snapshot {snapshot} at {rig.place()} was committed before that"
            assert error.startswith("slice 1 not suspended: ")
            assert told in error
        else:
            assert snapshot == before
            assert error.startswith("slice 1 not suspended, everything is as it was: ")
        return True
    assert error.startswith("slice 1 not suspended: ")
    assert error.endswith(f"; snapshot {before} is still the latest")
    assert snapshot == before
    assert rig.states() == ["up", "lost"]
    assert "slice 1 was lost" in rig.client.failure("digest")
    rig.cluster.restore(1)
    rig.cluster.wait_healthy()
    return False


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("commits", [True, False])
def test_a_slice_that_is_lost_while_its_snapshot_is_committed(
    rig: Rig, expected: list[dict[str, str]], signum: signal.Signals, *, commits: bool
) -> None:
    """What it held is saved: it is suspended if that is committed, and else it is lost."""
    rig.client.do("begin")
    rig.client.do("steps", count=STEPS)
    before = rig.cluster.suspend()["snapshot"]
    rig.cluster.resume()
    error = _lose_while_it_is_committed(rig, signum, commits=commits)
    if commits:
        assert error is None
        assert rig.states() == ["up", "suspended"]
        assert latest(rig.place()).number == before + 1
        rig.cluster.resume()
        assert rig.client.do("digest") == expected[0]
        return
    assert str(error).startswith("slice 1 not suspended: ")
    assert str(error).endswith(f"; snapshot {before} is still the latest")
    assert rig.states() == ["up", "lost"]
    assert "slice 1 was lost" in rig.client.failure("digest")
    rig.cluster.restore(1)
    rig.cluster.wait_healthy()


def _lose_while_it_is_committed(rig: Rig, signum: signal.Signals, *, commits: bool) -> str | None:
    rig.trap(-1, "aside=wait")
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(outcome, lambda: rig.cluster.suspend([1]))
        manifests = Path(rig.place(), "manifests")
        until(lambda: any(manifests.glob(f"*{PART_SUFFIX}")))
        os.kill(rig.cluster.slices[1].pids[0], signum)
        if not commits:
            (aside,) = manifests.glob(f"*{PART_SUFFIX}")
            aside.unlink()
        return told.result()


@pytest.mark.slow
def test_a_slice_that_is_lost_when_it_has_saved_and_others_have_not(
    rig: Rig, expected: list[dict[str, str]]
) -> None:
    rig.client.do("begin")
    rig.client.do("steps", count=STEPS)
    rig.trap(0, "worker-saved=wait")
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(outcome, rig.cluster.suspend)
        until(lambda: rig.cluster.slices[1].story[-1].endswith("its state is saved"))
        os.kill(rig.cluster.slices[1].pids[0], signal.SIGKILL)
        assert told.result() is None
    assert rig.states() == ["suspended", "suspended"]
    rig.cluster.resume()
    assert rig.client.do("digest") == expected[0]


def _resume_under(rig: Rig, action: str) -> None:
    """Resumes both slices."""
    error = outcome(rig.cluster.resume)
    if action == "fail":
        assert error is not None
        assert "slice 1 stays suspended, nothing is lost: " in error
        until(lambda: rig.states() == ["up", "suspended"])
        rig.cluster.resume()
    else:
        assert error is None


@pytest.mark.parametrize(("when", "point"), cells(OF_HEAD, set()))
def test_the_head_is_killed(tmp_path: Path, when: str, point: str) -> None:
    with Rig(tmp_path) as rig:
        url = rig.place()
        rig.client.do("steps", count=STEPS)
        rig.cluster.suspend()
        rig.cluster.resume()
        rig.client.do("steps", count=STEPS)
        if when == "resume":
            rig.cluster.suspend()
        rig.trap(-1, f"{point}=kill")
        error = outcome(rig.cluster.suspend if when == "suspend" else rig.cluster.resume)
        assert error is not None
        new = when == "resume" or point in NEW_HEAD
        manifest = latest(url)
        assert manifest.number == (2 if new else 1)
    export(Snapshots(open_storage(url)), manifest, tmp_path / "out")
    steps = {
        int(np.load(path))
        for path in (tmp_path / "out").glob("*.npy")
        if np.load(path, mmap_mode="r").shape == ()
    }
    assert 2 * STEPS in steps if new else STEPS in steps
    assert (STEPS in steps) is not new
