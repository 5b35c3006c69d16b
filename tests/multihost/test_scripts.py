"""What hosts are told, by a shell of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from regrow.multihost import scripts
from regrow.processes import is_running
from waiting import until


@pytest.fixture
def sh(tmp_path, monkeypatch):
    """A shell whose home directory is that of a host."""
    monkeypatch.setattr(scripts, "GRACE_S", 0.5)
    home = tmp_path / "home"
    home.mkdir()

    def start(script: str, **options) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["/bin/sh", "-c", script],
            cwd=home,
            env=os.environ | {"HOME": str(home)},
            text=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options,
        )

    return start


def told(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=30)
    return process.returncode, output, errors


def test_a_command_has_its_folder_its_variables_and_its_status(sh):
    script = scripts.run(
        "a folder", 'pwd; echo "$X"; read line || echo no input; exit 3', {"X": "it's"}, "a1"
    )
    assert told(sh(script, stdin=subprocess.DEVNULL))[0] == 1
    assert told(sh("mkdir 'a folder'"))[0] == 0
    with sh(script, stdin=subprocess.PIPE) as process:
        # The end of its input would end it.
        assert process.wait(timeout=30) == 3
        output = process.stdout.read()
    lines = output.splitlines()
    assert lines[0].endswith("/home/a folder")
    assert lines[1:] == ["it's", "no input"]


def test_the_end_of_input_ends_the_command_and_all_it_has_started(sh):
    told(sh("mkdir f"))
    command = "trap '' TERM; setsid sleep 600 & echo $!; sleep 601 & echo $!; echo $$; wait"
    with sh(scripts.run("f", command, {}, "a1"), stdin=subprocess.PIPE) as process:
        pids = [int(process.stdout.readline()) for _ in range(3)]
        assert all(is_running(pid) for pid in pids)
        process.stdin.close()
        # The shell does not listen to SIGTERM.
        assert process.wait(timeout=30) == -signal.SIGKILL
        until(lambda: not any(is_running(pid) for pid in pids))


def leaves_behind(sh, run_id: str) -> int:
    """Has a run end and a process of it stay; its id."""
    script = scripts.run("f", "setsid sleep 600 >/dev/null 2>&1 & echo $!", {}, run_id)
    with sh(script, stdin=subprocess.PIPE) as process:
        left = int(process.stdout.readline())
        # The end of its input would end all of it.
        assert process.wait(timeout=30) == 0
    return left


def test_what_an_earlier_run_has_left_is_ended_and_nothing_else(sh, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    environ = os.environ | {scripts.MARK: str(other)}
    with subprocess.Popen(["sleep", "30"], env=environ) as somebody_elses:
        told(sh("mkdir f"))
        left = leaves_behind(sh, "a1")
        assert is_running(left)
        status, _, errors = told(sh(scripts.prepare("f", unpack=False)))
        assert (status, errors) == (0, "ending 1 process(es) of a run\n")
        assert not is_running(left)
        assert is_running(somebody_elses.pid)
        somebody_elses.kill()


def test_a_run_that_ends_leaves_the_one_that_has_replaced_it_alone(sh):
    told(sh("mkdir f"))
    left = leaves_behind(sh, "b2")
    assert told(sh(scripts.sweep("a1"))) == (0, "", "")
    assert is_running(left)
    assert told(sh(scripts.sweep("b2"))) == (0, "", "ending 1 process(es) of a run\n")
    assert not is_running(left)


def test_who_holds_a_device_is_ended(sh, tmp_path):
    device = tmp_path / "accel0"
    device.touch()
    with device.open() as held, subprocess.Popen(["sleep", "30"], stdin=held) as holder:
        held.close()
        status, _, errors = told(sh(scripts.end_left([f"{tmp_path}/accel*"]) + "end_left"))
        assert (status, errors) == (0, "ending 1 process(es) of a run\n")
        assert holder.wait(timeout=10) == -signal.SIGTERM


def test_a_folder_is_unpacked_or_has_to_be_there(sh, tmp_path):
    status, _, errors = told(sh(scripts.prepare("f", unpack=False)))
    assert (status, errors) == (2, "there is no folder f in the home directory\n")
    (tmp_path / "x").write_text("1")
    archive = tmp_path / "x.tar.gz"
    subprocess.run(["tar", "-czf", archive, "-C", tmp_path, "x"], check=True)
    with archive.open() as file:
        assert told(sh(scripts.prepare("f", unpack=True), stdin=file))[0] == 0
    assert Path(tmp_path, "home", "f", "x").read_text() == "1"
