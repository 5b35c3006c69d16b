"""`regrow prove` with real slices, faults and trainings, sound ones and some that are not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

TRAINING = str(Path(__file__).parents[1] / "chaos" / "programs" / "proved_training.py")
TWO = ("--slices", "2", "--devices-per-slice", "1", "--restore-after", "0.2")
THREE = ("--slices", "3", "--devices-per-slice", "1", "--restore-after", "0.2")
KILL = "kill:1@step=5"
LONG = ("--steps", "30", "--pace", "0.1")
TIMEOUT_S = 300


@pytest.fixture
def prove(regrow):
    def run(chaos, *arguments, cluster=TWO, options=(), status=0):
        command = ("prove", *cluster, "--chaos", chaos, *options, TRAINING)
        done = regrow(*command, *arguments, timeout_s=TIMEOUT_S)
        assert done.returncode == status, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def proof(prove):
    def run(chaos, *arguments, cluster=TWO, options=(), status=0):
        done = prove(
            chaos, *arguments, cluster=cluster, options=("--json", *options), status=status
        )
        return json.loads(done.stdout)

    return run


def test_a_training_that_loses_a_slice_and_takes_it_back(prove, tmp_path):
    done = prove(KILL, *LONG, options=("--keep", str(tmp_path)))
    *_, verdict = lines = done.stdout.splitlines()
    assert verdict.startswith("verdict: bit-equal: 30 losses, 60 hashes of leaves"), done.stdout
    told = {line[2:25].strip(): line[26:] for line in lines if line.startswith("  ")}
    assert told["faults"] == "kill:1@step=5; slices lost: 1"
    assert told["slices"].startswith("0 1 from step 0, 0 from step 4, 0 1 from step ")
    assert told["all slices, no faults"].split(":")[0] in ("bit-equal", "equal within tolerance")
    assert told["records"] == "360 records, no gap and no double"
    # `record` and the snapshot tell the timeline which steps the loss has cost.
    assert re.search(r"  steps? 4( to 5)? lost to slice 1, SIGKILL: ", done.stderr), done.stderr
    assert {path.name for path in tmp_path.glob("*.jsonl")} == {
        "faulted.jsonl",
        "reference.jsonl",
        "undisturbed.jsonl",
    }
    assert "is lost" not in (tmp_path / "reference.log").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--limit", "0"), "--limit is 0 s; it must be more than 0"),
        (("--limit", "nan"), "Invalid value for '--limit': 'nan' is no number of seconds"),
        (("--hash-every", "0"), "Invalid value for '--hash-every'"),
        (("--keep", "/proc/none"), "--keep /proc/none cannot be made: "),
    ],
)
def test_options_that_cannot_be(prove, options, words):
    done = prove(KILL, options=options, status=2)
    assert done.stdout == ""
    assert done.stderr.startswith(f"regrow: {words}")
    assert done.stderr.count("\n") == 1


def test_a_script_that_fails(prove):
    done = prove(KILL, "--bug", "dies", status=6)
    assert done.stdout == ""
    assert "the script failed in the run with faults: exit status 1" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--chaos", "kill:1", TRAINING), "is not of the form FAULT:SLICE@WHEN"),
        (("--chaos", "kill:7@5s", TRAINING), "there is no slice 7"),
        ((TRAINING,), "Missing option '--chaos'"),
        (("--chaos", KILL), "nothing to run"),
        (("--chaos", KILL, "--losses", "step", TRAINING), "has no group (?P<step>...)"),
        (("--chaos", KILL, "/no/script.py"), "there is no script '/no/script.py'"),
    ],
)
def test_wrong_usage_is_one_line(regrow, one_line, arguments, text):
    assert text in one_line(regrow("prove", *arguments), 2)


@pytest.mark.slow
def test_a_script_that_records_nothing(prove):
    done = prove(KILL, "--record", "nothing", status=2)
    last = done.stderr.splitlines()[-1]
    assert "recorded no step, and printed none with its loss, so there is nothing" in last
    assert "regrow.elastic.record(step, loss, state, ids)" in last


@pytest.mark.slow
def test_a_script_that_only_prints(prove):
    done = prove(KILL, "--record", "print", *LONG)
    assert "\nstep 29 loss " in done.stdout, "what it prints is passed on"
    told = {line[2:25].strip(): line[26:] for line in done.stdout.splitlines()}
    assert told["slices"] == "unknown from step 0"
    assert told["all slices, no faults"].startswith("equal within tolerance: ")


@pytest.mark.slow
def test_losses_alone(proof):
    told = proof(KILL, "--record", "loss", *LONG)
    assert told["reference"] is None
    assert told["ledger"] is None
    assert told["verdict"] in ("bit-equal", "equal within tolerance")


@pytest.mark.slow
def test_a_fault_that_never_comes_proves_nothing(proof):
    told = proof("kill:1@step=1000", "--steps", "8", status=1)
    assert told["verdict"] == "nothing proved"
    assert told["text"] == "nothing proved: no fault happened before the last step, 7"
    assert (told["reference"], told["undisturbed"]) == (None, None), "no other run is made in vain"
    assert told["happened"] == []


@pytest.mark.slow
@pytest.mark.parametrize("chaos", ["restore:1@step=5", "mend:1@step=5"])
def test_a_fault_that_changes_nothing_proves_nothing(proof, chaos):
    told = proof(chaos, "--steps", "20", "--pace", "0.1", status=1)
    assert told["text"] == "nothing proved: no fault happened before the last step, 19"
    assert told["reference"] is None


@pytest.mark.slow
def test_a_fault_of_a_slice_that_no_step_uses_proves_nothing(proof):
    told = proof(KILL, *LONG, "--first", status=1)
    assert told["lost_slices"] == [1]
    assert told["reference"]["outcome"] == told["undisturbed"]["outcome"] == "bit-equal"
    assert told["text"].startswith("nothing proved: no step was computed on slice 1, and no fault")


@pytest.mark.slow
def test_a_state_that_is_hashed_now_and_then(proof):
    told = proof(KILL, *LONG, options=("--hash-every", "4"))
    assert told["verdict"] == "bit-equal"
    assert told["reference"]["text"].startswith("30 losses, 16 hashes of leaves of the state, ")


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("kit", ["ours", "stock"])
def test_growth_by_a_signal(proof, kit):
    told = proof(KILL, "--kit", kit, "--signal", *LONG, cluster=THREE)
    assert told["verdict"] == "bit-equal", told
    assert told["slices"][0] == {"from_step": 0, "slices": [0, 1, 2]}
    # The return takes back steps on two slices that no snapshot has: these may be all of them, or none,
    # if the slice was back before the first.
    assert told["slices"][-1]["slices"] == [0, 1, 2]
    assert len(told["rollbacks"]) in (1, 2)


@pytest.mark.slow
def test_a_script_that_does_not_end(prove):
    done = prove("stop:1@step=3", *LONG, "--pace", "60", options=("--limit", "12"), status=6)
    assert "the script failed in the run with faults: took longer than 12 s" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kit", ["ours", "stock"])
@pytest.mark.parametrize("mode", [(), ("--pause",)], ids=["resize", "pause"])
@pytest.mark.parametrize(
    ("chaos", "options"),
    [
        ("kill:1@step=1", ()),
        ("kill:1@step=5", ()),
        ("kill:2@step=12+30ms", ()),
        ("stop:1@step=6", ("--hang-after", "2")),
        ("kill:1@step=5,kill:2@recovery=1", ()),
    ],
    ids=["early", "middle", "late", "stop", "second"],
)
@pytest.mark.timeout(TIMEOUT_S)
def test_every_kit_in_every_mode(proof, kit, mode, chaos, options):
    told = proof(chaos, "--kit", kit, *mode, *LONG, cluster=THREE, options=options)
    assert told["verdict"] == "bit-equal", told
    assert told["lost_slices"]
    assert told["ledger"]["breach"] is None
    if mode == ("--pause",):
        assert told["undisturbed"] is None, "the undisturbed run is the reference"


@pytest.mark.slow
@pytest.mark.parametrize("mode", [(), ("--pause",)], ids=["resize", "pause"])
@pytest.mark.parametrize("bug", ["wrong load", "double", "skip", "unlike"])
def test_a_script_that_diverges_is_found(proof, bug, mode):
    told = proof(KILL, "--bug", bug, *mode, *LONG, status=1)
    assert told["verdict"] == "diverged", told
    breach = told["ledger"]["breach"]
    assert (breach and breach["kind"]) == {"double": "double", "skip": "gap"}.get(bug)
    where = breach or (
        told["undisturbed"] if not mode and bug == "wrong load" else told["reference"]
    )
    assert where["step"] in (4, 5)
    if bug == "unlike":
        assert told["reference"]["path"] == "w"
