"""`ssh` and `scp` to hosts that are processes of this machine."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from regrow.processes import is_running
from waiting import until


@pytest.fixture(scope="module")
def made():
    """The slices that the tests of this module have made already."""
    return set()


@pytest.fixture
def tpu(real_tpu, made):
    """Two slices of two hosts each."""
    if not made:
        created = real_tpu.create("q", "--node-count", "2", "--wait")
        assert created.returncode == 0, created.stderr
        made.add("q")
    return real_tpu


ALL = ("--node", "all", "--worker", "all")


def ssh(tpu, command, *arguments):
    return tpu("queued-resources", "ssh", "q", "--command", command, *arguments)


def test_all_hosts(tpu, tmp_path):
    answer = ssh(
        tpu,
        "echo $TPU_NAME-$TPU_WORKER_ID; echo oops >&2",
        *ALL,
        "--output-directory",
        str(tmp_path),
    )
    assert answer.returncode == 0
    assert sorted(answer.stdout.splitlines()) == [
        f"[slice {s} worker {w}] q-{s}-{w}" for s in (0, 1) for w in (0, 1)
    ]
    assert "[slice 1 worker 0] oops" in answer.stderr
    assert "status" in answer.stderr
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"q-{s}-worker-{w}.log" for s in (0, 1) for w in (0, 1)]
    assert sorted((tmp_path / "q-1-worker-0.log").read_text().splitlines()) == ["oops", "q-1-0"]


def test_one_host_is_like_ssh(tpu):
    answer = ssh(tpu, "echo $TPU_NAME; pwd; exit 3", "--node", "1")
    assert answer.returncode == 3
    name, home = answer.stdout.splitlines()
    assert name == "q-1"
    assert Path(home).name == "disk"
    assert answer.stderr == ""


def test_a_resource_is_found_by_the_page_s_command(tpu):
    answer = tpu("tpu-vm", "ssh", "q", *ALL, "--command", "true")
    assert answer.returncode == 0
    assert tpu("tpu-vm", "ssh", "q-1", "--command", "echo $TPU_NAME").stdout == "q-1\n"


def test_a_failed_batch_is_the_last(tpu):
    command = 'test "$TPU_WORKER_ID" = 1 && exit 5; echo ran'
    answer = ssh(tpu, command, *ALL, "--batch-size", "2")
    assert answer.returncode == 5
    assert answer.stdout == "[slice 0 worker 0] ran\n"
    assert "2 hosts not started, because a batch before has failed" in answer.stderr
    assert "not started" in answer.stderr


def test_what_would_deadlock_is_refused(tpu, one_line):
    answer = ssh(tpu, "python3 train.py 2>&1", *ALL, "--batch-size", "3")
    assert "a batch of 3 of 4 hosts would wait for ever" in one_line(answer, 2)
    assert ssh(tpu, "python3 -ISc 1", *ALL, "--batch-size", "2", "--independent").returncode == 0
    assert ssh(tpu, "which pip; true", *ALL, "--batch-size", "2").returncode == 0


def test_left_in_the_background(tpu):
    command = 'python3 -c "import time; print(1, flush=True); time.sleep(60)"'
    answer = ssh(tpu, command, *ALL, "--batch-size", "1", "--background")
    assert answer.returncode == 0
    pids = [int(line.split("process ")[1].split(",")[0]) for line in answer.stdout.splitlines()]
    assert len(pids) == 4
    assert all(is_running(pid) for pid in pids)
    until(lambda: ssh(tpu, "cat regrow-background.log").stdout == "1\n")
    # What is left behind ends with the hosts, if not before.
    tpu.good("queued-resources", "reset", "q")
    until(lambda: not any(is_running(pid) for pid in pids))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_client_that_goes_takes_its_commands_along(tpu, number):
    command = "trap '' TERM; echo $$; sleep 600 & wait; sleep 600"
    argv = ("queued-resources", "ssh", "q", *ALL, "--command", command)
    with tpu.commands.start(*argv) as process:
        lines = [process.stdout.readline() for _ in range(4)]
        pids = [int(line.rpartition(" ")[2]) for line in lines]
        assert all(is_running(pid) for pid in pids)
        process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    until(lambda: not any(is_running(pid) for pid in pids))


def test_a_host_that_dies_is_told_as_ssh_does(tpu):
    assert tpu.create("r", "--wait", shape="v4-8").returncode == 0
    (uid,) = tpu.good("tpu-vm", "describe", "r-node", "--format", "value(id)").split()
    with tpu.commands.start(
        "queued-resources", "ssh", "r", "--command", "echo x; sleep 600"
    ) as ssh:
        assert ssh.stdout.readline() == "x\n"
        (agent,) = tpu.home.glob(f"cloud/hosts/{uid}/*/0/agent.json")
        os.kill(json.loads(agent.read_text())["process"]["pid"], signal.SIGKILL)
        ssh.communicate(timeout=30)
    assert ssh.returncode == 255
    tpu.good("queued-resources", "delete", "r", "--force", "--quiet")


def test_output_is_not_waited_for_when_the_command_has_ended(tpu):
    began_at = time.monotonic()
    answer = ssh(tpu, "sleep 60 & echo $!", *ALL)
    assert answer.returncode == 0
    assert len(answer.stdout.splitlines()) == 4
    assert time.monotonic() - began_at < 50


def test_much_output_arrives_whole(tpu):
    answer = ssh(tpu, "seq 100000; printf end", "--worker", "all")
    for worker in (0, 1):
        mark = f"[slice 0 worker {worker}] "
        lines = [line for line in answer.stdout.splitlines() if line.startswith(mark)]
        assert [line.removeprefix(mark) for line in lines[:-1]] == [
            str(n + 1) for n in range(100000)
        ]
        assert lines[-1] == f"{mark}end"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--node", "2"), "--node=2: 2 is not in [0, 1]"),
        (("--worker", "0-2"), "--worker=0-2: 2 is not in [0, 1]"),
        (("--worker", "1-0"), "give all, or indices"),
        (("--worker", "x"), "give all, or indices"),
        (("--batch-size", "0"), "give a number of hosts, or all"),
        (("--command", "", *ALL), "give a --command"),
    ],
)
def test_bad_input(tpu, one_line, arguments, text):
    assert text in one_line(ssh(tpu, "true", *arguments), 2)


def test_dry_run(tpu):
    lines = ssh(tpu, "x y", *ALL, "--dry-run").stdout.splitlines()
    assert len(lines) == 4
    assert lines[3].startswith("on q-1 worker 1 (127.")


def test_copies(tpu, tmp_path, monkeypatch, one_line):
    monkeypatch.chdir(tmp_path)
    tree = tmp_path / "a tree"
    (tree / "b").mkdir(parents=True)
    (tree / "b" / "c").write_text("deep")
    Path("one").write_text("1")
    scp = ("queued-resources", "scp")
    assert tpu(*scp, "one", "q:", *ALL).returncode == 0
    assert tpu(*scp, "--recurse", "a tree", "q:~/", *ALL).returncode == 0
    shown = ssh(tpu, "cat one 'a tree/b/c'", *ALL)
    assert sorted(shown.stdout.splitlines()) == [
        f"[slice {s} worker {w}] 1deep" for s in (0, 1) for w in (0, 1)
    ]
    assert tpu(*scp, "q:one", "back", "--node", "1", "--worker", "1").returncode == 0
    assert Path("back").read_text() == "1"
    assert "omitting directory" in tpu(*scp, "a tree", "q:").stderr
    assert "from one host" in one_line(tpu(*scp, "q:one", "back", *ALL), 2)
    assert "name it at one end" in one_line(tpu(*scp, "one", "two"), 2)
    assert "name it at one end" in one_line(tpu(*scp, "q:one", "q:two"), 2)


def test_a_startup_script_that_fails(tpu, one_line):
    script = 'test "$TPU_WORKER_ID" = 0 || exit 7'
    flags = ("--wait", "--startup-timeout", "60s", "--metadata", f"startup-script={script}")
    answer = tpu.create("s", *flags)
    assert answer.returncode == 1
    last = answer.stderr.splitlines()[-1]
    assert last == (
        "regrow: ABORTED: the startup script of s has failed with exit status 7 "
        "on slice 0 worker 1."
    )
    until(lambda: "NOT_FOUND" in tpu("queued-resources", "describe", "s").stderr)
    answer = tpu.create("s", *flags, "--metadata", "startup-script=true")
    assert answer.returncode == 0, answer.stderr
    told = tpu.good("tpu-vm", "get-guest-attributes", "s-node", "--query-path", "startup-script")
    assert "1          startup-script/exit-status  0" in told
    tpu.good("queued-resources", "delete", "s", "--force", "--quiet")
    assert "needs --wait" in one_line(tpu.create("s", "--startup-timeout", "1s"), 2)
