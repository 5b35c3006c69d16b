"""SIGKILL and SIGSTOP of a raylet, of a job's driver, of the Ray head, in each phase of a job.

Everything is real: a Ray head, a TPU of the local Cloud TPU whose hosts have joined it, the command
`regrow ray job`. Whatever is done to it, the job computes what it computes without, no rank of an old
attempt writes after a new one began, and nothing is left behind.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cloud_server import LocalCloud
from faults import TPU, Job, World, signal_all
from rays import LONG, until

from regrow.processes import ProcessStat

pytestmark = pytest.mark.timeout(1500)

PHASES = ("joining", "queueing", "training", "checkpointing")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
TARGETS = ("raylet", "driver", "head")
Cell = tuple[str, signal.Signals, str]
CELLS: list[Cell] = list(itertools.product(TARGETS, SIGNALS, PHASES))
# The head's cells start another one, and what hits a joining host starts that anew: too long for every day.
STEADY = [
    cell for cell in CELLS if cell[0] == "driver" and cell[2] in ("training", "checkpointing")
]
DAILY = random.Random(os.environ.get("REGROW_FAULT_SEED", "6")).sample(STEADY, 1)
RETRIED = ("--autoresume", "--failures", "3", "--backoff", "0.1")


@pytest.fixture(scope="module")
def world(cloud: LocalCloud, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    pytest.importorskip("ray", reason="Ray is not installed: NOTHING of its tests runs")
    world = World(tmp_path_factory.mktemp("home"), cloud)
    yield world
    temp_dir = Path(world.head.temp_dir)
    world.end()
    assert not temp_dir.exists()


def parameters() -> list[object]:
    found: list[object] = []
    for cell in CELLS:
        target, signum, phase = cell
        marks = [] if cell in DAILY else [pytest.mark.slow]
        found.append(pytest.param(*cell, id=f"{target}-{signum.name}-{phase}", marks=marks))
    return found


@pytest.mark.parametrize(("target", "signum", "phase"), parameters())
def test_a_fault(
    world: World, tmp_path: Path, target: str, signum: signal.Signals, phase: str
) -> None:
    world.ready()
    job = Job(world, f"{target}-{signum.name}-{phase}".lower(), tmp_path, held_in(phase))
    try:
        in_phase = PHASE[phase](world, job)
        FAULT[target](world, job, signum, phase)
        in_phase()
        job.go_on()
        assert job.wait() == 0, job.said()
        job.check()
        assert job.said().splitlines()[-1] == f"regrow: Job {job.name}: all 2 ranks SUCCEEDED"
    finally:
        if job.process is not None and job.process.poll() is None:
            job.send(signal.SIGCONT)
            job.send(signal.SIGTERM)
            job.wait()
    job.check_nothing_left()


# --- phases: each returns what is to be done once the fault has hit ---


def held_in(phase: str) -> str:
    return "checkpointing" if phase == "checkpointing" else "training"


def joining(world: World, job: Job) -> Callable[[], None]:
    """A host has lost its raylet, and starts another."""
    lost = world.raylet(1)
    os.kill(lost, signal.SIGKILL)
    until(lambda: not world.controller.joined().get(1))
    job.start(*RETRIED)
    job.until_said("Starting Ray again on 1 hosts")
    job.until(lambda: set(world.raylets()) - {lost, world.raylet(0)})
    return lambda: None


def queueing(world: World, job: Job) -> Callable[[], None]:
    """One rank runs, the other one waits for what somebody else has."""
    cluster, blocker = world.controller.cluster, f"blocks-{job.name}"
    joined = world.controller.joined()
    mine = next(
        name for name in joined[1].resources if name.startswith(f"{TPU}_") and name.endswith("_1")
    )
    cluster.submit("sleep 1000", job_id=blocker, resources={mine: 1}, metadata={})
    until(lambda: _state(world, blocker) == "RUNNING")
    job.start(*RETRIED)
    job.until(lambda: job.holds(0) and "1 RUNNING" in job.said())

    def release() -> None:
        world.controller.cluster.connect()
        if _state(world, blocker) in ("RUNNING", "PENDING"):
            world.controller.cluster.stop(blocker)

    return release


def _state(world: World, job_id: str) -> str:
    found = [one for one in world.controller.cluster.jobs() if one.id == job_id]
    return found[0].view.state if found else "ABSENT"


def training(world: World, job: Job) -> Callable[[], None]:
    job.start(*RETRIED)
    job.until_held()
    return lambda: None


PHASE = {
    "joining": joining,
    "queueing": queueing,
    "training": training,
    # The program holds elsewhere: while it writes.
    "checkpointing": training,
}


# --- faults ---


def fault_of_raylet(world: World, job: Job, signum: signal.Signals, phase: str) -> None:
    os.kill(world.raylet(1), signum)
    if signum is signal.SIGSTOP and phase in ("training", "checkpointing"):
        # Held until it is noticed: what is left of an attempt takes as long as that.
        job.until_said(f"Attempt 1 of {job.name} is over")


def fault_of_driver(world: World, job: Job, signum: signal.Signals, phase: str) -> None:
    """Of the command while no rank is there, of Ray's supervisor, of the program, of who keeps it."""
    if phase == "joining":
        _fault_of_command(job, signum)
        return
    rank = 0 if phase == "queueing" else 1
    generations = {"training": 0, "checkpointing": 1, "queueing": 3}
    pid = job.program(rank)
    for _ in range(generations[phase]):
        stat = ProcessStat.of(pid)
        assert stat is not None
        pid = stat.parent
    os.kill(pid, signum)


