"""Several jobs on one shared cluster, with real processes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from regrow.cli import main, manager_requests
from regrow.control import request
from regrow.errors import ControlError, NoClusterError
from regrow.home import ClusterState, Home
from regrow.processes import children_of

PROGRAM = str(Path(__file__).parent / "programs" / "shared_job.py")
CHURN_S = float(os.environ.get("REGROW_TEST_CHURN_S", "300"))
PRIORITIES = """
kind: PriorityClass
metadata: {name: high}
value: 2000
---
kind: PriorityClass
metadata: {name: low}
value: 10
"""


class Job:
    """`regrow run --cluster pool` with the program that bears losses."""

    def __init__(
        self, regrow, folder: Path, name: str, *options: str, words: Sequence[str] = ()
    ) -> None:
        self.name = name
        self.log, self.end_file = folder / f"{name}.log", folder / f"{name}.end"
        self.output = folder / f"{name}.out"
        with self.output.open("w") as output:
            self.process = regrow.start(
                *("run", "--cluster", "pool", "--name", name, *options),
                *(PROGRAM, str(self.log), str(self.end_file), *words),
                stdout=output,
                stderr=output,
            )

    def steps(self) -> list[dict[str, Any]]:
        if not self.log.exists():
            return []
        lines = self.log.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def steps_on(self, slices: list[int], since: float) -> bool:
        """Whether it made a step on these slices after that time."""
        return any(one["at"] > since and one["slices"] == slices for one in self.steps())

    def end(self, timeout_s: float = 60) -> str:
        """Lets it end; returns what it has printed."""
        self.end_file.touch()
        status = self.process.wait(timeout_s)
        assert status == 0, self.output.read_text()
        return self.output.read_text()


class Pool:
    """A shared cluster and its jobs."""

    def __init__(self, regrow, folder: Path, slices: int, *options: str) -> None:
        self.regrow = regrow
        self.folder = folder
        self.jobs: list[Job] = []
        self.look: Callable[[], None] = lambda: None
        (folder / "priorities.yaml").write_text(PRIORITIES)
        up = regrow(
            *("up", "--detach", "--name", "pool", "--slices", str(slices)),
            *("--devices-per-slice", "1", "--priorities", str(folder / "priorities.yaml")),
            *options,
        )
        assert up.returncode == 0, up.stderr
        self.state: ClusterState = Home(regrow.home).find("pool")

    def job(self, name: str, *options: str, words: Sequence[str] = ()) -> Job:
        self.jobs.append(Job(self.regrow, self.folder, name, *options, words=words))
        return self.jobs[-1]

    def status(self) -> dict[str, Any]:
        """What the manager says; waits for the next one if it has just died."""
        deadline = time.monotonic() + 30
        while True:
            try:
                return request(self.state.control_socket, "status")
            except (ControlError, NoClusterError):
                assert time.monotonic() < deadline, "no manager answers"
                time.sleep(0.02)

    def told(self, name: str) -> dict[str, Any]:
        """What the manager knows of a job; empty if it knows none of that name."""
        return next((job for job in self.status()["jobs"] if job["name"] == name), {})

    def leases(self, name: str) -> list[int]:
        return [index for _, index, _ in self.told(name).get("leases", [])]

    def kill_slice(self, index: int) -> None:
        request(self.state.slices_socket, "kill", index=index)

    def kill_process(self, module: str) -> None:
        """Kills the manager or the machines; returns when there is another one."""
        self.until(lambda: self.processes(module))
        (pid,) = self.processes(module)
        os.kill(pid, signal.SIGKILL)
        self.until(lambda: self.processes(module) - {pid})

    def processes(self, module: str) -> set[int]:
        found = set()
        for pid in children_of(self.state.supervisor.pid):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                found |= {pid} if module in words else set()
        return found

    def until(self, condition: Callable[[], object], timeout_s: float = 120) -> None:
        """Waits for something, and looks at what must hold meanwhile."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.look()
            told = [job.output.read_text() for job in self.jobs]
            assert time.monotonic() < deadline, (self.status(), told)
            time.sleep(0.02)

    def goes_on(self, job: Job, slices: list[int], timeout_s: float = 120) -> None:
        """Returns when a job has made a step on these slices from now on."""
        since = time.time()
        self.until(lambda: job.steps_on(slices, since), timeout_s)

    def close(self) -> None:
        for job in self.jobs:
            job.process.kill()
            job.process.wait()


