"""A TPU whose hosts join a Ray cluster, and jobs on them: everything real, on this machine."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cloud_server import LocalCloud
from rays import LONG, raylet_at, until

from regrow.cloud.bodies import NodeRequest
from regrow.cloud.client import CloudClient
from regrow.cloud.names import Place
from regrow.errors import CloudApiError, Code, RayError, RayJobError, WaitTimeout
from regrow.ray import (
    JoinPolicy,
    RankJob,
    RayCluster,
    RayTpuController,
    RestartPolicy,
    TpuController,
    TpuSpec,
)
from regrow.ray.head import RayHead

# The first test starts a head and two nodes, whose imports take long on a busy machine.
pytestmark = pytest.mark.timeout(600)
PLACE = Place("p", "us-central2-b")
V4_16 = NodeRequest(runtime_version="tpu-ubuntu2204-base", type="V4", topology="2x2x2")


class World:
    """One TPU, its controller, and what was told."""

    def __init__(self, head: RayHead, cloud: LocalCloud, logs: Path) -> None:
        server = cloud.directory.server()
        self.client = CloudClient(server.endpoint, token=cloud.directory.token())
        self.cluster = RayCluster(head.address)
        self.logs = logs
        self.told: list[str] = []
        self.lines: list[tuple[int, str]] = []
        self.controller = self.make("t")

    def make(
        self, name: str, place: Place = PLACE, node: NodeRequest = V4_16, **options: object
    ) -> RayTpuController:
        spec = TpuSpec(name=name, node=node)
        defaults: dict[str, object] = {"say": self.told.append, "log_dir": self.logs}
        return RayTpuController(
            self.client,
            place,
            spec,
            self.cluster,
            **(defaults | options),  # type: ignore[arg-type]
        )

    def run(self, name: str, script: str, **options: object) -> None:
        given = {
            key: str(options.pop(key)) for key in ("directory", "working_dir") if key in options
        }
        job = RankJob(name=name, command=["python3", "-u", "-c", script], **given)
        self.controller.run(
            job,
            tell=lambda rank, line: self.lines.append((rank, line)),
            ready_timeout_s=LONG,
            **options,  # type: ignore[arg-type]
        )

    def printed(self, text: str) -> list[int]:
        return sorted(rank for rank, line in self.lines if line == text)


@pytest.fixture(scope="module")
def world(
    head: RayHead, cloud: LocalCloud, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    world = World(head, cloud, tmp_path_factory.mktemp("logs"))
    world.controller.ensure_ready(timeout_s=LONG)
    yield world
    world.controller.delete()
    world.client.close()


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest) -> None:
    if "world" in request.fixturenames:
        world = request.getfixturevalue("world")
        world.told.clear()
        world.lines.clear()


SHOW = """
import os
from regrow.ray import current_attempt
attempt = current_attempt()
print(f"{attempt.rank} of {attempt.ranks}, {os.environ['JAX_NUM_CPU_DEVICES']} devices")
"""


def test_a_job_runs_once_on_every_host_and_its_logs_are_kept(world: World) -> None:
    world.run("show", SHOW)
    assert world.printed("0 of 2, 4 devices") == [0]
    assert world.printed("1 of 2, 4 devices") == [1]
    kept = list(world.logs.glob("show/attempt-1-*/rank-1.log"))
    assert len(kept) == 1
    assert "1 of 2, 4 devices" in kept[0].read_text()
    assert any(line.startswith("Queued 2 jobs") for line in world.told)
    for rank in (0, 1):
        state = re.compile(rf"\[ADMIN\]: regrow-show-[0-9a-f]{{6}}-{rank}: Status is ([A-Z]+)")
        states = [found[1] for line in world.told if (found := state.fullmatch(line))]
        assert states[-1] == "SUCCEEDED"
        assert len(states) == len(set(states)), "each change once"
    assert "Job status: 2 SUCCEEDED" in world.told
    hosts = world.controller.joined()
    assert [hosts[rank].address for rank in (0, 1)] == world.controller.tpu.addresses()


def test_each_host_unpacks_what_was_uploaded_in_a_place_of_its_own(
    world: World, tmp_path: Path
) -> None:
    (tmp_path / "program").write_text("print('hello')")
    script = "import os, time; time.sleep(2); print(os.getcwd()); exec(open('program').read())"
    world.run("apart", script, working_dir=tmp_path)
    assert world.printed("hello") == [0, 1], "nobody has replaced what a rank runs in"
    assert len({line for _, line in world.lines if "/working_dir_files/" in line}) == 2


def test_the_first_failure_ends_all_ranks_and_is_told_in_one_line(world: World) -> None:
    script = """