def _fault_of_command(job: Job, signum: signal.Signals) -> None:
    job.send(signum)
    if signum is signal.SIGKILL:
        job.wait()
        job.start(*RETRIED)
    else:
        time.sleep(10)
        job.send(signal.SIGCONT)


def fault_of_head(world: World, job: Job, signum: signal.Signals, phase: str) -> None:
    """Until the command says so; then it is started again, as it says."""
    signal_all(world.head_pids(), signum)
    job.go_on()
    address = world.controller.cluster.address
    job.until(lambda: f"at {address}" in job.said() and "waiting for it" in job.said())
    if signum is signal.SIGSTOP:
        assert world.regrow("ray", "head", "down").returncode == 0
    world.head_up()


FAULT = {"raylet": fault_of_raylet, "driver": fault_of_driver, "head": fault_of_head}


# --- a job that has ended before anybody notices ---


@pytest.mark.slow
def test_a_job_that_ends_while_a_raylet_hangs_leaves_no_process(
    world: World, tmp_path: Path
) -> None:
    """Ray's supervisor says that the job has succeeded, and could not end without its raylet."""
    world.ready()
    job = Job(world, "ends", tmp_path, "ending")
    job.start()
    job.until_held()
    stopped = world.raylet(1)
    os.kill(stopped, signal.SIGSTOP)
    try:
        job.go_on()
        assert job.wait() == 0, job.said()
        job.check()
        job.check_no_process_left()
        stat = ProcessStat.of(stopped)
        assert stat is not None
        assert stat.state == "T"
    finally:
        # Hosts end a raylet that hangs when they are needed next.
        until(lambda: not world.controller.joined().get(1))
        world.ready()
    job.check_nothing_left()


# --- whoever does not try again is told why ---


def told(job: Job) -> str:
    return job.said().splitlines()[-1]


@pytest.mark.slow
def test_a_head_that_hangs_is_told_to_a_job_that_is_not_tried_again(
    world: World, tmp_path: Path
) -> None:
    world.ready()
    job = Job(world, "once", tmp_path, "training")
    job.start()
    job.until_held()
    stopped = world.head_pids()
    signal_all(stopped, signal.SIGSTOP)
    try:
        assert job.wait() == 3
        assert f"the Ray head at {world.head.address} does not answer" in told(job)
        assert "start it again" in told(job)
        # Though their program is held, and nobody can tell them.
        until(lambda: not job.processes())
    finally:
        signal_all(stopped, signal.SIGCONT)
    world.ready()
    job.check_nothing_left()


@pytest.mark.slow
def test_a_runtime_environment_that_cannot_be_made(world: World, tmp_path: Path) -> None:
    world.ready()
    job = Job(world, "unresolved", tmp_path, "training")
    # Of one host: two on one machine would make their environments in one place.
    single = ("--tpu", "single", "--topology", "2x2x1", "--delete")
    job.start("--pip", f"nothing @ file://{tmp_path}/no-such-1-py3-none-any.whl", *single, *RETRIED)
    assert job.wait() == 1
    line = next(one for one in job.said().splitlines() if "job unresolved failed" in one)
    assert "failed: setup, rank 0: " in line
    assert "No such file" in line
    assert line.endswith("; its runtime environment cannot be made")
    job.check_nothing_left()


def test_no_ray_head(cloud: LocalCloud, tmp_path: Path) -> None:
    endpoint = cloud.directory.server().endpoint
    where = ["--project", "p", "--zone", "us-central2-b", "--endpoint", endpoint]
    words = ["ray", "job", "--address", "127.0.0.1:1", *where, "--", "true"]
    done = subprocess.run(
        [sys.executable, "-m", "regrow", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == 3
    assert done.stderr == (
        "regrow: no Ray head answers at 127.0.0.1:1 (Connection refused): "
        "start one with: regrow ray head up\n"
    )
