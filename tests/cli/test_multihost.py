"""`regrow multihost` on hosts that are processes of this machine."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import sys
from pathlib import Path

import pytest

from regrow.processes import is_running
from waiting import until

ZONE = "projects/p/locations/us-central2-b"
ALL = [(s, w) for s in (0, 1) for w in (0, 1)]


@pytest.fixture(scope="module")
def made():
    """The slices that the tests of this module have made already."""
    return set()


@pytest.fixture
def tpu(real_tpu, made, tmp_path, monkeypatch):
    """Two slices of two hosts each, and a folder."""
    if not made:
        created = real_tpu.create("q", "--node-count", "2", "--wait")
        assert created.returncode == 0, created.stderr
        made.add("q")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "who.sh").write_text('echo "$TPU_NAME $TPU_WORKER_ID"; echo oops >&2\n')
    monkeypatch.chdir(folder)
    return real_tpu


def run(tpu, command, *arguments, prefix="q"):
    return tpu("multihost", "run", "--prefix", prefix, "--command", command, *arguments)


def logs_of(tpu, name: str) -> dict[str, str]:
    """The logs of the last run of a name."""
    last = max((tpu.home / "multihost" / name).iterdir())
    return {path.name: path.read_text() for path in last.iterdir()}


class TestRun:
    def test_everywhere_with_the_output_of_the_first(self, tpu):
        answer = run(tpu, "bash who.sh; echo $REGROW_RUN_NAME", "--run-name", "r")
        assert answer.returncode == 0
        assert answer.stdout == "q-0 0\nr\n"
        assert "oops\n" in answer.stderr
        assert "1 file, 0.0 MB packed" in answer.stderr
        # Output and errors come by ways of their own, so that their order is not sure.
        logs = {name: sorted(text.splitlines()) for name, text in logs_of(tpu, "r").items()}
        assert logs == {f"q-{s}-worker-{w}.log": ["oops", f"q-{s} {w}", "r"] for s, w in ALL}

    def test_again_with_what_is_there(self, tpu, one_line):
        run(tpu, "echo made >made", "--run-name", "again")
        Path("who.sh").unlink()
        flags = ("--run-name", "again", "--use-existing-folder")
        answer = run(tpu, "cat made; bash who.sh", *flags)
        assert answer.returncode == 0
        assert answer.stdout == "made\nq-0 0\n"
        answer = run(tpu, "true", "--use-existing-folder")
        assert "give the --run-name" in one_line(answer, 2)
        answer = run(tpu, "true", "--use-existing-folder", "--run-name", "nowhere")
        assert answer.returncode == 2
        assert (
            "[slice 1 worker 1] there is no folder nowhere in the home directory" in answer.stderr
        )

    def test_the_first_failure_ends_it_everywhere_and_is_the_status(self, tpu):
        command = (
            'echo "$$"; [ "$TPU_NAME $TPU_WORKER_ID" = "q-1 1" ] && sleep 0.5 && exit 9; '
            "sleep 600 & wait"
        )
        answer = run(tpu, command, "--run-name", "fails")
        assert answer.returncode == 9
        pids = [int(text) for text in logs_of(tpu, "fails").values()]
        assert len(pids) == 4
        assert not any(is_running(pid) for pid in pids)
        assert "command: slice 1 worker 1 failed with status 9" in answer.stderr
        assert f"[slice 1 worker 1] {logs_of(tpu, 'fails')['q-1-worker-1.log']}" in answer.stderr

    def test_what_the_last_run_left_is_ended(self, tpu):
        run(tpu, "setsid sleep 600 >/dev/null 2>&1 & echo $!", "--run-name", "left")
        pids = [int(text) for text in logs_of(tpu, "left").values()]
        assert all(is_running(pid) for pid in pids)
        assert run(tpu, "true").returncode == 0
        assert not any(is_running(pid) for pid in pids)

    @pytest.mark.parametrize(
        "number",
        [
            pytest.param(signal.SIGINT, marks=pytest.mark.slow),
            pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
            signal.SIGKILL,
        ],
    )
    def test_a_runner_that_goes_takes_all_along(self, tpu, number):
        command = "echo $$; trap '' TERM; sleep 600 & sleep 601"
        argv = ("multihost", "run", "--prefix", "q", "--command", command, "--run-name", "goes")
        with tpu.commands.start(*argv) as process:
            process.stdout.readline()
            until(lambda: all(logs_of(tpu, "goes").values()))
            pids = [int(text) for text in logs_of(tpu, "goes").values()]
            process.send_signal(number)
            process.communicate(timeout=60)
        wanted = {signal.SIGINT: 130, signal.SIGTERM: 143}
        assert process.returncode == wanted.get(number, -number)
        until(lambda: not any(is_running(pid) for pid in pids))

    def test_not_on_a_worker(self, tpu):
        environ = {"REGROW_HOME": str(tpu.home), "PYTHONPATH": os.pathsep.join(sys.path)}
        words = [*(f"{key}={value}" for key, value in environ.items()), sys.executable]
        words += ["-m", "regrow", "multihost", "run", "--prefix", "q", "--command", "true"]
        answer = tpu(
            "queued-resources", "ssh", "q", "--node", "1", "--command", f"env {shlex.join(words)}"
        )
        assert answer.returncode == 2
        assert "this is slice 1 worker 0 (q-1) itself" in answer.stderr

    def test_a_table_on_a_terminal(self, tpu):
        ours, theirs = pty.openpty()
        argv = ("multihost", "run", "--prefix", "q", "--command", "echo shown; sleep 1")
        with tpu.commands.start(*argv, stdout=theirs, stderr=theirs) as process:
            os.close(theirs)
            shown = b""
            try:
                while data := os.read(ours, 4096):
                    shown += data
            except OSError:  # The terminal has no other end any more.
                pass
        os.close(ours)
        assert process.returncode == 0
        assert b"last line" in shown
        assert b"shown\r\n" in shown
        assert b"running" in shown
        assert b"done" in shown

    @pytest.mark.slow
    def test_single_slices(self, tpu, one_line):
        assert run(tpu, "echo $TPU_NAME", prefix="q-1").stdout == "q-1\n"
        for name in ("solo-0", "solo-10"):
            flags = ("--accelerator-type", "v4-8", "--version", "tpu-ubuntu2204-base")
            tpu.good("tpu-vm", "create", name, *flags)
        assert run(tpu, "echo $TPU_NAME", "--run-name", "solo", prefix="solo").returncode == 0
        assert sorted(logs_of(tpu, "solo")) == ["solo-0-worker-0.log", "solo-10-worker-0.log"]
        flags = ("--accelerator-type", "v5litepod-1", "--version", "v2-alpha-tpuv5-lite")
        tpu.good("tpu-vm", "create", "solo-2", *flags)
        assert "are of several shapes" in one_line(run(tpu, "true", prefix="solo"), 2)
        for name in ("solo-0", "solo-10", "solo-2"):
            tpu.good("tpu-vm", "delete", name, "--quiet")

    @pytest.mark.parametrize(
        ("flags", "text"),
        [
            (("--prefix", "nobody"), "no queued resource or slice of"),
            (("--run-name", "a/b"), "letters, digits"),
            (("--script-dir", "/nowhere"), "there is no such folder"),
        ],
    )
    def test_bad_input(self, tpu, one_line, flags, text):
        assert text in one_line(run(tpu, "true", *flags), 2)


class TestJob:
    FLAGS = ("--accelerator-type", "v4-16", "--num-slices", "2", "--report-every", "0.2s")
    GRACE = ("--grace", "1s")

    @pytest.fixture
    def job(self, tpu, tmp_path):
        bucket = tmp_path / "bucket"

        def start(name, command, *flags):
            return tpu(
                *("multihost", "job", *self.FLAGS, *self.GRACE, "--bucket", str(bucket)),
                *("--run-name", name, "--command", command, *flags),
            )

        return start

    def status(self, tpu, name, *flags):
        answer = tpu("multihost", "status", name, "--json", *flags)
        return answer.returncode, json.loads(answer.stdout)

    def test_success(self, tpu, job, tmp_path, one_line):
        answer = job("good", "bash who.sh; ls ${REGROW_BUCKET#file://}", "--wait")
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout.splitlines()[:2] == ["q-0 0".replace("q", "good"), "oops"]
        status, told = self.status(tpu, "good")
        assert (status, told["state"], told["queued"]) == (0, "succeeded", None)
        assert [(one["slice"], one["worker"], one["status"]) for one in told["hosts"]] == [
            (s, w, 0) for s, w in ALL
        ]
        shown = tpu.good("multihost", "logs", "good", "--slice", "1", "--worker", "1")
        assert shown.startswith("good-1 1\noops\n")
        # From anywhere: with nothing known but the bucket.
        (known,) = (tpu.home / "multihost" / "jobs").glob("*-good.json")
        known.unlink()
        assert "give its --bucket" in one_line(tpu("multihost", "status", "good"), 2)
        bucket = ("--bucket", str(tmp_path / "bucket"))
        assert "good: succeeded" in tpu.good("multihost", "status", "good", *bucket)
        nowhere = ("--endpoint", "http://127.0.0.1:1")
        shown = tpu.good("multihost", "status", "good", *bucket, *nowhere)
        assert shown.startswith("good: succeeded\nqueued resource: not known\n")
        assert tpu.good("multihost", "logs", "good", *bucket, *nowhere).startswith("good-0 0\n")
        assert "nothing to resume" in one_line(tpu("multihost", "resume", "good", *bucket), 2)
        text = one_line(tpu("multihost", "logs", "good", *bucket, "--slice", "7"), 2)
        assert "no logs of slice-7-worker-0" in text
        assert "there is a job good" in one_line(job("good", "true"), 2)

    def test_failure_on_any_host(self, tpu, job):
        command = '[ "$TPU_NAME $TPU_WORKER_ID" = "bad-1 1" ] && exit 9; sleep 600'
        answer = job("bad", command, "--grace", "0.5s", "--wait")
        assert answer.returncode == 9
        assert "failed, on slice-1-worker-1 with status 9" in answer.stderr
        status, told = self.status(tpu, "bad")
        assert (status, told["state"], told["queued"]) == (9, "failed", None)

    @pytest.mark.slow
    def test_resumes_after_the_loss_of_a_host(self, tpu, job, tmp_path):
        # Who is left alone fails, as distributed JAX does, and its failure is not that of the job.
        command = f"[ $REGROW_ATTEMPT = 2 ] && exit 0; until [ -e {tmp_path}/lost ]; do sleep 0.1; done; exit 3"
        job("again", command, "--grace", "2s")
        until(lambda: len(self.status(tpu, "again")[1]["hosts"]) == 4)
        until(
            lambda: all(one["state"] == "running" for one in self.status(tpu, "again")[1]["hosts"]),
        )
        (uid,) = tpu.good("tpu-vm", "describe", "again-1", "--format", "value(id)").split()
        (agent,) = tpu.home.glob(f"cloud/hosts/{uid}/*/0/agent.json")
        os.kill(json.loads(agent.read_text())["process"]["pid"], signal.SIGKILL)
        (tmp_path / "lost").touch()
        status, told = self.status(tpu, "again", "--wait")
        assert (status, told["state"]) == (0, "succeeded")
        assert {one["attempt"] for one in told["hosts"]} == {2}

    @pytest.mark.slow
    def test_tries_again(self, tpu, job):
        command = '[ "$TPU_NAME $REGROW_ATTEMPT" != "tries-1 1" ]'
        answer = job("tries", command, "--max-restarts", "1", "--wait")
        assert answer.returncode == 0, answer.stderr
        told = self.status(tpu, "tries")[1]
        assert {one["attempt"] for one in told["hosts"]} == {2}

    @pytest.mark.slow
    def test_preempted_and_resumed(self, tpu, job, tmp_path):
        command = f"echo begins; until [ -e {tmp_path}/go ]; do sleep 0.1; done"
        job("spot", command, "--spot")
        until(lambda: tpu("multihost", "logs", "spot").stdout == "begins\n")
        tpu.admin("preempt", f"{ZONE}/queuedResources/spot")
        status, told = self.status(tpu, "spot", "--wait")
        assert (status, told["state"]) == (1, "preempted")
        assert "regrow multihost resume spot" in tpu("multihost", "status", "spot").stdout
        tpu.good("multihost", "resume", "spot")
        (tmp_path / "go").touch()
        followed = tpu.good("multihost", "logs", "spot", "--follow")
        assert followed == "begins\n--- attempt 2\nbegins\n"
        assert self.status(tpu, "spot")[1]["state"] == "succeeded"

    def test_deleted_by_somebody(self, tpu, job):
        job("gone", "sleep 600")
        tpu.good("queued-resources", "delete", "gone", "--force", "--quiet")
        assert self.status(tpu, "gone") == (
            1,
            {
                "state": "lost",
                "reason": "its queued resource was deleted before its end",
                "status": None,
                "queued": None,
                "hosts": self.status(tpu, "gone")[1]["hosts"],
            },
        )

    @pytest.mark.parametrize(
        ("flags", "status", "text"),
        [
            (("--accelerator-type", "v9-8"), 1, "v9-8"),
            (("--num-slices", "257"), 1, "256"),
            (("--num-slices", "0"), 2, "0 is not in the range"),
            (("--spot", "--reserved"), 2, "exclude each other"),
            (("--bucket", "nothing://x"), 2, "--bucket=nothing://x"),
            (("--bucket", "who.sh"), 2, "who.sh cannot be read and written: "),
            (("--command", " "), 2, "--command is empty"),
            (("--metadata", "startup-script=x"), 2, "is its own"),
        ],
    )
    def test_bad_input(self, tpu, job, one_line, tmp_path, flags, status, text):
        assert text in one_line(job("wrong", "true", *flags), status)
        assert not list(tmp_path.glob("bucket/wrong/*"))
