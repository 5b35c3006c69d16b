"""`regrow run` with real slices, and what becomes of it when its processes are killed."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time

import pytest

from regrow.processes import is_running
from waiting import until

SMALL = ("--slices", "1", "--devices-per-slice", "1")
TELL = """
import json, os, sys
import jax
print(json.dumps({
    "argv": sys.argv, "name": __name__, "path": sys.path[0],
    "devices": [d.slice_index for d in jax.devices()],
    "platforms": os.environ["JAX_PLATFORMS"], "group": os.getpgid(0),
}))
sys.exit(7)
"""


def told_lines(result) -> list[str]:
    """What was said, but for the patience that a slow machine needs."""
    return [line for line in result.stderr.splitlines() if "still waiting for" not in line]


def test_a_script_needs_no_change(regrow, tmp_path):
    script = tmp_path / "scripts" / "train.py"
    script.parent.mkdir()
    script.write_text(TELL)
    result = regrow(
        "run", "--slices", "2", "--chaos", "kill:0@60s", str(script), "--lr=3", "--", "x"
    )
    assert result.returncode == 7, result.stderr
    told = json.loads(result.stdout)
    assert told["argv"] == [str(script), "--lr=3", "--", "x"]
    assert told["name"] == "__main__"
    assert told["path"] == str(script.parent)
    assert told["devices"] == [0, 0, 1, 1]
    assert told["platforms"] == "proxy,cpu"
    line, left = told_lines(result)
    assert line.startswith("regrow: 2 slices of 2 devices up in ")
    assert left == "regrow: chaos: the script ended before these were due: kill:0@60.0s"
    regrow.nothing_left()


def test_a_command_and_what_it_leaves_behind(regrow, tmp_path):
    answer = tmp_path / "answer"
    code = f"""
        echo $REGROW_TARGET $PPID > {answer}
        sleep 60 & echo $! >> {answer}
        env -i setsid sleep 60 & echo $! >> {answer}
        exit 5
    """
    result = regrow("run", *SMALL, "--", "sh", "-c", code)
    assert result.returncode == 5
    target, supervisor, *left = answer.read_text().split()
    assert target.startswith("grpc://unix:/")
    assert not any(is_running(int(pid)) for pid in (supervisor, *left))


SLICES = """
import json, os, sys, time
from regrow.control import request
from regrow.home import Home
def states():
    return [(one["state"], one["incarnation"])
            for one in request(Home().find().control_socket, "status")["slices"]]
def until(*wanted):
    while tuple(states()[1]) != wanted:
        time.sleep(0.02)
