"""regrow suspend, resume and snapshot; what becomes of a job that fails."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from regrow.cli import main
from regrow.control import request

SMALL = ("--slices", "2", "--devices-per-slice", "1", "--hosts-per-slice", "1")
POLITE = """
import os, time, jax, jax.numpy as jnp
import regrow.elastic
x = jax.jit(lambda x: x + 1)(jnp.zeros(3))
print("ready", flush=True)
while not regrow.elastic.suspend_requested():
    x = (x + 1).block_until_ready()
    time.sleep(0.01)
while os.path.exists("not yet"):
    time.sleep(0.01)
open("saved", "w").write(str(float(x[0])))
"""


@pytest.fixture
def here(regrow, monkeypatch, capfd):
    """Commands in this process, in the same home."""
    monkeypatch.setenv("REGROW_HOME", str(regrow.home))

    def run(*arguments):
        capfd.readouterr()
        status = main(arguments)
        output, errors = capfd.readouterr()
        return subprocess.CompletedProcess(arguments, status, output, errors)

    return run


def test_slices_leave_and_come_back(regrow, here, one_line, tmp_path, monkeypatch):
    regrow("up", "--detach", *SMALL)
    assert "say what" in one_line(here("suspend"), 2)
    assert "say what" in one_line(here("suspend", "--all", "--slice", "1"), 2)
    assert "there is no slice 5" in one_line(here("suspend", "--slice", "5"), 2)
    assert "no slice is suspended" in one_line(here("resume"), 3)
    told = one_line(here("suspend", "--slice", "1", "--slice", "0"), 0)
    assert told.startswith("2 slices of up-1 suspended in ")
    place = told.rpartition(" at ")[2]
    status = json.loads(here("status", "--json").stdout)
    assert [one["state"] for one in status["slices"]] == ["suspended", "suspended"]
    assert status["suspended"]["url"] == place
    rows = [line.split()[:5] for line in here("status").stdout.splitlines()]
    assert ["1", "suspended", "1", "0/1", "-"] in rows
    assert "resume brings it back" in one_line(here("slice", "restore", "1"), 3)
    assert "resume them first" in one_line(here("suspend", "--job"), 3)
    shown = here("snapshot", "show", place)
    assert "slices 0, 1 of 2" in shown.stdout
    assert "2 slices of up-1 resumed in " in one_line(here("resume"), 0)
    here("suspend", "--all")
    other = here("resume", "--hosts-per-slice", "2")
    assert "of a slice (1) cannot be divided among 2 hosts" in one_line(other, 2)
    assert "2 slices of up-1 resumed in " in one_line(here("resume", "--hosts-per-slice", "1"), 0)
    # A relative path is the user's, wherever the head was started.
    monkeypatch.chdir(tmp_path)
    assert f" at {tmp_path}/there/" in one_line(
        here("suspend", "--slice", "1", "--url", "there"), 0
    )
    assert "regrow resume --cluster up-1" in here("doctor", "--no-probe").stdout
    assert here("resume").returncode == 0
    assert here("suspend", "--job").returncode == 0
    regrow.nothing_left()
    assert not Path(place).exists()


@pytest.mark.parametrize(
    ("point", "told"),
    [
        (
            "head-manifest-made",
            "; the state is not saved; snapshot 1 at {place} is still the latest",
        ),
        ("head-committed", "; the state was saved before that: snapshot 2 at {place}"),
    ],
)
def test_a_head_that_ends_in_a_suspension_leaves_a_clear_word(
    regrow, here, one_line, tmp_path, point, told
):
    url = str(tmp_path / "there")
    regrow("up", "--detach", "--name", "one", *SMALL, "--gcs_scratch_location", url)
    place = one_line(here("suspend", "--all"), 0).rpartition(" at ")[2]
    assert here("resume").returncode == 0
    state = regrow.state()
    request(state.control_socket, "fault", index=0, fault=f"headtrap:{point}=kill")
    text = one_line(here("suspend", "--all"), 3)
    assert text == "the head ended before it answered 'suspend'" + told.format(place=place)


def test_snapshots_of_clusters_that_are_gone(regrow, here, one_line):
    regrow("up", "--detach", *SMALL)
    place = one_line(here("suspend", "--all"), 0).rpartition(" at ")[2]
    listed = here("snapshot", "list").stdout
    assert listed.startswith(f"{place}: snapshot 1, made ")
    assert listed.endswith("; in use\n")
    assert "is in use; first: regrow down --cluster up-1" in one_line(
        here("snapshot", "rm", place), 3
    )
    regrow("down")
    regrow.nothing_left()
    assert here("snapshot", "list").stdout.endswith("; stays\n")
    assert f"snapshot rm {place}" in here("doctor", "--no-probe").stdout
    assert "0 folders removed" in one_line(here("snapshot", "sweep", "--latest", "0"), 0)
    would = here("snapshot", "sweep", "--latest", "0", "--days", "0", "--dry-run")
    assert would.stdout == f"{place}\n"
    assert "1 folder would be removed" in would.stderr
    assert "no number of days" in one_line(here("snapshot", "sweep", "--days", "soon"), 2)
    assert f"{place} is removed" in one_line(here("snapshot", "rm", place), 0)
    assert "there is no snapshot at" in one_line(here("snapshot", "list"), 0)
    assert "there is no snapshot at" in one_line(here("snapshot", "rm", place), 1)


def test_a_wrong_number_of_days_is_one_line(here, one_line, monkeypatch):
    monkeypatch.setenv("REGROW_SNAPSHOT_DAYS", "soon")
    for command in (("run", "--", "true"), ("snapshot", "sweep"), ("snapshot", "list")):
        assert "REGROW_SNAPSHOT_DAYS: 'soon' is no number" in one_line(here(*command), 2)


def test_no_snapshot_is_one_line(here, one_line, tmp_path):
    assert "there is no snapshot at" in one_line(here("snapshot", "show", str(tmp_path)), 1)
    assert "no storage that is known" in one_line(here("snapshot", "show", "x9://y"), 2)
    (tmp_path / "file").touch()
    for command, url, text in (
        (("run",), "memory://x", "does not outlive"),
        (("run",), "nosuch://x", "no storage that is known"),
        (("up",), "nosuch://x", "no storage that is known"),
        (("head", "--allow-no-token"), "gs:/x", "is no URL"),
        (("run",), "/proc/x", "/proc/x cannot be written: /proc: "),
        (("up",), f"file://{tmp_path}/file/x", f"{tmp_path}/file/x cannot be written: "),
        (("up", "--spares", "1"), "/proc/x", "/proc/x cannot be written: /proc: "),
        (("head", "--allow-no-token"), "file:///proc/x", "/proc/x cannot be written: /proc: "),
    ):
        words = () if command[0] != "run" else ("--", "true")
        line = here(*command, "--gcs_scratch_location", url, *words)
        assert text in one_line(line, 2)


@pytest.mark.slow
def test_a_job_that_fails_is_run_anew(regrow, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nn = int(os.environ['REGROW_RESTARTS'])\nprint(n)\nsys.exit(7 - 7 * (n == 2))"
    )
    done = regrow("run", *SMALL, "--restart", "on-failure", str(script))
    assert (done.returncode, done.stdout) == (0, "0\n1\n2\n")
    done = regrow("run", *SMALL, "--restart", "on-failure", "--max-restarts", "1", str(script))
    assert (done.returncode, done.stdout) == (7, "0\n1\n")
    assert "the job ended with status 7: restart 1 of 1" in done.stderr
    assert regrow("run", *SMALL, str(script)).stdout == "0\n"


@pytest.mark.slow
def test_a_script_that_asks_saves_its_state_itself(regrow, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(POLITE)
    with regrow.start("run", *SMALL, str(script), cwd=tmp_path) as process:
        assert process.stdout.readline() == "ready\n"
        late = tmp_path / "not yet"
        late.touch()
        with regrow.start("suspend", "--job") as asking:
            assert "waiting for the script to save its state" in asking.stderr.readline()
            asking.send_signal(signal.SIGINT)
            told = asking.stderr.read()
        assert asking.returncode == 130
        assert told == (
            "regrow: what the script was asked for, to save its state and to end, goes on; see: "
            "regrow status --cluster run-1\n"
        )
        late.unlink()
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert float((tmp_path / "saved").read_text()) > 1