@pytest.fixture
def pools(regrow, tmp_path) -> Iterator[Callable[..., Pool]]:
    made: list[Pool] = []

    def make(slices: int, *options: str) -> Pool:
        made.append(Pool(regrow, tmp_path, slices, *options))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


@pytest.mark.timeout(300)
def test_the_life_of_a_shared_cluster(regrow, pools, one_line) -> None:
    pool = pools(3, "--spares", "1")
    for words, status, text in (
        (("--slices", "9"), 2, "the job wants 9 slices; the cluster has 3 slices of 1 device"),
        (("--slices", "3"), 2, "needs 3 slices; the cluster has 3 slices of 1 device, and keeps 1"),
        (("--priority", "urgent"), 2, "no priority class 'urgent'; the cluster has: high, low"),
        (("--devices-per-slice", "4"), 2, "the cluster has no slices of 4 devices"),
        (("--gcs_scratch_location", "nosuch://x"), 2, "no storage that is known"),
    ):
        failed = regrow("run", "--cluster", "pool", *words, PROGRAM)
        assert text in one_line(failed, status)
    job = pool.job("train", "--slices", "2", "--priority", "high", "--num_elastic_instances", "2")
    pool.until(lambda: job.steps_on([0, 1], 0))
    second = regrow("run", "--cluster", "pool", "--name", "train", PROGRAM)
    assert "there is a job 'train' already; give this one another" in one_line(second, 2)
    first = pool.leases("train")
    spare = ({0, 1, 2} - set(first)).pop()

    # A spare takes the place of a slice that is killed.
    pool.kill_slice(first[0])
    pool.until(lambda: pool.leases("train") == [spare, first[1]])
    pool.goes_on(job, [0, 1])

    # A manager that is killed is followed by one that knows as much, and so is the job's own word.
    before = pool.told("train")["leases"]
    pool.kill_process("regrow.jobs")
    assert pool.told("train")["leases"] == before
    pool.kill_slice(first[1])
    pool.until(lambda: pool.leases("train") == [spare, first[0]])
    pool.goes_on(job, [0, 1])

    table = regrow("status", "--cluster", "pool").stdout
    assert "pool: shared, 3 slices (1 idle, 2 leased), 1 spare kept, 1 job" in table
    assert f"slice {spare} takes the place of the one that failed" in " ".join(table.split())
    status = json.loads(regrow("status", "--cluster", "pool", "--json").stdout)
    assert status["jobs"][0]["priority_class"] == "high"
    assert any(one["text"] == "the manager was started again" for one in status["changes"])
    assert "clients connect to jobs" in one_line(regrow("env", "--cluster", "pool"), 3)

    # With the machines all processes of slices end; the job gets slices when they are back.
    since = time.time()
    pool.kill_process("regrow.jobs.machines")
    pool.until(lambda: job.steps_on([0, 1], since + 0.5))

    # It is suspended and resumed as a whole, by the manager: its slices are free meanwhile.
    assert "there is: train" in one_line(regrow("suspend", "--cluster", "pool", "--all"), 2)
    part = regrow("suspend", "--cluster", "train", "--slice", "0")
    assert "all of it is suspended" in one_line(part, 2)
    assert "is not suspended" in one_line(regrow("resume", "--cluster", "train"), 3)
    other = regrow("resume", "--cluster", "train", "--hosts-per-slice", "1")
    assert "have the hosts that they are leased with" in one_line(other, 2)
    suspended = regrow("suspend", "--cluster", "train", "--all")
    assert "job train suspended after" in one_line(suspended, 0)
    assert pool.leases("train") == []
    doctor = regrow("doctor", "--no-probe", "--cluster", "pool").stdout
    assert "cluster pool is shared: all 3 slices are up" in doctor
    assert "job train resumed in" in one_line(regrow("resume", "--cluster", "train"), 0)
    pool.goes_on(job, [0, 1])
    output = job.end()
    assert "2 slices of 1 device up in" in output
    pool.until(lambda: not pool.status()["jobs"])
    down = regrow("down", "--cluster", "pool")
    assert down.returncode == 0, down.stderr


