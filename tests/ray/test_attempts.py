"""How an attempt is judged, when a job is tried again, and what its cause is said to be."""

from __future__ import annotations

import pytest

from regrow.ray.attempts import FENCED_STATUS, ORPHANED_STATUS, Attempt, RankView, Verdict, told
from regrow.ray.causes import one_line, output_tail, why
from regrow.ray.restarts import Again, Budgets, Over, RestartPolicy

ALIVE = frozenset({"a", "b"})
RUNS = RankView("RUNNING", "a")


def test_a_queued_rank_is_lost_with_the_node_that_it_waits_for() -> None:
    homes = {0: "a", 1: "gone"}
    for views in ({0: RUNS, 1: RankView("PENDING")}, {0: RUNS}):
        verdict = Attempt(2, homes=homes).judge(views, ALIVE, 0)
        assert verdict is not None
        assert (verdict.kind, verdict.rank) == ("preempted", 1)
    assert Attempt(2, homes={0: "a", 1: "b"}).judge({0: RUNS}, ALIVE, 0) is None
    done = {0: RankView("SUCCEEDED", "a"), 1: RankView("SUCCEEDED", "gone")}
    verdict = Attempt(2, homes=homes).judge(done, ALIVE, 0)
    assert verdict == Verdict("succeeded", exit_code=0)


def failed(message: str = "Job entrypoint command failed", code: int | None = 1) -> RankView:
    return RankView("FAILED", "b", message, code)


def test_it_ends_well_with_the_last_rank() -> None:
    attempt = Attempt(2)
    assert attempt.judge({}, ALIVE, 0) is None
    done = RankView("SUCCEEDED", "a")
    assert attempt.judge({0: done}, ALIVE, 0) is None
    assert attempt.judge({0: done, 1: RUNS}, ALIVE, 0) is None
    # That its node goes afterwards does not matter.
    assert attempt.judge({0: done, 1: done}, frozenset(), 0) == Verdict("succeeded", exit_code=0)


def test_a_rank_on_a_dead_node_is_lost_before_ray_says_so() -> None:
    verdict = Attempt(2).judge({0: RUNS, 1: RankView("RUNNING", "gone")}, ALIVE, 0)
    assert verdict is not None
    assert (verdict.kind, verdict.rank) == ("preempted", 1)


def test_a_failure_waits_for_the_death_that_explains_it() -> None:
    attempt = Attempt(2, settle_s=3)
    assert attempt.judge({0: RUNS, 1: failed()}, ALIVE, 10.0) is None
    verdict = attempt.judge({0: RUNS, 1: failed()}, frozenset({"b"}), 11.0)
    assert verdict is not None
    assert (verdict.kind, verdict.rank) == ("preempted", 0)


def test_a_failure_that_nothing_explains_is_the_jobs_own_and_the_first_is_the_cause() -> None:
    attempt = Attempt(3, settle_s=3)
    assert attempt.judge({0: RUNS, 1: failed(code=7), 2: RUNS}, ALIVE, 10.0) is None
    later = {0: failed("connection reset"), 1: failed(code=7), 2: RUNS}
    verdict = attempt.judge(later, ALIVE, 13.0)
    assert verdict is not None
    assert (verdict.kind, verdict.rank, verdict.exit_code) == ("failed", 1, 7)


@pytest.mark.parametrize(
    ("view", "kind"),
    [
        (failed("Job supervisor actor died: raylet died", None), "preempted"),
        (failed(code=ORPHANED_STATUS), "preempted"),
        (failed("runtime_env setup failed: Failed to set up", None), "setup"),
    ],
)
def test_what_needs_no_explanation(view: RankView, kind: str) -> None:
    verdict = Attempt(1).judge({0: view}, ALIVE, 0)
    assert verdict is not None
    assert verdict.kind == kind


@pytest.mark.parametrize(
    "view", [RankView("STOPPED", "a"), RankView("FAILED", "a", "", FENCED_STATUS)]
)
def test_stopped(view: RankView) -> None:
    attempt = Attempt(1, settle_s=0)
    verdict = attempt.judge({0: view}, ALIVE, 0)
    assert verdict is not None
    assert verdict.kind == "stopped"


def test_states_are_counted() -> None:
    assert told({0: RUNS, 1: RUNS, 2: RankView("PENDING")}) == "2 RUNNING, 1 PENDING"


def test_budgets_are_apart() -> None:
    budgets = Budgets(RestartPolicy(preemptions=2, failures=1, backoff_s=4), 0.0)
    assert budgets.after("preempted", 1) == Again(0)
    assert budgets.after("failed", 2) == Again(4)
    assert budgets.after("preempted", 3) == Again(0)
    end = budgets.after("failed", 4)
    assert end == Over(False, "its budget of 1 failures is spent")
    assert budgets.after("preempted", 5) == Over(False, "its budget of 2 preemptions is spent")
    assert budgets.after("succeeded", 6) == Over(True)


