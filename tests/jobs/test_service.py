"""The resource manager as a process: its socket, its state on disk, its deaths."""

from __future__ import annotations

import functools
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jobs_process import FakeHosts, FakeJob, Peer, Process, works

from regrow.errors import ClusterError, UsageError
from waiting import until

PRIORITIES = """
kind: PriorityClass
metadata: {name: high}
value: 2000
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts managers on one directory."""
    (tmp_path / "priorities.yaml").write_text(PRIORITIES)
    started: list[Process] = []

    def begin(*options: str) -> Process:
        priorities = ("--priorities", str(tmp_path / "priorities.yaml"))
        started.append(Process(tmp_path / "jobs", *priorities, *options))
        return started[-1]

    yield begin
    for process in started:
        process.end()


def test_two_jobs_one_spare(start: Callable[..., Process]) -> None:
    process = start()
    hosts = FakeHosts(process, 3)
    low = FakeJob(process, "low", slices=1, suspendable=True)
    high = FakeJob(process, "high", slices=1, priority_class="high")
    peers = (hosts, low, high)

    def settled() -> bool:
        for peer in peers:
            peer.obey()
        return bool(high.leases and (low.leases or low.suspended))

    until(settled)
    status = high.call("status")
    assert [job["name"] for job in status["jobs"]] == ["high", "low"]
    # The spare is taken first, then the lower job's slice.
    for _ in range(2):
        ((index, incarnation),) = high.leases.items()
        high.leases.clear()
        high.tell("SliceFailed", index=index, incarnation=incarnation, cause="SIGKILL")
        hosts.fenced.clear()
        until(settled)
        assert index not in high.leases
    assert any("leased as number 0" in one["text"] for one in high.call("status")["changes"])
    for peer in peers:
        peer.close()