def test_what_a_shared_cluster_cannot_be(regrow, one_line, tmp_path) -> None:
    detached = regrow("up", "--detach", "--slices", "4", "--spares", "4")
    assert "4 cannot be spares" in one_line(detached, 2)
    missing = str(tmp_path / "none.yaml")
    assert "No such file" in one_line(regrow("up", "--priorities", missing), 2)
    assert "takes no --port" in one_line(regrow("up", "--spares", "0", "--port", "0"), 2)
    assert "without --cluster" in one_line(regrow("run", "--priority", "high", PROGRAM), 2)
    unknown = regrow("run", "--cluster", "nowhere", PROGRAM)
    assert "no cluster named 'nowhere' runs" in one_line(unknown, 3)
    unknown = regrow("run", "--cluster", str(tmp_path / "jobs.sock"), PROGRAM)
    assert "no shared cluster answers at" in one_line(unknown, 3)


def test_commands_wait_for_a_manager_that_is_being_started_again(
    regrow, pools, one_line, monkeypatch, capfd
) -> None:
    pool = pools(1)
    supervisor = pool.state.supervisor.pid
    os.kill(supervisor, signal.SIGSTOP)
    try:
        (manager,) = pool.processes("regrow.jobs")
        os.kill(manager, signal.SIGKILL)
        pool.until(lambda: not answers(pool.state.control_socket))
        monkeypatch.setenv("REGROW_HOME", str(regrow.home))
        monkeypatch.setattr(manager_requests, "PATIENCE_S", 0.2)
        assert main(["status"]) == 0
        line = capfd.readouterr().out
        assert line.startswith("pool: no resource manager answers at ")
        assert line.endswith("; waited 0.2 s for it to be started again\n")
        status, resume = regrow.start("status"), regrow.start("resume", "--cluster", "nobody")
        with pytest.raises(subprocess.TimeoutExpired):
            status.communicate(timeout=2)
    finally:
        os.kill(supervisor, signal.SIGCONT)
    output, errors = status.communicate(timeout=60)
    assert output.startswith("pool: shared, 1 slice ("), errors
    _, errors = resume.communicate(timeout=60)
    assert "no cluster named 'nobody' runs" in errors
    pool.kill_process("regrow.jobs")
    assert "pool is down" in one_line(regrow("down"), 0)


def answers(path: str) -> bool:
    with contextlib.suppress(ControlError, NoClusterError):
        request(path, "status")
        return True
    return False