def test_back_off_doubles_up_to_the_longest() -> None:
    policy = RestartPolicy(failures=5, backoff_s=1, longest_backoff_s=3)
    budgets = Budgets(policy, 0.0)
    assert [budgets.after("failed", 0) for _ in range(4)] == [
        Again(1),
        Again(2),
        Again(3),
        Again(3),
    ]


def test_nothing_is_tried_again_after_the_deadline_or_in_vain() -> None:
    budgets = Budgets(RestartPolicy(preemptions=9, failures=9, deadline_s=10), 0.0)
    assert budgets.after("preempted", 10) == Over(False, "its deadline of 10 s is over")
    assert budgets.after("setup", 1) == Over(False, "its runtime environment cannot be made")
    assert budgets.after("stopped", 1) == Over(False, "it was stopped")


LEFTOVER = """runtime_env setup failed: Failed to set up runtime environment.
Run cmd[1] failed with the following details.
Command '['python', '_clonevirtualenv.py', '/venv', '/resources/pip/aabd/virtualenv']' failed
Last 50 lines of stdout:
    Usage: _clonevirtualenv.py [options] /path/to/existing/venv /path/to/cloned/venv
    _clonevirtualenv.py: error: dest dir '/resources/pip/aabd/virtualenv' exists
"""


@pytest.mark.parametrize("message", [LEFTOVER, LEFTOVER.replace("\n", "\\n")])
def test_a_half_made_environment_of_an_earlier_attempt_costs_no_budget(message: str) -> None:
    attempt = Attempt(2)
    verdict = attempt.judge({0: RUNS, 1: failed(message, None)}, ALIVE, 0.0)
    assert verdict is not None
    assert verdict.kind == "leftover"
    budgets = Budgets(RestartPolicy(), 0)
    assert [budgets.after("leftover", 1) for _ in range(3)] == [Again(5), Again(10), Again(20)]
    assert budgets.after("leftover", 1) == Over(False, "its runtime environment cannot be made")


PIP = """runtime_env setup failed: Failed to set up runtime environment.
Run cmd[9] failed with the following details.
Command 'python -m pip install -r requirements.txt' returned non-zero exit status 1.
Stdout:
INFO: pip is looking at multiple versions of orbax to determine which version is compatible
ERROR: Cannot install paxml because these package versions have conflicting dependencies.

The conflict is caused by:
    praxis 0.3.0 depends on t5x
ERROR: ResolutionImpossible: for help visit the documentation"""


def test_the_cause_of_a_pip_conflict_is_what_pip_says() -> None:
    expected = "Cannot install paxml because these package versions have conflicting dependencies"
    assert why(PIP) == expected
    assert why(PIP.replace("\n", "\\n")) == expected


def test_what_pip_said_last_is_told_as_it_was() -> None:
    expected = PIP.splitlines()[4:6] + PIP.splitlines()[7:]
    assert output_tail(PIP) == expected
    assert output_tail(PIP.replace("Stdout:", "Last 50 lines of stdout:")) == expected
    assert output_tail("runtime_env setup failed: no such working_dir") == []


def test_a_runtime_environment_that_takes_too_long() -> None:
    message = (
        "runtime_env setup failed: Failed to install runtime_env within the timeout of 600 seconds. "
        "Consider increasing the timeout\nTraceback (most recent call last):\nTimeoutError"
    )
    assert why(message) == "it was not made within 600 s"


def test_the_cause_is_the_programs_error_before_rays_word() -> None:
    log = ["Traceback (most recent call last):", "ValueError: no such layer", "regrow: rank ends"]
    assert why("Job entrypoint command failed with exit code 1", log) == "ValueError: no such layer"
    assert (
        why("Job entrypoint command failed with exit code 1. No logs available.") == "exit status 1"
    )
    assert why("") == "no reason given"


def test_a_program_that_names_no_error_fails_with_its_exit_status() -> None:
    begin = [
        "2026-01-02 03:04:05,678\tINFO job_manager.py:581 -- Runtime env is setting up.",
        "Running entrypoint for job regrow-train-0: exec python3 -m regrow.ray.rank -- python3 t.py",
    ]
    message = "Job entrypoint command failed with exit code 3, last available logs (truncated):\n"
    assert why(message + "\n".join(begin)) == "exit status 3"
    assert why(message + "\n".join([*begin, "step 7"])) == "exit status 3: step 7"
    assert why(message + "\n".join(begin), begin) == "exit status 3"
    assert why(message + "\n".join(begin), [*begin, "step 8"]) == "exit status 3: step 8"


def test_the_cause_is_what_the_rank_says_of_its_end_before_rays_word() -> None:
    log = ["step 7", "regrow: rank ends: python3 hangs (SIGSTOP)"]
    message = "Job supervisor actor died: The actor is dead because its worker process has died."
    assert why(message, log) == "python3 hangs (SIGSTOP)"


def test_a_cause_is_one_line_of_bearable_length() -> None:
    assert one_line("\x1b[31mred\x1b[0m\n  and  more") == "red and more"
    assert len(one_line("x" * 10_000)) <= 501
