"""`regrow up`, `down`, `status`, `slice`, `env` and `head` with real slices."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = ("--slices", "1", "--devices-per-slice", "1")


def exported(lines: str) -> dict[str, str]:
    words = [shlex.split(line) for line in lines.splitlines()]
    assert all(word == "export" for word, _ in words)
    return dict(assignment.split("=", 1) for _, assignment in words)


def count_devices(environ: dict[str, str]) -> str:
    told = subprocess.run(
        [sys.executable, "-c", "import jax; print(len(jax.devices()))"],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return told.stdout.strip() or told.stderr


def test_the_life_of_a_cluster(regrow, one_line):
    up = regrow("up", "--detach", "--name", "mine", "--port", "0", "--restore-after", "never")
    assert up.returncode == 0, up.stderr
    assert up.stdout == ""
    lines = up.stderr.splitlines()
    assert re.fullmatch(r"regrow: 2 slices of 2 devices up in \S+ s \(cluster mine\)", lines[0])
    state = regrow.state()
    pids = regrow.pids(state) | {state.supervisor.pid}
    assert "'mine' runs already" in one_line(regrow("up", "--name", "mine"), 3)

    status = json.loads(regrow("status", "--json").stdout)
    assert status["name"] == "mine"
    assert [one["state"] for one in status["slices"]] == ["up", "up"]
    assert "token" not in status
    assert regrow("slice", "kill", "1", "--cluster", "mine").returncode == 0
    table = regrow("status").stdout
    assert re.search(r"^0 +up +1 +1/1 +\d+ ", table, re.MULTILINE)
    assert re.search(r"^1 +lost +1 +0/1 ", table, re.MULTILINE)
    assert "slice 1 is lost" in one_line(regrow("slice", "stop", "1"), 3)
    assert "there is no slice 7" in one_line(regrow("slice", "kill", "7"), 2)
    assert regrow("slice", "restore", "1").returncode == 0

    unix = exported(regrow("env").stdout)
    assert unix["JAX_BACKEND_TARGET"] == state.target
    assert unix["REGROW_CLUSTER"] == "mine"
    assert count_devices(unix) == "4"
    tcp = exported(regrow("env", "--tcp").stdout)
    assert tcp["JAX_BACKEND_TARGET"].startswith("grpc://127.0.0.1:")
    assert tcp["REGROW_TOKEN"]
    assert count_devices(tcp) == "4"

    doctor = regrow("doctor")
    assert doctor.returncode == 0, doctor.stdout
    assert "sees 4 devices of cluster mine" in doctor.stdout
    assert regrow("down").stderr == "regrow: cluster mine is down\n"
    regrow.nothing_left(pids)


def test_several_clusters(regrow, one_line):
    for name in ("one", "two"):
        assert regrow("up", "--detach", *SMALL, "--name", name).returncode == 0
    text = one_line(regrow("status"), 3)
    assert text == "several clusters run (one, two): choose with --cluster NAME"
    assert json.loads(regrow("status", "--json", "--cluster", "two").stdout)["name"] == "two"
    both = json.loads(regrow("status", "--json", "--all").stdout)
    assert [status["name"] for status in both] == ["one", "two"]
    doctor = regrow("doctor").stdout
    assert "of cluster one" in doctor
    assert "of cluster two" in doctor
    regrow.environ["REGROW_CLUSTER"] = "one"
    assert regrow("down").stderr == "regrow: cluster one is down\n"
    assert "no cluster named 'one'" in one_line(regrow("status"), 3)
    del regrow.environ["REGROW_CLUSTER"]
    assert regrow("down", "--all").stderr == "regrow: cluster two is down\n"
    regrow.nothing_left()


@pytest.mark.parametrize("victim", ["supervisor", "head"])
def test_a_detached_cluster_leaves_nothing(regrow, victim):
    assert regrow("up", "--detach", *SMALL).returncode == 0
    state = regrow.state()
    pids = regrow.pids(state) | {state.supervisor.pid}
    os.kill(getattr(state, victim).pid, signal.SIGKILL)
    regrow.nothing_left(pids)


def test_a_detached_cluster_that_cannot_start_is_one_line(regrow, one_line):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = one_line(regrow("up", "--detach", *SMALL, "--port", str(port)), 3)
    assert f"{port}" in text
    assert "in use" in text
    regrow.nothing_left()


def test_in_the_foreground_it_ends_with_ctrl_c(regrow):
    with regrow.start("up", *SMALL) as process:
        for _ in range(3):
            process.stderr.readline()
        pids = regrow.pids(regrow.state())
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert errors == "regrow: SIGINT: the cluster is taken down\n"
    regrow.nothing_left(pids)


def test_a_head_with_the_flags_of_pathways(regrow, one_line):
    flags = ["--server_port=0", "--resource_manager_address=localhost:29001"]
    flags += ["--gcs_scratch_location=gs://bucket", "--num_elastic_instances=1"]
    with regrow.start("head", *SMALL, *flags, "--allow-no-token") as process:
        lines = [process.stderr.readline() for _ in range(6)]
        environ = exported(regrow("env", "--tcp").stdout)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert any("without a token" in line for line in lines)
    assert "REGROW_TOKEN" not in environ
    assert environ["JAX_BACKEND_TARGET"].startswith(f"grpc://{socket.gethostname()}:")
    assert "two names for one thing" in one_line(regrow("head", "--server_port=1", "--port=2"), 2)


def test_there_is_nothing_to_ask(regrow, one_line):
    for command in (("status",), ("down",), ("slice", "kill", "0")):
        assert "no cluster runs in" in one_line(regrow(*command), 3)
    assert regrow("env").stdout == "false\n"  # The status of `eval "$(regrow env)"`.
    assert "no cluster runs in" in one_line(regrow("down", "--all"), 0)
    assert "no cluster runs in" in one_line(regrow("status", "--all"), 0)
    assert regrow("status", "--all", "--json").stdout == "[]\n"


def test_a_home_that_is_a_file_is_one_line(regrow, one_line, tmp_path):
    (tmp_path / "file").touch()
    regrow.environ["REGROW_HOME"] = str(tmp_path / "file")
    for command in (["up"], ["up", "--detach"], ["status"], ["doctor"]):
        assert "file is no directory, and so no home" in one_line(regrow(*command), 2)


def test_output_that_cannot_be_written_is_one_line(regrow):
    with Path("/dev/full").open("w") as full, regrow.start("env", stdout=full) as process:
        assert process.stderr.read() == "regrow: [Errno 28] No space left on device\n"
    assert process.returncode == 1


def test_a_ctrl_c_while_the_command_is_being_imported():
    code = """
import builtins, sys

imported = builtins.__import__

def interrupted(name, *rest):
    if name == "click":
        raise KeyboardInterrupt
    return imported(name, *rest)

builtins.__import__ = interrupted
from regrow.__main__ import main

sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_help_and_version(regrow):
    assert regrow("--version").stdout.startswith("regrow, version ")
    overview = regrow("--help").stdout
    for command in ("run", "up", "down", "status", "slice", "env", "doctor", "head"):
        assert re.search(rf"^  {command} +\S", overview, re.MULTILINE)
        assert regrow(command, "--help").stdout.startswith(f"Usage: regrow {command} ")


def test_a_detached_cluster_that_cannot_be_is_told_as_any_other(regrow, one_line):
    for wrong, text in (
        ("--devices-per-slice=0", "--devices-per-slice is 0; it must be a number from 1 up"),
        ("--gcs_scratch_location=/proc/x", "/proc/x cannot be written: /proc: "),
    ):
        for how in ((), ("--detach",)):
            assert one_line(regrow("up", *how, wrong), 2).startswith(text)
