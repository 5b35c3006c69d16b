"""`regrow chaos`, and faults placed in what a script does."""

from __future__ import annotations

import re

import pytest

from regrow.processes import ProcessStat
from waiting import until

SCRIPT = """
import time
from regrow.elastic import at_step, progress
import jax
jax.devices()
for step in range(4):
    at_step(step)
    time.sleep(0.1)
with progress.phase("load"):
    time.sleep(1.5)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def chaos_lines(result) -> list[str]:
    lines = [line.removeprefix("regrow: ") for line in result.stderr.splitlines()]
    return [text for line in lines if (text := line.partition("] ")[2]).startswith("chaos: ")]


def test_faults_are_placed_by_step_by_phase_and_in_a_recovery(regrow, script):
    spec = "stop:0@step=2,cont:0@step=2+200ms,kill:1@phase=load+50ms,kill:0@recovery=1,kill:1@60s"
    spec += ",kill:1@step=99"
    result = regrow("run", "--chaos", spec, script)
    assert result.returncode == 0, result.stderr
    assert chaos_lines(result) == [
        "chaos: stop slice 0 at step=2",
        "chaos: cont slice 0 at step=2+0.2s",
        "chaos: kill slice 1 at phase=load+0.05s",
        "chaos: kill slice 0 at recovery=1",
    ]
    assert (
        "chaos: the script ended before these were due: kill:1@60.0s,kill:1@step=99; "
        in result.stderr
    )
    assert "steps are those of regrow.elastic.at_step or record" in result.stderr
    regrow.nothing_left()


def test_the_death_of_the_supervisor_leaves_no_frozen_head(regrow, script):
    arguments = ("--hang-after", "1", "--chaos", "clockjump:1@phase=load", script)
    with regrow.start("run", *arguments) as process:
        pids = regrow.pids(regrow.state(60))
        head = regrow.state().head.pid
        until(lambda: ProcessStat.of(head).state == "T")
        pids |= regrow.pids(regrow.state())
        process.kill()
        process.communicate(timeout=10)
    # Who froze it wakes it, and it sees that its time has come.
    regrow.nothing_left(pids, timeout_s=10)


def test_a_seed_replays_its_faults_and_prints_them(regrow, script):
    arguments = ("--seed", "42", "--faults", "kill,lostreply", "--rate", "60", "--duration", "1.5")
    first = regrow("chaos", *arguments, script)
    assert first.returncode == 0, first.stderr
    [spec] = re.findall(r"^regrow: chaos of seed 42: --chaos (\S+)$", first.stderr, re.MULTILINE)
    assert len(chaos_lines(first)) >= spec.count("@") > 0
    again = regrow("run", "--chaos", spec, script)
    assert chaos_lines(again)[0] == chaos_lines(first)[0]
    regrow.nothing_left()


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("chaos", "nothing to run"),
        ("chaos --faults kil SCRIPT", "'kil' is no fault to draw; allowed: kill, term"),
        ("chaos --rate 0 SCRIPT", "both must be more than 0"),
        ("chaos --seed x SCRIPT", "'x' is not a valid integer"),
        ("chaos --duration soon SCRIPT", "'soon' is no number of seconds"),
        ("run --chaos kill:1@phase=laod SCRIPT", "did you mean 'load'?"),
        ("run --chaos kill:1@recovery=0 SCRIPT", "'0' is no recovery"),
    ],
)
def test_wrong_usage_is_one_line(regrow, one_line, script, line, text):
    assert text in one_line(regrow(*line.replace("SCRIPT", script).split()), 2)


def test_a_fault_that_this_machine_cannot_make_is_one_line(regrow, one_line, script):
    # The shell is looked for on the path; Python itself is given by its own.
    regrow.environ["PATH"] = "/nowhere"
    text = one_line(regrow("run", "--chaos", "kill:0@1s,clockjump:1@step=2", script), 2)
    assert text == (
        "this machine cannot make the fault clockjump:1@step=2: there is no sh, which wakes frozen "
        "processes"
    )