def test_a_manager_may_be_killed_often_but_not_end_often(regrow, pools, tmp_path) -> None:
    pool = pools(1, "--log-dir", str(tmp_path / "logs"))
    for _ in range(6):
        pool.kill_process("regrow.jobs")
    pool.until(lambda: [one["state"] for one in pool.status()["slices"]] == ["idle"])
    log = tmp_path / "logs" / "supervisor.log"
    deadline = time.monotonic() + 120
    # Where the machine is so slow that it lives for ten seconds, it takes longer.
    while "regrow: the manager ended (SIGABRT (signal 6))\n" not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        for pid in pool.processes("regrow.jobs"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
        time.sleep(0.05)
    regrow.nothing_left()


@pytest.mark.slow
def test_a_job_that_is_preempted_is_suspended_and_goes_on(pools) -> None:
    pool = pools(2)
    # It is neither elastic nor to be restarted: only a suspension lets it go on.
    low = pool.job("low", "--slices", "2", "--priority", "low")
    pool.until(lambda: low.steps_on([0, 1], 0))
    high = pool.job("high", "--slices", "2", "--priority", "high")
    pool.until(lambda: high.steps_on([0, 1], 0))
    assert pool.told("low")["phase"] == "suspended"
    steps = len(low.steps())
    # It stays so over the death of the manager.
    pool.kill_process("regrow.jobs")
    pool.until(lambda: pool.told("low").get("phase") == "suspended")
    assert len(low.steps()) == steps
    high.end()
    pool.goes_on(low, [0, 1])
    assert "resumed" in low.end()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_elastic_job_gives_a_slice_to_a_higher_one_and_gets_it_back(pools) -> None:
    pool = pools(2)
    options = ("--slices", "2", "--priority", "low", "--num_elastic_instances", "1")
    # Where it could be suspended, it would be.
    low = pool.job("low", *options, words=("stateful",))
    pool.until(lambda: low.steps_on([0, 1], 0))
    high = pool.job("high", "--slices", "1", "--priority", "high")
    pool.until(lambda: high.steps_on([0], 0))
    (taken,) = pool.leases("high")
    (kept,) = pool.leases("low")
    assert {taken, kept} == {0, 1}
    pool.until(lambda: len(low.steps()[-1]["slices"]) == 1)
    rank = low.steps()[-1]["slices"]
    # What both believe outlives the manager.
    pool.kill_process("regrow.jobs")
    pool.goes_on(low, rank)
    pool.goes_on(high, [0])
    assert pool.leases("low") == [kept]
    high.end()
    pool.goes_on(low, [0, 1])
    assert sorted(pool.leases("low")) == [0, 1]
    assert pool.told("low")["restarts"] == 0
    texts = [one["text"] for one in pool.status()["changes"] if one["job"] == "low"]
    for text in ("it cannot be suspended: ", "is asked back: job high", "job low gave it back"):
        assert any(text in told for told in texts), texts
    low.end()


@pytest.mark.slow
def test_a_head_that_is_killed_while_suspended_ends_its_attempt(regrow, pools, one_line) -> None:
    pool = pools(1)

    def suspended(name: str, *options: str) -> Job:
        job = pool.job(name, "--slices", "1", *options)
        pool.until(lambda: job.steps_on([0], 0))
        assert regrow("suspend", "--cluster", name, "--all").returncode == 0
        head = Home(regrow.home).find(name).head
        assert head is not None
        os.kill(head.pid, signal.SIGKILL)
        return job

    once = suspended("once")
    assert once.process.wait(60) == 3
    pool.until(lambda: not pool.status()["jobs"])
    again = suspended("again", "--restart", "on-failure")
    pool.until(lambda: pool.told("again")["phase"] == "queued")
    # An operator wants it to wait, also for its second life.
    assert pool.leases("again") == []
    assert "resumed in" in one_line(regrow("resume", "--cluster", "again"), 0)
    pool.goes_on(again, [0])
    # Whoever ends the command wants no restart.
    again.process.terminate()
    assert again.process.wait(60) == 143
    pool.until(lambda: not pool.status()["jobs"])


class Invariants:
    """Looks at a shared cluster again and again, and notes what must not be."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.looks = 0
        self.changes: list[str] = []
        self._seen_at = 0.0

    def look(self) -> None:
        before = self.pool.status()
        try:
            places = request(self.pool.state.slices_socket, "status")["slices"]
        except (ControlError, NoClusterError):
            places = []
        after = self.pool.status()
        self._check_processes(before, places, after)
        self._check_order(after)
        fresh = [one for one in after["changes"] if one["at"] > self._seen_at]
        self._seen_at = max([self._seen_at, *(one["at"] for one in fresh)])
        self.changes += [one["text"] for one in fresh]
        self.looks += 1

    @staticmethod
    def _check_processes(before, places, after) -> None:
        """No slice is one job's while a process of another, or of an older lease, is on it."""
        for one, place, later in zip(before["slices"], places, after["slices"], strict=False):
            steady = one["incarnation"] == later["incarnation"] and one["state"] == later["state"]
            if steady and one["state"] == "idle":
                assert not place["running"], (one, place)
            elif steady and one["state"] == "leased":
                assert set(place["running"]) <= {one["incarnation"]}, (one, place)

    @staticmethod
    def _check_order(status) -> None:
        """No job waits while those of lower priority hold what it needs, or nobody does."""
        slices = status["slices"]
        free = sum(
            one["state"] in ("idle", "asked", "fencing") and one["reserved_for"] is None
            for one in slices
        )
        running = {job["name"]: job for job in status["jobs"] if job["phase"] == "running"}
        held = Counter(one["job"] for one in slices if one["state"] == "leased")
        for job in status["jobs"]:
            coming = sum(one["reserved_for"] == job["name"] for one in slices)
            if job["phase"] not in ("queued", "running"):
                continue
            if job["wanted"] <= held[job["name"]] + coming:
                continue
            required = max(1, job["least"] - held[job["name"]])
            below = sum(
                held[name] for name, other in running.items() if other["priority"] < job["priority"]
            )
            if below:
                got = max(0, free - status["spares"]) + below
                assert got < required, f"{job['name']}: {json.dumps(status)}"


@pytest.mark.slow
@pytest.mark.timeout(CHURN_S + 480)
def test_two_jobs_one_spare_and_slices_that_fail(pools) -> None:
    pool = pools(5, "--spares", "1", "--grace", "10")
    dice = random.Random(int(os.environ.get("REGROW_TEST_SEED", "11")))
    again = ("--restart", "on-failure", "--max-restarts", "1000")
    jobs = [
        pool.job("high", "--slices", "2", "--priority", "high", *again),
        pool.job("low", "--slices", "2", "--priority", "low", *again),
    ]
    pool.until(lambda: all(job.steps_on([0, 1], 0) for job in jobs))
    invariants = Invariants(pool)
    pool.look = invariants.look
    ends = time.monotonic() + CHURN_S
    guest: Job | None = None
    guests = managers = 0
    while time.monotonic() < ends:
        for _ in range(dice.randint(1, 20)):
            invariants.look()
            time.sleep(0.05)
        lot = dice.random()
        if lot < 0.6:
            fault(pool, "kill", dice.randrange(5))
        elif lot < 0.75:
            fault(pool, "stop", dice.randrange(5))
        elif lot < 0.85:
            managers += 1
            pool.kill_process("regrow.jobs")
        elif guest is None:
            # One that takes what the lower job has, and goes again.
            guests += 1
            guest = pool.job(f"guest-{guests}", "--slices", "2", "--priority", "high", *again)
        elif guest.steps():
            guest.end()
            guest = None
    if guest is not None:
        pool.until(guest.steps)
        guest.end()
    assert managers
    assert guests
    for job in jobs:
        pool.until(lambda job=job: len(pool.leases(job.name)) == 2)
        pool.goes_on(job, [0, 1])
    invariants.look()
    assert invariants.looks > CHURN_S / 3
    texts = " ".join(invariants.changes)
    assert "takes the place of the one that failed" in texts
    assert "job guest-1 (priority 2000) needs" in texts
    for job in jobs:
        job.end()


def fault(pool: Pool, method: str, index: int) -> None:
    """Kills or stops what is on a slice, if anything is."""
    with contextlib.suppress(ControlError, NoClusterError):
        request(pool.state.slices_socket, method, index=index)