import os, time
if os.environ["REGROW_RANK"] == "1":
    raise ValueError("no such layer")
time.sleep(1000)
"""
    with pytest.raises(RayJobError) as error:
        world.run("fails", script)
    assert "failed, rank 1: ValueError: no such layer" in str(error.value)
    assert "\n" not in str(error.value)
    assert not [job for job in world.cluster.jobs() if job.runs]


def test_a_tpu_of_another_shape_is_neither_used_nor_made_anew(world: World) -> None:
    larger = world.make("t", node=replace(V4_16, topology="2x2x4"))
    with pytest.raises(RayError, match=r"TPU t is there already, .*\(2 hosts, not 4\)"):
        larger.ensure_ready(timeout_s=LONG)
    assert not larger.delete()
    assert len(world.controller.joined()) == 2


def test_a_zone_that_there_is_not_is_no_tpu_that_somebody_deletes(world: World) -> None:
    nowhere = world.make("t", Place("p", "us-nowhere1-a"))
    with pytest.raises(CloudApiError) as error:
        nowhere.ensure_ready(timeout_s=LONG)
    assert error.value.code is Code.NOT_FOUND
    assert world.told.count("TPU is not found, create tpu...") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("script", "status"), [("print(7 * 6)", 0), ("raise SystemExit(9)", 1)])
def test_the_command_tells_success_from_failure(
    world: World, head: RayHead, tmp_path: Path, script: str, status: int
) -> None:
    where = ["--project", "p", "--zone", "us-central2-b", "--endpoint", world.client.endpoint]
    words = ["ray", "job", "--tpu", "t", "--address", head.address, "--log-dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "regrow", *words, *where, "--", "python3", "-c", script],
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == status, done.stderr
    if status == 0:
        assert sorted(line for line in done.stdout.splitlines() if line.endswith(" 42")) == [
            "[rank 0] 42",
            "[rank 1] 42",
        ]
    else:
        assert "job t failed: failed, rank " in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_deadline_ends_the_ranks(world: World, tmp_path: Path) -> None:
    script = f"""
import os, time
open(r"{tmp_path}/" + os.environ["REGROW_RANK"], "w").write(str(os.getpid()))
time.sleep(1000)
"""
    with pytest.raises(WaitTimeout, match="job late to end"):
        world.run("late", script, restarts=RestartPolicy(deadline_s=40))
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert pids
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


TRAIN = """
import os, pathlib, time
from regrow.ray import current_attempt
attempt = current_attempt()
here = pathlib.Path(attempt.directory)
done = here / f"step-{attempt.rank}"
step = int(done.read_text()) if done.exists() else 0
print(f"begins at {step > 0}")
while step < STEPS:
    time.sleep(0.2)
    step += 1
    with attempt.writing():
        (here / "writes").open("a").write(f"{attempt.number} {attempt.rank} {step}\\n")
        # As a whole: its host may be gone at any moment.
        (here / f"draft-{attempt.rank}").write_text(str(step))
        (here / f"draft-{attempt.rank}").replace(done)
