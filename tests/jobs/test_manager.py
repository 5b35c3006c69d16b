"""What the manager does, case by case."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from regrow.errors import UsageError
from regrow.jobs.manager import Manager
from regrow.jobs.model import (
    AskBack,
    Event,
    Fence,
    Grant,
    Instruction,
    JobEnded,
    JobReport,
    JobResized,
    JobSpec,
    JobSubmitted,
    JobSuspended,
    Policy,
    ResumeRequested,
    Shape,
    SliceFailed,
    SliceIdle,
    SliceReport,
    SliceReturned,
    Start,
    Stop,
    Suspend,
    SuspendRefused,
    SuspendRequested,
    Withdraw,
)

SHAPE = Shape("cpu", 1, 2)


class Cluster:
    """A manager with slices, and what it has said."""

    def __init__(self, slices: int, **policy: Any) -> None:
        self.policy = Policy(**policy)
        self.manager = Manager(self.policy)
        self.now = 100.0
        self.said: tuple[Instruction, ...] = ()
        for index in range(slices):
            self.do(SliceReport(index, SHAPE))
            self.do(SliceIdle(index, 0))

    def do(self, event: Event) -> tuple[Instruction, ...]:
        self.said = self.manager.handle(event, self.now)
        return self.said

    def wait(self, duration_s: float) -> tuple[Instruction, ...]:
        self.now += duration_s
        self.said = self.manager.tick(self.now)
        return self.said

    def submit(self, name: str, slices: int, priority: int = 0, **more: Any) -> None:
        spec = JobSpec(name=name, slices=slices, shape=SHAPE, priority=priority, **more)
        self.do(JobSubmitted(spec))

    def fail(self, index: int) -> tuple[Instruction, ...]:
        return self.do(SliceFailed(index, self.slice(index)["incarnation"], "SIGKILL (signal 9)"))

    def idle(self, index: int) -> tuple[Instruction, ...]:
        return self.do(SliceIdle(index, self.slice(index)["incarnation"]))

    def job(self, name: str) -> dict[str, Any]:
        (found,) = [job for job in self.manager.status()["jobs"] if job["name"] == name]
        return found

    def slice(self, index: int) -> dict[str, Any]:
        (found,) = [one for one in self.manager.status()["slices"] if one["index"] == index]
        return found

    def leases(self, name: str) -> dict[int, int]:
        """The slice of each rank of a job."""
        return {rank: index for rank, index, _ in self.job(name)["leases"]}

    def names(self) -> set[str]:
        return {job["name"] for job in self.manager.status()["jobs"]}

    def of(self, kind: Callable[..., Any]) -> list[Any]:
        return [one for one in self.said if isinstance(one, kind)]  # type: ignore[arg-type]

    def restart_manager(self) -> tuple[Instruction, ...]:
        state = json.loads(json.dumps(self.manager.to_json()))
        self.manager, self.said = Manager.recover(state, self.now, self.policy)
        return self.said


def test_a_job_gets_slices_and_starts() -> None:
    cluster = Cluster(3)
    cluster.submit("one", 2)
    assert [(grant.rank, grant.index) for grant in cluster.of(Grant)] == [(0, 0), (1, 1)]
    assert cluster.of(Start) == [Start("one", 1, False, "it has the slices to run")]


def test_a_job_waits_until_it_has_all_and_says_why() -> None:
    cluster = Cluster(3)
    cluster.submit("one", 2)
    cluster.submit("two", 2)
    assert cluster.said == ()
    assert cluster.job("two")["reason"] == "waits for 2 slices: 1 is idle, the others are in use"
    cluster.do(JobEnded("one", ok=True, attempt=1))
    assert cluster.of(Grant) == []
    cluster.idle(0)
    assert cluster.of(Start)[0].job == "two"


def test_a_job_that_waits_says_what_there_is() -> None:
    cluster = Cluster(5, spares=1)
    cluster.submit("one", 2, priority=1)
    cluster.submit("two", 4)
    assert (
        cluster.job("two")["reason"]
        == "waits for 4 slices: 2 are idle, 1 is kept for lost ones, the others are in use"
    )


@pytest.mark.parametrize(
    ("size", "spares", "reason"),
    [
        (3, 1, "needs 3 slices, and 1 of the 3 slices of its shape is a spare"),
        (2, 0, "needs 3 slices, and the cluster has 2 slices of its shape"),
    ],
    ids=["would need the spare", "is larger than the cluster"],
)
def test_a_job_that_never_fits_says_why_and_keeps_nobody_out(
    size: int, spares: int, reason: str
) -> None:
    cluster = Cluster(size, spares=spares)
    cluster.submit("large", 3, priority=2000)
    assert cluster.job("large")["reason"] == reason
    cluster.submit("small", 2)
    assert cluster.of(Start)[0].job == "small"


def test_a_spare_takes_the_place_of_a_failed_slice_at_once() -> None:
    cluster = Cluster(3)
    cluster.submit("one", 2)
    cluster.fail(1)
    assert cluster.of(Withdraw)[0].index == 1
    (grant,) = cluster.of(Grant)
    assert (grant.rank, grant.index) == (1, 2)
    assert "takes the place of the one that failed" in grant.reason
    assert cluster.of(Fence)[0] == Fence(1, 1, "SIGKILL (signal 9)")


def test_a_spare_of_another_shape_is_none() -> None:
    cluster = Cluster(1)
    cluster.do(SliceReport(1, Shape("cpu", 1, 4)))
    cluster.do(SliceIdle(1, 0))
    cluster.submit("one", 1)
    cluster.fail(0)
    assert cluster.of(Grant) == []
    assert cluster.job("one")["reason"] == "waits for 1 slice, until slice 0 is back"


def test_kept_spares_are_for_jobs_that_lost_a_slice() -> None:
    cluster = Cluster(3, spares=1)
    cluster.submit("one", 2)
    cluster.submit("two", 1)
    assert cluster.leases("two") == {}
    cluster.fail(0)
    assert cluster.leases("one") == {0: 2, 1: 1}


def test_the_lowest_job_is_suspended_when_there_is_no_spare() -> None:
    cluster = Cluster(4)
    cluster.submit("high", 2, priority=2000)
    cluster.submit("middle", 1, priority=100, suspendable=True)
    cluster.submit("low", 1, suspendable=True)
    cluster.fail(0)
    (suspend,) = cluster.of(Suspend)
    assert suspend.job == "low"
    assert suspend.reason == "job high (priority 2000) needs 1 slice"
    assert cluster.of(Grant) == []
    assert cluster.slice(3)["reserved_for"] == "high"
    assert cluster.do(JobSuspended("low", 1)) == (Fence(3, 1, "its state is saved"),)
    cluster.idle(3)
    (grant,) = cluster.of(Grant)
    assert (grant.job, grant.rank, grant.index, grant.incarnation) == ("high", 0, 3, 2)
    assert cluster.job("low")["phase"] == "suspended"


def test_a_suspended_job_comes_back_from_its_state() -> None:
    cluster = Cluster(2)
    cluster.submit("high", 1, priority=2000)
    cluster.submit("low", 1, suspendable=True)
    cluster.fail(0)
    cluster.do(JobSuspended("low", 1))
    cluster.idle(1)
    assert cluster.leases("high") == {0: 1}
    cluster.idle(0)
    assert cluster.of(Start) == [Start("low", 2, True, "it has the slices to run")]


def test_an_elastic_job_shrinks_but_not_below_its_least() -> None:
    cluster = Cluster(4)
    cluster.submit("high", 2, priority=2000)
    cluster.submit("low", 2, min_slices=1, restart="on-failure")
    cluster.fail(0)
    (ask,) = cluster.of(AskBack)
    assert (ask.job, ask.rank, ask.index) == ("low", 1, 3)
    cluster.do(SliceReturned("low", 3, ask.incarnation))
    cluster.idle(3)
    assert cluster.leases("high") == {0: 3, 1: 1}
    assert cluster.job("low")["phase"] == "running"
    # Its last one is taken by a restart.
    cluster.fail(1)
    (stop,) = cluster.of(Stop)
    assert (stop.job, stop.again) == ("low", True)


def test_an_elastic_job_is_stopped_where_shrinking_is_not_enough() -> None:
    cluster = Cluster(2)
    cluster.submit("low", 2, min_slices=1, restart="on-failure")
    cluster.submit("high", 2, priority=2000)
    assert cluster.of(Stop)[0].job == "low"


def test_a_job_that_is_not_restarted_ends_when_it_is_preempted() -> None:
    cluster = Cluster(1)
    cluster.submit("low", 1)
    cluster.submit("high", 1, priority=2000)
    assert cluster.of(Stop)[0].again is False
    cluster.do(JobEnded("low", ok=False, attempt=1, cause="SIGTERM (signal 15)"))
    cluster.idle(0)
    assert cluster.names() == {"high"}


def test_a_preemption_costs_no_restart_and_a_failure_does() -> None:
    cluster = Cluster(1)
    cluster.submit("low", 1, restart="on-failure", max_restarts=1)
    cluster.submit("high", 1, priority=2000)
    cluster.do(JobEnded("low", ok=False, attempt=1, cause="SIGTERM (signal 15)"))
    cluster.idle(0)
    cluster.do(JobEnded("high", ok=True, attempt=1))
    cluster.idle(0)
    assert cluster.of(Start) == [Start("low", 2, False, "it has the slices to run")]
    cluster.do(JobEnded("low", ok=False, attempt=2, cause="exit status 1"))
    cluster.idle(0)
    assert cluster.job("low")["restarts"] == 1
    cluster.do(JobEnded("low", ok=False, attempt=3, cause="exit status 1"))
    assert cluster.names() == set()


def test_who_refuses_to_be_suspended_shrinks_or_stops() -> None:
    cluster = Cluster(2)
    cluster.submit("high", 1, priority=2000)
    cluster.submit("low", 1, suspendable=True, restart="on-failure")
    cluster.fail(0)
    cluster.do(SuspendRefused("low", 1, "it uses colocated_python"))
    assert cluster.of(Stop)[0].job == "low"


def test_a_rank_is_given_anew_only_after_it_was_given_back() -> None:
    cluster = Cluster(3)
    cluster.submit("low", 2, min_slices=1)
    cluster.submit("high", 2, priority=2000)
    (ask,) = cluster.of(AskBack)
    assert cluster.leases("low") == {0: 0, 1: 1}
    for index in (3, 4):
        cluster.do(SliceReport(index, SHAPE))
        cluster.idle(index)
    # The first was for the higher job, and the second is for this one, once the number is free.
    assert sorted(cluster.leases("high").values()) == [2, 3]
    assert cluster.job("low")["leases"] == [[0, 0, 1], [1, 1, 1]]
    assert cluster.slice(4)["reserved_for"] == "low"
    cluster.do(SliceReturned("low", ask.index, ask.incarnation))
    assert cluster.leases("low") == {0: 0, 1: 4}


def test_what_is_not_given_back_in_time_is_taken() -> None:
    cluster = Cluster(2, grace_s=5)
    cluster.submit("low", 2, min_slices=1)
    cluster.submit("high", 1, priority=2000)
    assert cluster.wait(4.9) == ()
    cluster.wait(0.1)
    assert cluster.of(Withdraw)[0].index == 1
    assert cluster.of(Fence) == [Fence(1, 1, "not given back within 5 s")]
    cluster.idle(1)
    assert cluster.leases("high") == {0: 1}
    # The answer that comes after all gives nobody else's slice away.
    assert cluster.do(SliceReturned("low", 1, 1)) == ()
    assert cluster.leases("high") == {0: 1}


def test_a_job_that_hangs_in_its_suspension_loses_its_slices() -> None:
    cluster = Cluster(1, grace_s=5)
    cluster.submit("low", 1, suspendable=True, restart="on-failure")
    cluster.submit("high", 1, priority=2000)
    cluster.wait(5)
    assert cluster.of(Stop)[0].job == "low"
    assert cluster.of(Fence)[0].index == 0
    assert cluster.job("low")["phase"] == "queued"
    # Its state was not committed in time, so it counts for nothing.
    assert cluster.do(JobSuspended("low", 1)) == ()


def test_no_slice_is_leased_before_its_processes_are_gone() -> None:
    cluster = Cluster(1, fence_s=10)
    cluster.submit("one", 1)
    cluster.do(JobEnded("one", ok=True, attempt=1))
    cluster.submit("two", 1)
    assert cluster.said == ()
    cluster.wait(10)
    assert cluster.slice(0)["state"] == "failed"
    assert cluster.of(Grant) == []
    assert cluster.do(SliceIdle(0, 0)) == ()
    assert cluster.idle(0) == (Grant("two", 0, 0, 2, "slice 0 is idle"), *cluster.of(Start))


def test_a_lower_job_cannot_take_hosts_that_a_higher_one_is_about_to_get_back() -> None:
    cluster = Cluster(3)
    cluster.submit("high", 3, priority=2000)
    cluster.submit("low", 1)
    cluster.fail(1)
    cluster.fail(2)
    assert cluster.job("high")["reason"] == "waits for 2 slices, until slices 1, 2 are back"
    assert cluster.idle(1)[0] == Grant(
        "high", 1, 1, 2, "slice 1 takes the place of the one that failed"
    )
    cluster.idle(2)
    assert cluster.leases("high") == {0: 0, 1: 1, 2: 2}
    assert cluster.leases("low") == {}


def test_a_suspended_job_keeps_what_is_idle_while_the_rest_is_repaired() -> None:
    cluster = Cluster(4)
    cluster.submit("high", 1, priority=2000)
    cluster.submit("middle", 3, priority=100, suspendable=True)
    cluster.fail(0)
    cluster.do(JobSuspended("middle", 1))
    for index in (1, 2, 3):
        cluster.idle(index)
    cluster.submit("low", 1)
    assert cluster.leases("low") == {}
    assert [cluster.slice(index)["reserved_for"] for index in (0, 2, 3)] == ["middle"] * 3
    cluster.idle(0)
    assert cluster.of(Start)[0].job == "middle"


def test_what_nobody_above_can_use_is_lent() -> None:
    cluster = Cluster(3)
    cluster.submit("first", 2, priority=2000)
    cluster.submit("second", 2, priority=100)
    cluster.submit("low", 1)
    assert cluster.leases("low") == {0: 2}
    cluster.do(JobEnded("first", ok=True, attempt=1))
    cluster.idle(0)
    cluster.idle(1)
    assert cluster.leases("second") == {0: 0, 1: 1}


def test_who_never_preempts_waits() -> None:
    cluster = Cluster(1)
    cluster.submit("low", 1)
    cluster.submit("high", 1, priority=2000, preempts=False)
    assert cluster.said == ()
    cluster.do(JobEnded("low", ok=True, attempt=1))
    cluster.submit("other", 1)
    cluster.idle(0)
    assert cluster.leases("high") == {0: 0}


def test_two_jobs_that_both_cannot_run_do_not_wait_for_each_other() -> None:
    cluster = Cluster(4)
    cluster.submit("first", 2, suspendable=True)
    cluster.submit("second", 2, suspendable=True)
    cluster.fail(0)
    assert cluster.said == (*cluster.of(Withdraw), *cluster.of(Fence))
    cluster.fail(2)
    assert cluster.of(Suspend)[0].job == "second"


def test_no_more_is_taken_than_is_needed() -> None:
    cluster = Cluster(3)
    cluster.submit("lowest", 1, suspendable=True)
    cluster.submit("low", 2, priority=1, suspendable=True)
    cluster.submit("high", 2, priority=2000)
    assert [one.job for one in cluster.of(Suspend)] == ["low"]


def test_an_operator_suspends_and_resumes() -> None:
    cluster = Cluster(1)
    cluster.submit("one", 1, suspendable=True)
    cluster.do(SuspendRequested("one"))
    assert cluster.of(Suspend)[0].reason == "it was asked for"
    cluster.do(JobSuspended("one", 1))
    assert cluster.idle(0) == ()
    cluster.do(ResumeRequested("one"))
    assert cluster.of(Start)[0].restore is True


def test_a_job_takes_fewer_slices_and_more_again() -> None:
    cluster = Cluster(3)
    cluster.submit("one", 3)
    cluster.do(JobResized("one", 1))
    asked = cluster.of(AskBack)
    assert [one.rank for one in asked] == [1, 2]
    for one in asked:
        cluster.do(SliceReturned("one", one.index, one.incarnation))
        cluster.idle(one.index)
    assert cluster.leases("one") == {0: 0}
    cluster.do(JobResized("one", 2))
    assert cluster.leases("one") == {0: 0, 1: 1}


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (JobResized("one", 0), "it was submitted with 1"),
        (JobResized("two", 1), "there is no job 'two'"),
        (SuspendRequested("one"), "cannot be suspended"),
        (JobSubmitted(JobSpec(name="one", slices=2, shape=SHAPE)), "give this one another --name"),
    ],
)
def test_a_request_that_cannot_be_met_changes_nothing(event: Event, text: str) -> None:
    cluster = Cluster(1)
    cluster.submit("one", 1)
    before = cluster.manager.to_json()
    with pytest.raises(UsageError, match=text):
        cluster.do(event)
    assert cluster.manager.to_json() == before


def test_the_same_submission_again_changes_nothing() -> None:
    cluster = Cluster(1)
    cluster.submit("one", 1)
    cluster.submit("one", 1)
    assert cluster.said == ()


def test_a_kept_spare_is_not_given_to_whom_it_would_be_taken_from() -> None:
    cluster = Cluster(3, spares=1)
    cluster.submit("low", 1)
    for index in (0, 1, 2):
        cluster.fail(index)
    cluster.submit("high", 3, priority=2000, min_slices=1)
    cluster.idle(1)
    # Kept for a job that has lost a slice; but the next moment the higher one would take it.
    assert cluster.slice(1)["state"] == "idle"
    cluster.idle(2)
    assert cluster.leases("high") == {0: 1}
    assert cluster.leases("low") == {}


def test_what_is_told_of_an_older_attempt_changes_nothing() -> None:
    cluster = Cluster(1, grace_s=5)
    cluster.submit("one", 1, restart="on-failure")
    cluster.submit("high", 1, priority=2000)
    cluster.wait(5)
    cluster.idle(0)
    cluster.do(JobEnded("high", ok=True, attempt=1))
    cluster.idle(0)
    assert cluster.of(Start)[0].attempt == 2
    before = cluster.manager.to_json()
    for late in (
        JobEnded("one", ok=False, cause="stopped", attempt=1),
        JobSuspended("one", 1),
        SuspendRefused("one", 1, "no"),
    ):
        assert cluster.do(late) == ()
    assert cluster.manager.to_json() == before


def test_a_job_that_was_suspended_unasked_comes_back_from_its_state() -> None:
    cluster = Cluster(1)
    cluster.submit("one", 1, suspendable=True)
    cluster.do(JobSuspended("one", 1))
    cluster.idle(0)
    assert cluster.of(Start) == [Start("one", 2, True, "it has the slices to run")]


# --- a manager that restarts --------------------------------------------------------------------


def test_a_restarted_manager_says_again_what_may_not_have_been_heard() -> None:
    cluster = Cluster(4)
    cluster.submit("high", 2, priority=2000)
    cluster.submit("low", 2, suspendable=True)
    cluster.fail(0)
    before = cluster.manager.status()
    cluster.restart_manager()
    assert cluster.job("high") == before["jobs"][0]
    assert cluster.of(Suspend)[0].job == "low"
    assert [(one.job, one.index) for one in cluster.of(Grant)] == [("high", 1)]
    assert [one.index for one in cluster.of(Fence)] == [0]
    cluster.do(JobReport("low", 1, suspended=True, leases=()))
    cluster.idle(2)
    assert cluster.leases("high") == {0: 2, 1: 1}


def test_a_job_that_does_not_report_to_a_restarted_manager_has_ended() -> None:
    cluster = Cluster(2, report_s=5)
    cluster.submit("one", 1)
    cluster.submit("two", 1)
    cluster.restart_manager()
    cluster.do(JobReport("one", 1, suspended=False, leases=((0, 1),)))
    for index in (0, 1):
        cluster.do(SliceReport(index, SHAPE, running=(1,)))
    cluster.wait(5)
    assert cluster.names() == {"one"}
    assert [one.index for one in cluster.of(Fence)] == [1]


def test_a_lease_that_a_job_believes_in_and_has_not_is_withdrawn_and_fenced() -> None:
    cluster = Cluster(2)
    cluster.submit("one", 1)
    cluster.submit("two", 1)
    cluster.do(JobReport("one", 1, suspended=False, leases=((0, 1), (1, 1))))
    assert cluster.of(Withdraw) == [Withdraw("one", 1, 1, "it has no lease of it any more")]
    # Slice 1 is job two's by right, in the same incarnation: only older ones are ended.
    assert cluster.of(Fence)[0].incarnation == 0


def test_a_job_that_is_not_known_is_stopped_and_its_processes_end() -> None:
    cluster = Cluster(1)
    cluster.do(JobReport("ghost", 1, suspended=False, leases=((0, 7),)))
    assert cluster.of(Stop)[0].job == "ghost"
    cluster.do(SliceReport(0, SHAPE, running=(7,)))
    assert cluster.of(Fence)[0].incarnation == 7
    cluster.do(SliceIdle(0, 7))
    cluster.submit("one", 1)
    assert cluster.of(Grant)[0].incarnation == 8


def test_every_change_has_its_reason() -> None:
    cluster = Cluster(2)
    cluster.submit("high", 1, priority=2000)
    cluster.submit("low", 1, suspendable=True)
    cluster.fail(0)
    texts = [change.text for change in cluster.manager.changes]
    assert "failed: SIGKILL (signal 9)" in texts
    assert "suspending: job high (priority 2000) needs 1 slice" in texts
    assert cluster.manager.take_changes()
    assert cluster.manager.take_changes() == []


def test_hosts_that_do_not_report_to_a_restarted_manager_are_lost() -> None:
    cluster = Cluster(2, report_s=5)
    cluster.submit("one", 1)
    cluster.restart_manager()
    cluster.do(JobReport("one", 1, suspended=False, leases=((0, 1),)))
    cluster.do(SliceReport(1, SHAPE))
    cluster.wait(5)
    assert cluster.slice(0)["state"] == "failed"
    assert cluster.leases("one") == {0: 1}
    assert cluster.manager.deadline() is None