def test_a_job_of_the_global_default_is_told_by_its_class(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    (tmp_path / "priorities.yaml").write_text(
        PRIORITIES.replace("value: 2000", "value: 7\nglobalDefault: true")
    )
    job = FakeJob(start(), "one", slices=1)
    status = job.call("status")
    assert (status["jobs"][0]["priority_class"], status["jobs"][0]["priority"]) == ("high", 7)
    assert "submitted: 1 slices, priority 7 (high)" in [one["text"] for one in status["changes"]]
    job.close()


def test_a_connection_that_ends_takes_its_job_and_its_slices_along(
    start: Callable[..., Process],
) -> None:
    process = start()
    hosts = FakeHosts(process, 1)
    hosts.until("Fence")
    hosts.tell("SliceIdle", index=0, incarnation=0)
    job = FakeJob(process, "one", slices=1)
    job.until("Start")
    operator = Peer(process)
    hosts.close()
    until(lambda: operator.call("status")["slices"][0]["state"] == "failed")
    job.close()
    until(lambda: not operator.call("status")["jobs"])
    texts = [one["text"] for one in operator.call("status")["changes"]]
    assert "failed: its hosts are gone" in texts
    assert "withdrawn: its process is gone" in texts
    operator.close()


@pytest.mark.parametrize(
    ("method", "params", "text"),
    [
        ("submit", {"spec": {"name": "a", "slices": 1, "priority_class": "urgent"}}, "no priority"),
        ("submit", {"spec": {"name": "a", "slices": "many"}}, "slices of a JobSpec cannot be"),
        ("submit", {"spec": {"name": "a", "slices": 1, "colour": "red"}}, "no field colour"),
        ("submit", {"spec": {"name": "a"}}, "lacks one of"),
        ("submit", {}, "no JSON object"),
        ("report", {"name": "a"}, "lacks one of"),
        ("tell", {"event": {"kind": "Change"}}, "'Change' is no event"),
        ("tell", {"event": {"kind": "JobEnded", "name": "other", "ok": True}}, "not of this"),
        ("tell", {"event": {"kind": "SliceIdle", "index": 0, "incarnation": 0}}, "not of this"),
        ("suspend", {"name": "nobody"}, "there is no job 'nobody'"),
        ("dance", {}, "no method 'dance'"),
    ],
)
def test_a_wrong_request_is_refused_and_nothing_else_happens(
    start: Callable[..., Process], method: str, params: dict, text: str
) -> None:
    process = start()
    peer = Peer(process)
    with pytest.raises(UsageError, match=text):
        peer.call(method, **params)
    assert peer.call("status")["jobs"] == []
    peer.close()


def test_one_directory_has_one_manager(start: Callable[..., Process]) -> None:
    process = start()
    Peer(process).close()
    second = subprocess.run(
        [sys.executable, "-m", "regrow.jobs", str(process.directory)],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert second.returncode == 3
    assert "another resource manager runs in" in second.stderr


def test_it_ends_on_sigterm_and_leaves_no_socket(start: Callable[..., Process]) -> None:
    process = start()
    Peer(process).close()
    assert process.end(signal.SIGTERM) == 0
    assert not Path(process.socket).exists()


def test_a_state_that_is_none_is_one_clear_line(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir()
    for write in (
        lambda: (folder / "jobs.sqlite").write_bytes(b"something else" * 100),
        lambda: _other_state(folder / "jobs.sqlite"),
    ):
        for left in folder.iterdir():
            left.unlink()
        write()
        done = subprocess.run(
            [sys.executable, "-m", "regrow.jobs", str(folder)],
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 3
        assert "Traceback" not in done.stderr
        assert f"the resource manager's state {folder / 'jobs.sqlite'}" in done.stderr


def _other_state(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE state (id INTEGER PRIMARY KEY, json TEXT)")
        database.execute("INSERT INTO state VALUES (1, ?)", ('{"format": 7}',))
    database.close()


def test_what_cannot_be_written_down_is_not_said(start: Callable[..., Process]) -> None:
    process = start()
    first, second = FakeJob(process, "first", slices=1), Peer(process)
    # As on a full disk: no file of the process can grow any more.
    assert process.running is not None
    size = (process.directory / "jobs.sqlite-wal").stat().st_size
    resource.prlimit(process.running.pid, resource.RLIMIT_FSIZE, (size, size))
    with pytest.raises(ClusterError):
        for number in range(100):
            second.call("submit", spec={"name": f"job-{number}", "slices": 1})
            second.close()
            second = Peer(process)
    _, errors = process.running.communicate(timeout=30)
    assert process.running.returncode == 3
    assert "jobs.sqlite" in errors.splitlines()[-1]
    first.close()
    second.close()
    process.start()
    operator = Peer(process)
    # The first lived to its end; of those that came and went none was taken halfway.
    assert "first" in [job["name"] for job in operator.call("status")["jobs"]]
    operator.close()


def test_killed_at_any_moment_it_goes_on(start: Callable[..., Process]) -> None:
    process = start()
    dice = random.Random(7)
    hosts = FakeHosts(process, 4)
    jobs = [
        FakeJob(process, "high", slices=2, priority_class="high", restart="on-failure"),
        FakeJob(process, "low", slices=2, suspendable=True, restart="on-failure"),
    ]
    for _ in range(12):
        for _ in range(dice.randint(0, 20)):
            disturb(hosts, jobs, dice)
        killer = threading.Timer(dice.uniform(0, 0.05), process.running.kill)
        killer.start()
        # Turns of the manager, one after the other, until one of them does not end.
        while works(functools.partial(disturb, hosts, jobs, dice)):
            pass
        killer.join()
        process.end()
        process.start()
        hosts.connection.close()
        hosts = FakeHosts(process, 4)
        for job in jobs:
            job.report()
    until(lambda: served(hosts, jobs))
    status = jobs[0].call("status")
    for job in jobs:
        (told,) = [one for one in status["jobs"] if one["name"] == job.name]
        assert {index: number for _, index, number in told["leases"]} == job.leases
    assert not jobs[0].leases.keys() & jobs[1].leases.keys()
    # It was killed in the midst of something: slices changed hands many times.
    assert sum(jobs[0].newest.values()) > 8
    for peer in (hosts, *jobs):
        peer.close()


def disturb(hosts: FakeHosts, jobs: list[FakeJob], dice: random.Random) -> None:
    """A slice fails now and then; everyone obeys."""
    for peer in (hosts, *jobs):
        peer.obey()
    job = dice.choice(jobs)
    if job.leases and dice.random() < 0.3:
        index = dice.choice(list(job.leases))
        incarnation = job.leases.pop(index)
        job.tell("SliceFailed", index=index, incarnation=incarnation, cause="SIGKILL")
    time.sleep(0.001)


def served(hosts: FakeHosts, jobs: list[FakeJob]) -> bool:
    for peer in (hosts, *jobs):
        peer.obey()
    return all(len(job.leases) == 2 and not job.suspended for job in jobs)