import jax
jax.devices()
"""


def test_slices_go_and_come_as_ordered(regrow, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SLICES + "until('lost', 1); until('up', 2); time.sleep(0.5)")
    chaos = "kill:1@100ms,stop:0@0.2s,cont:0@0.4s,restore:0@0.5s"
    result = regrow("run", "--restore-after", "0.5", "--chaos", chaos, str(script))
    assert result.returncode == 0, result.stderr
    lines = [line.removeprefix("regrow: ") for line in told_lines(result)]
    texts = [line.partition("] ")[2] or line for line in lines[1:]]
    assert [text for text in texts if text.startswith("chaos: ")] == [
        "chaos: kill slice 1",
        "chaos: stop slice 0",
        "chaos: cont slice 0",
        "chaos: restore slice 0",
        "chaos: restore of slice 0 was refused: slice 0 is up (incarnation 1); there is nothing to "
        "restore",
    ]
    assert any(text.startswith("slice 1 is lost: ") for text in texts)
    [back] = [text for text in texts if text.startswith("slice 1 is back after ")]
    assert back.endswith("(incarnation 2)")
    assert len(texts) == 7
    regrow.nothing_left()


def test_a_job_that_is_not_elastic_ends_with_its_slice(regrow, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SLICES + "time.sleep(60)")
    began_at = time.monotonic()
    result = regrow("run", "--num_elastic_instances", "0", "--chaos", "kill:1@0.1s", str(script))
    assert result.returncode == 4, result.stderr
    assert time.monotonic() - began_at < 45
    assert result.stderr.count("the job ends: slice 1 was lost") == 1
    assert "num_elastic_instances allows 0" in result.stderr


def test_the_end_of_a_script_by_a_signal(regrow):
    assert regrow("run", *SMALL, "--", "sh", "-c", "kill -9 $$").returncode == 137


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_goes_to_the_script_first(regrow, tmp_path, signum):
    ready = tmp_path / "ready"
    code = (
        "import signal, sys, time\n"
        f"signal.signal({int(signum)}, lambda *_: sys.exit(9))\n"
        f"open({str(ready)!r}, 'w').close()\n"
        "time.sleep(60)"
    )
    with regrow.start("run", *SMALL, "--", sys.executable, "-c", code) as process:
        until(ready.exists)
        pids = regrow.pids(regrow.state())
        process.send_signal(signum)
        process.communicate(timeout=10)
    assert process.returncode == 9
    regrow.nothing_left(pids)


def test_an_end_before_the_cluster_is_up(regrow):
    with regrow.start("run", *SMALL, "--", "true") as process:
        pids = regrow.pids(regrow.state())
        process.terminate()
        process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGTERM
    regrow.nothing_left(pids)


@pytest.fixture
def running(regrow, tmp_path):
    """A run whose script waits: the process, the cluster's state, all pids, the script's pid."""
    ready = tmp_path / "ready"
    # The shell's child ignores what a shell would pass on: only SIGKILL ends it.
    code = f"(trap '' INT TERM HUP; sleep 60) & echo $$ > {ready}.new; mv {ready}.new {ready}; wait"
    with regrow.start("run", *SMALL, "--", "sh", "-c", code) as process:
        until(ready.exists)
        state = regrow.state()
        pids = regrow.pids(state)
        assert len(pids) >= 5
        yield process, state, pids, int(ready.read_text())
        process.kill()


def test_the_death_of_the_supervisor_takes_everything_along(regrow, running):
    process, _, pids, _ = running
    process.kill()
    regrow.nothing_left(pids)


def test_the_death_of_the_head_ends_the_run(regrow, running):
    process, state, pids, _ = running
    os.kill(state.head.pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 3
    assert "regrow: the head has died: SIGKILL (signal 9)" in errors
    regrow.nothing_left(pids)


@pytest.mark.parametrize(
    "script", ["sleep 60", pytest.param("sleep 2.3; exit 7", marks=pytest.mark.slow)]
)
def test_a_head_that_stands_still_ends_the_run(regrow, tmp_path, script):
    ready, stopped = tmp_path / "ready", tmp_path / "stopped"
    regrow.environ["REGROW_HEAD_DEADLINE"] = "3"
    waits = f"until [ -e {stopped} ]; do sleep 0.05; done"
    code = f"trap 'exit 143' TERM; echo > {ready}; ({waits}; {script}) & wait $!"
    with regrow.start("run", *SMALL, "--", "sh", "-c", code) as process:
        until(ready.exists)
        state = regrow.state()
        pids = regrow.pids(state)
        os.kill(state.head.pid, signal.SIGSTOP)
        stopped.touch()
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 3
    assert re.search("regrow: the head (has not answered for 3 s|does not answer).*ended", errors)
    regrow.nothing_left(pids)


def test_the_death_of_both_is_cleaned_up_by_the_next_command(regrow, running, one_line):
    process, state, pids, script = running
    for pid in (process.pid, state.head.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait(5)
    # The slices and the script end with their parents even so.
    until(lambda: not is_running(script))
    assert "no cluster runs in" in one_line(regrow("status"), 3)
    regrow.nothing_left(pids)


def test_the_death_of_the_script_ends_the_run(regrow, running):
    process, _, pids, script = running
    os.kill(script, signal.SIGKILL)
    process.communicate(timeout=20)
    assert process.returncode == 137
    regrow.nothing_left(pids)


def test_a_run_can_be_taken_down(regrow, running):
    process, _, pids, _ = running
    assert regrow("down").returncode == 0
    _, errors = process.communicate(timeout=20)
    assert "the cluster was taken down" in errors
    regrow.nothing_left(pids)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("run", "nothing to run: give SCRIPT, -m MODULE or -- COMMAND (see: regrow run --help)"),
        ("run no-such-script.py", "there is no script 'no-such-script.py'"),
        ("run -m no_such_module", "there is no module 'no_such_module'"),
        ("run -- no-such-command", "there is no command 'no-such-command'"),
        ("run --slices 0 -- true", "--slices is 0; it must be a number from 1 up"),
        ("run --devices-per-slice 0 -- true", "--devices-per-slice is 0; it must be a number"),
        ("run --hang-after 0 -- true", "--hang-after is 0.0; it must be a number of seconds"),
        ("run --restore-after -1 -- true", "--restore-after is -1.0; it must be 0 or more seconds"),
        ("run --num_elastic_instances -1 -- true", "--num-elastic-instances is -1; it must be 0"),
        ("run --start-timeout -1 -- true", "'-1' must be more than 0 seconds"),
        ("run --slices two -- true", "'two' is not a valid integer"),
        ("run --devices-per-slice 3 --hosts-per-slice 2 -- true", "cannot be shared out evenly"),
        ("run --restore-after soon -- true", "'soon' is no number of seconds, nor 'never'"),
        ("run --chaos kill:2@1s -- true", "there is no slice 2; allowed: 0 to 1"),
        ("run --name a/b -- true", "'a/b' cannot be the name of a cluster"),
        ("run --colour -- true", "No such option"),
        ("up --port 70000", "port 70000 is no TCP port"),
        ("up --host 0.0.0.0", "are for clients over TCP: say --port"),
        ("up --allow-no-token", "are for clients over TCP: say --port"),
        ("slice fly 1", "'fly' is not one of"),
        ("slice kill one", "'one' is not a valid integer"),
        ("nonsense", "No such command 'nonsense'"),
        ("statsu", "No such command 'statsu'; did you mean 'status'?"),
    ],
)
def test_wrong_usage_is_one_line(regrow, one_line, line, text):
    assert text in one_line(regrow(*line.split()), 2)


def test_a_cluster_that_cannot_start_is_one_line(regrow, one_line):
    regrow.environ["XLA_FLAGS"] = "--xla_no_such_flag=1"
    text = one_line(regrow("run", *SMALL, "--", "true"), 3)
    assert text.startswith("slice 0 failed 3 times to start: ")
    assert "xla_no_such_flag" in text
    regrow.nothing_left()


def test_logs_are_kept_when_asked_for(regrow, tmp_path):
    logs = tmp_path / "kept" / "logs"
    assert regrow("run", *SMALL, "--log-dir", str(logs), "--", "true").returncode == 0
    assert {"head.log", "slice0-host0.log"} <= {path.name for path in logs.iterdir()}