"""


class Trains:
    """A job that is tried again, on a thread of its own."""

    def __init__(self, world: World, name: str, directory: Path, steps: int) -> None:
        self.world, self.directory = world, directory
        self.error: BaseException | None = None
        self._arguments = (name, TRAIN.replace("STEPS", str(steps)))
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            restarts = RestartPolicy(preemptions=3)
            self.world.run(*self._arguments, restarts=restarts, directory=self.directory)
        except BaseException as error:
            self.error = error

    def writes(self) -> list[list[int]]:
        path = self.directory / "writes"
        text = path.read_text() if path.exists() else ""
        return [[int(word) for word in line.split()] for line in text.splitlines()]

    def is_under_way(self) -> bool:
        """Whether both ranks have written for a while."""
        ranks = [rank for _, rank, _ in self.writes()]
        return min(ranks.count(0), ranks.count(1)) > 4

    def end(self) -> None:
        self.thread.join(LONG)
        assert not self.thread.is_alive()
        assert self.error is None, self.error
        numbers = [number for number, _, _ in self.writes()]
        assert numbers == sorted(numbers), "nothing of an old attempt after the new one began"


def raylet_of(world: World, rank: int) -> int:
    return raylet_at(world.controller.joined()[rank].address)


@pytest.mark.slow
def test_a_raylet_is_killed_and_its_host_joins_again(world: World, tmp_path: Path) -> None:
    trains = Trains(world, "killed", tmp_path, 60)
    until(trains.is_under_way)
    os.kill(raylet_of(world, 1), signal.SIGKILL)
    trains.end()
    assert world.printed("begins at True") == [0, 1]
    assert any("Starting Ray again on 1 hosts" in line for line in world.told)


@pytest.mark.slow
def test_a_raylet_hangs_and_its_rank_is_fenced(world: World, tmp_path: Path) -> None:
    trains = Trains(world, "hung", tmp_path, 60)
    until(trains.is_under_way)
    pid = raylet_of(world, 0)
    os.kill(pid, signal.SIGSTOP)
    try:
        trains.end()
    finally:
        # Its host may have joined again, and ended it.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert {number for number, _, _ in trains.writes()} == {1, 2}


@pytest.mark.slow
def test_a_tpu_that_is_deleted_by_hand_is_made_again(world: World, tmp_path: Path) -> None:
    trains = Trains(world, "deleted", tmp_path, 60)
    until(trains.is_under_way)
    assert world.controller.tpu.delete()
    trains.end()
    assert "TPU is not found, create tpu..." in world.told
    assert world.printed("begins at True") == [0, 1]


@pytest.mark.slow
def test_a_startup_script_that_fails_is_told_in_its_own_words(world: World) -> None:
    controller = world.make(
        "broken",
        startup_script="echo 'Error: no such disk' >&2; exit 3",
        policy=JoinPolicy(join_s=60, recreations=1),
    )
    try:
        with pytest.raises(RayError, match=r"exit status 3: Error: no such disk \(tried 2 times"):
            controller.ensure_ready(timeout_s=LONG)
    finally:
        controller.delete()


@pytest.mark.slow
def test_one_tpu_by_itself(world: World, tmp_path: Path) -> None:
    spec = TpuSpec(name="plain", node=V4_16, slices=2)
    tpu = TpuController(world.client, PLACE, spec, say=world.told.append)
    assert not tpu.exists()
    assert tpu.state() == "ABSENT"
    assert tpu.maybe_create(timeout_s=LONG)
    try:
        assert not tpu.maybe_create()
        assert (tpu.state(), tpu.health()) == ("READY", "HEALTHY")
        assert len(set(tpu.addresses())) == 4
        lines: list[bytes] = []
        results = tpu.run("echo $TPU_WORKER_ID", lambda _, __, line: lines.append(line))
        assert [result.status for result in results] == [0] * 4
        assert sorted(lines) == [b"0\n", b"0\n", b"1\n", b"1\n"]
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "file").write_text("content")
        sent = tpu.copy_to([str(tmp_path / "data")], "there", lambda *_: None)
        assert [result.status for result in sent] == [0] * 4
        back = tpu.copy_from("there/file", str(tmp_path / "back"), lambda *_: None, worker=3)
        assert back.status == 0
        assert (tmp_path / "back").read_text() == "content"
    finally:
        assert tpu.delete()
    assert not tpu.exists()
    assert not tpu.delete()
