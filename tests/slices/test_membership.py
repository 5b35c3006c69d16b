"""Each rule of the membership, by itself, in fake time."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from regrow.errors import SLICE_DOWN_WORDS, Code, SliceLostError, UsageError
from regrow.slices import (
    Action,
    ContHosts,
    ContRequested,
    EndHost,
    Event,
    Fence,
    Fenced,
    Heartbeat,
    HostConnected,
    HostDisconnected,
    HostExited,
    HostReady,
    HostReported,
    HostStarted,
    HostStartFailed,
    JobEnds,
    KillRequested,
    Leave,
    Membership,
    Noted,
    Policy,
    Progressed,
    Request,
    RestoreRequested,
    Resumed,
    ResumeFailed,
    ResumeRequested,
    ShutdownRequested,
    SliceLost,
    SliceTaken,
    SliceUp,
    StallGuard,
    StartHost,
    StartRequested,
    StateSaved,
    StopHosts,
    StopRequested,
    Suspended,
    SuspendFailed,
)

Make = Callable[..., Any]


# --- coming up ---


def test_a_slice_is_up_when_all_its_hosts_are_connected_and_ready(make: Make) -> None:
    world = make(2, started=False)
    assert world.info(0).state == "down"
    assert world.do(StartRequested())[:2] == [StartHost(0, 1, 0), StartHost(0, 1, 1)]
    assert world.do(HostConnected(0, 1, 0)) == []
    assert world.do(HostReady(0, 1, 0)) == []
    assert world.do(HostReady(0, 1, 1)) == []
    assert world.info(0).state == "starting"
    assert world.do(HostConnected(0, 1, 1)) == [SliceUp(0, 1)]
    assert world.info(0).state == "up"
    assert world.membership.live() == {0: 1}
    assert [host.state for host in world.info(0).hosts] == ["ready", "ready"]


def test_start_requested_starts_only_what_was_never_started(make: Make) -> None:
    world = make(1, 1)
    world.exit(1)
    assert world.do(StartRequested()) == []


def test_a_host_that_breaks_off_before_its_slice_is_up_holds_it_back(make: Make) -> None:
    world = make(2, started=False)
    world.do(StartRequested())
    world.do(HostConnected(0, 1, 0))
    world.do(HostReady(0, 1, 0))
    world.do(HostDisconnected(0, 1, 0))
    world.do(HostConnected(0, 1, 1))
    assert world.do(HostReady(0, 1, 1)) == []
    assert world.do(HostConnected(0, 1, 0)) == [SliceUp(0, 1)]


# --- ways to be lost ---


def lost(index: int, cause: str, incarnation: int = 1, *, was_up: bool = True) -> list[Action]:
    return [SliceLost(index, incarnation, cause, was_up), Fence(index, incarnation)]


@pytest.mark.parametrize(
    ("cause", "phrase"),
    [
        ("SIGKILL (signal 9)", "was ended by SIGKILL"),
        ("SIGABRT", "was ended by SIGABRT"),
        ("exit status 1", "ended with exit status 1"),
        ("its pod was evicted.", "ended: its pod was evicted"),
        ("", "ended"),
    ],
)
def test_an_exit_of_one_host_loses_the_slice(make: Make, cause: str, phrase: str) -> None:
    world = make(2, 2)
    assert world.exit(1, host=1, cause=cause) == lost(1, f"host 1 (pid 1004) {phrase}")
    assert world.info(1).state == "lost"
    assert world.membership.live() == {0: 1}


def test_a_silent_host_is_a_suspect_and_then_lost_at_its_deadline(make: Make) -> None:
    world = make(1, 1)
    assert world.membership.deadline() == 102.5
    assert world.wait(2.5, beats=(0,)) == []
    assert world.info(1).state == "suspect"
    assert world.membership.is_live(1, 1)
    assert world.wait(2.49, beats=(0,)) == []
    cause = "host 0 (pid 1002) has sent no heartbeat for 5 s"
    assert world.wait(0.01, beats=(0,)) == lost(1, cause)
    assert world.info(0).state == "up"


def test_a_slow_host_that_moves_is_never_lost(make: Make) -> None:
    world = make(1)
    for _ in range(20):
        assert world.wait(4.9) == []
        assert world.info(0).state == "suspect"
        world.beat(0)
        assert world.info(0).state == "up"


def test_silence_counts_from_the_first_heartbeat_of_a_starting_host(make: Make) -> None:
    world = make(1, started=False)
    world.do(StartRequested())
    world.do(HostConnected(0, 1, 0))
    assert world.wait(20) == []
    world.do(Heartbeat(0, 1, 0))
    assert world.wait(4.9) == []
    assert SliceLost in map(type, world.wait(0.2))


def test_a_break_within_the_budget_is_no_loss(make: Make) -> None:
    world = make(1)
    world.do(HostDisconnected(0, 1, 0, "reset"))
    assert world.info(0).state == "suspect"
    assert world.info(0).hosts[0].state == "disconnected"
    assert world.wait(2.99) == []
    world.do(HostConnected(0, 1, 0))
    assert world.info(0).state == "up"
    assert world.wait(2.4) == []
    assert world.info(0).state == "up"
    assert world.said(0, "is connected again after 2.99 s")
    assert world.said(0, "broke: reset")


def test_a_break_beyond_the_budget_is_a_loss(make: Make) -> None:
    world = make(1)
    world.do(HostDisconnected(0, 1, 0))
    cause = "host 0 (pid 1001) has had no connection for 3 s"
    assert world.wait(3.0) == lost(0, cause)


def test_a_budget_of_reconnection_longer_than_the_silence_holds(make: Make) -> None:
    world = make(1, reconnect_s=20.0)
    world.do(HostDisconnected(0, 1, 0))
    assert world.wait(19.9) == []
    world.do(HostConnected(0, 1, 0))
    assert world.wait(4.9) == []
    world.beat(0)
    assert world.info(0).state == "up"


def test_the_late_end_of_a_replaced_connection_is_ignored(make: Make) -> None:
    world = make(1)
    world.do(HostConnected(0, 1, 0, link=7))
    world.do(HostDisconnected(0, 1, 0, link=0))
    assert world.info(0).state == "up"
    world.do(HostDisconnected(0, 1, 0, link=7))
    assert world.info(0).state == "suspect"


def test_a_slice_that_is_not_up_in_time_has_failed_to_start(make: Make) -> None:
    world = make(2, started=False)
    world.do(StartRequested())
    world.do(HostConnected(0, 1, 0))
    world.do(HostReady(0, 1, 0))
    world.wait(59.9, beats=(0,))
    assert world.of(SliceLost) == []
    world.wait(0.1, beats=(0,))
    cause = "not up 60 s after its start: host 1 (pid 1002) is running"
    assert world.of(SliceLost) == [SliceLost(0, 1, cause, was_up=False)]
    assert world.loss(0).startswith(f"did not start: {cause} (incarnation 1, at ")


def test_an_operator_kills(make: Make) -> None:
    world = make(1)
    assert world.do(KillRequested(0)) == lost(0, "killed on request")


def test_a_fatal_report_is_a_loss_and_a_note_is_not(make: Make) -> None:
    world = make(1)
    assert world.do(HostReported(0, 1, 0, "note", "maintenance at noon")) == []
    assert world.said(0, "maintenance at noon")
    actions = world.do(HostReported(0, 1, 0, "fatal", "INTERNAL: chip 3\nis gone"))
    assert actions == lost(0, "host 0 (pid 1001) reported: internal: chip 3 is gone")


# --- loss is for ever, by incarnation ---


def events_of(incarnation: int) -> list[Event]:
    return [
        Heartbeat(0, incarnation, 0),
        HostConnected(0, incarnation, 0),
        HostReady(0, incarnation, 0),
        HostDisconnected(0, incarnation, 0),
        HostExited(0, incarnation, 0, "exit status 1"),
        HostStartFailed(0, incarnation, 0, "no memory"),
        HostReported(0, incarnation, 0, "fatal", "fire"),
        Fenced(0, incarnation),
    ]


@pytest.mark.parametrize("incarnation", [0, 1, 3, -1])
@pytest.mark.parametrize("which", range(8))
def test_what_carries_another_incarnation_changes_nothing(
    make: Make, incarnation: int, which: int
) -> None:
    world = make(1)
    world.exit(0)
    world.do(RestoreRequested(0))
    world.come_up(0)
    before = world.info(0)
    assert before.incarnation == 2
    event = events_of(incarnation)[which]
    assert world.do(event) == []
    assert world.info(0) == before
    assert isinstance(event, Fenced) or world.said(0, f"after incarnation {incarnation} had ended")


def test_a_lost_incarnation_does_not_come_back(make: Make) -> None:
    world = make(1)
    world.do(StopRequested(0))
    world.wait(5)
    assert world.info(0).state == "lost"
    for event in events_of(1)[:4]:
        assert world.do(event) == []
    assert world.do(ContRequested(0)) == []
    assert world.info(0).state == "lost"
    assert "cont does not revive it" in world.membership.refusal(ContRequested(0))
    assert world.said(0, "cont was asked for: slice 0 is lost")


def test_many_stale_heartbeats_take_one_line_of_the_story(make: Make) -> None:
    world = make(1)
    world.exit(0)
    lines = len(world.membership.story(0))
    for _ in range(1000):
        world.do(Heartbeat(0, 1, 0))
    assert len(world.membership.story(0)) == lines + 1


def test_stop_and_cont_of_a_slice_in_time(make: Make) -> None:
    world = make(1)
    assert world.do(StopRequested(0)) == [StopHosts(0, 1)]
    refusal = "slice 0 is up (incarnation 1) and stopped already; cont lets it go on"
    assert world.membership.refusal(StopRequested(0)) == refusal
    world.wait(4)
    assert world.do(ContRequested(0)) == [ContHosts(0, 1)]
    assert world.membership.refusal(StopRequested(0)) is None
    refusal = "slice 0 is up (incarnation 1) and was not stopped; there is nothing to continue"
    world.beat(0)
    assert world.membership.refusal(ContRequested(0)) == refusal
    world.wait(4)  # Somebody else may have stopped it.
    assert world.do(ContRequested(0)) == [ContHosts(0, 1)]
    world.beat(0)
    assert world.info(0).state == "up"
    world.do(StopRequested(0))
    world.wait(5)
    assert "has sent no heartbeat for 5 s, stopped on request" in world.loss(0)


def test_a_process_that_is_born_into_a_stopped_slice_is_stopped_too(make: Make) -> None:
    world = make(1, started=False)
    world.obeys = False
    world.do(StartRequested())
    assert world.do(StopRequested(0)) == [StopHosts(0, 1)]
    assert world.do(HostStarted(0, 1, 0, 5)) == [StopHosts(0, 1)]


def test_a_new_incarnation_of_a_stopped_slice_runs(make: Make) -> None:
    world = make(1)
    world.do(StopRequested(0))
    world.wait(5)
    world.do(RestoreRequested(0))
    assert world.of(StopHosts) == [StopHosts(0, 1)]


# --- fencing and return ---


def test_without_restore_after_a_slice_stays_away_until_asked(make: Make) -> None:
    world = make(1)
    world.exit(0)
    world.wait(1000)
    assert world.info(0).state == "lost"
    assert world.membership.deadline() is None
    assert world.do(RestoreRequested(0))[0] == StartHost(0, 2, 0)
    world.come_up(0)
    assert world.membership.live() == {0: 2}


def test_restore_after_brings_it_back_in_time(make: Make) -> None:
    world = make(2, restore_after_s=1.0)
    world.exit(0)
    assert world.wait(0.99) == []
    assert world.wait(0.01)[:2] == [StartHost(0, 2, 0), StartHost(0, 2, 1)]


def test_restore_after_zero_follows_at_once_when_all_hosts_are_gone(make: Make) -> None:
    world = make(1, restore_after_s=0.0)
    world.obeys = False
    kinds = [type(action) for action in world.exit(0)]
    assert kinds == [SliceLost, Fence, StartHost]


def test_a_restore_waits_for_the_end_of_the_fencing(make: Make) -> None:
    world = make(2)
    world.obeys = False
    world.exit(0, host=0)
    assert world.do(RestoreRequested(0)) == []
    assert world.wait(3) == []
    assert world.do(Fenced(0, 1)) == [StartHost(0, 2, 0), StartHost(0, 2, 1)]


def test_the_exits_of_all_hosts_end_a_fencing_too(make: Make) -> None:
    world = make(2, restore_after_s=0.0)
    world.obeys = False
    world.exit(0, host=0)
    assert world.info(0).state == "lost"
    assert world.exit(0, host=1) == [StartHost(0, 2, 0), StartHost(0, 2, 1)]


def test_a_part_of_a_fencing_or_an_old_one_is_not_its_end(make: Make) -> None:
    world = make(3, restore_after_s=0.0)
    world.obeys = False
    world.exit(0, host=0)
    assert world.exit(0, host=1) == []
    assert world.info(0).state == "lost"
    assert len(world.exit(0, host=2)) == 3
    world.do(KillRequested(0))
    assert world.do(Fenced(0, 1)) == []
    assert world.do(HostExited(0, 1, 0, "")) == []
    assert len(world.do(Fenced(0, 2))) == 3


def test_a_fencing_that_nobody_confirms_does_not_hold_the_slice_for_ever(make: Make) -> None:
    world = make(2, restore_after_s=1.0)
    world.obeys = False
    world.exit(0, host=0)
    assert world.wait(9.9) == []
    assert world.wait(0.1) == [StartHost(0, 2, 0), StartHost(0, 2, 1)]
    assert world.said(0, "not seen to end in 10 s")


def test_a_process_that_is_born_after_its_fence_is_ended(make: Make) -> None:
    world = make(1, started=False)
    world.obeys = False
    world.do(StartRequested())
    world.do(KillRequested(0))
    assert world.do(HostStarted(0, 1, 0, 77)) == [EndHost(0, 1, 0, 77)]
    assert world.info(0).state == "lost"
    world.do(RestoreRequested(0))
    assert world.do(HostExited(0, 1, 0, "SIGKILL (signal 9)"))[0] == StartHost(0, 2, 0)
    assert world.do(HostStarted(0, 1, 0, 78)) == [EndHost(0, 1, 0, 78)]


def test_a_restore_of_a_slice_that_is_there_is_refused_in_words(make: Make) -> None:
    world = make(1)
    assert world.do(RestoreRequested(0)) == []
    refusal = "slice 0 is up (incarnation 1); there is nothing to restore"
    assert world.membership.refusal(RestoreRequested(0)) == refusal
    assert world.said(0, refusal)


def test_requests_to_a_lost_slice_are_refused_in_words(make: Make) -> None:
    world = make(1)
    world.exit(0)
    requests: list[Request] = [KillRequested(0), StopRequested(0)]
    for request in requests:
        assert world.do(request) == []
        text = "slice 0 is lost (incarnation 1); it has no processes"
        assert world.membership.refusal(request) == text
    assert world.membership.refusal(RestoreRequested(0)) is None


def test_a_host_of_an_old_incarnation_is_not_admitted(make: Make) -> None:
    world = make(1, restore_after_s=0.0)
    admits = world.membership.admits
    assert admits(0, 0, 1) is None
    world.exit(0)
    assert admits(0, 0, 2) is None
    assert admits(0, 0, 1) == (
        "incarnation 1 of slice 0 is not wanted; it is starting in incarnation 2"
    )
    assert admits(0, 0, 3) is not None
    assert admits(1, 0, 1) == "there is no slice 1; the cluster has 1"
    assert admits(-1, 0, 1) is not None
    assert admits(0, 4, 1) == "slice 0 has no host 4; it has 1"


# --- failed starts ---


def test_failed_starts_are_tried_again_with_a_growing_wait(make: Make) -> None:
    world = make(1, started=False)
    world.obeys = False
    world.do(StartRequested())
    waits = []
    for incarnation in range(1, 10):
        actions = world.do(HostStartFailed(0, incarnation, 0, "fork: no memory"))
        cause = "host 0 was not started: fork: no memory"
        assert actions == lost(0, cause, incarnation, was_up=False)
        waits.append(world.info(0).restore_at - world.now)
        assert world.info(0).start_failures == incarnation
        assert world.wait(waits[-1]) == [StartHost(0, incarnation + 1, 0)]
    assert waits == pytest.approx([0.5, 1, 2, 4, 8, 16, 30, 30, 30])
    assert world.said(0, "start failed (9 in a row)")


def test_a_start_that_works_ends_the_row_of_failures(make: Make) -> None:
    world = make(1, started=False)
    world.do(StartRequested())
    world.exit(0)
    world.wait(0.5)
    world.exit(0)
    world.wait(1)
    world.come_up(0)
    assert world.info(0).start_failures == 0
    world.exit(0)
    world.do(RestoreRequested(0))
    world.exit(0)
    assert world.info(0).restore_at == world.now + 0.5


def test_a_restore_cuts_the_wait_of_a_failed_start_short(make: Make) -> None:
    world = make(1, started=False)
    world.do(StartRequested())
    world.exit(0)
    assert world.do(RestoreRequested(0))[0] == StartHost(0, 2, 0)


def test_a_start_that_an_operator_killed_is_not_tried_again(make: Make) -> None:
    world = make(1, started=False)
    world.do(StartRequested())
    world.do(KillRequested(0))
    assert world.info(0).restore_at is None
    assert world.info(0).start_failures == 0


def test_the_wait_of_a_thousand_failures_is_a_number() -> None:
    assert Policy().backoff(100_000) == 30.0


# --- the budget ---


def test_without_a_budget_all_slices_may_go(make: Make) -> None:
    world = make(1, 1)
    world.exit(0)
    world.exit(1)
    assert world.of(JobEnds) == []


def test_with_no_budget_the_first_loss_ends_the_job_once(make: Make) -> None:
    world = make(1, 1, num_elastic_instances=0, restore_after_s=0.0)
    text = (
        "slice 1 was lost: host 0 (pid 1002) was ended by SIGKILL. "
        "1 slice is gone, num_elastic_instances allows 0"
    )
    kinds = [SliceLost, Fence, JobEnds]
    assert [type(action) for action in world.exit(1)] == kinds
    assert world.membership.ended == text
    world.exit(0)
    world.wait(100)
    assert world.of(JobEnds) == [JobEnds(text)]
    assert len(world.of(StartHost)) == 2
    assert world.do(RestoreRequested(1)) == []
    assert "the job has ended" in world.membership.refusal(RestoreRequested(1))
    assert "the job has ended" in world.loss(1)


def test_the_budget_counts_slices_that_are_gone_at_the_same_time(make: Make) -> None:
    world = make(1, 1, 1, num_elastic_instances=1, restore_after_s=0.0)
    for index in (0, 1, 2, 0):
        world.exit(index)
        world.come_up(index)
    assert world.of(JobEnds) == []
    world.exit(0)
    world.exit(2)
    assert "2 slices are gone, num_elastic_instances allows 1" in world.of(JobEnds)[0].text


def test_a_slice_that_has_never_been_up_is_not_gone(make: Make) -> None:
    world = make(1, 1, started=False, num_elastic_instances=0)
    world.do(StartRequested())
    world.exit(0)
    assert world.membership.status(world.now)["gone"] == 0
    assert world.of(JobEnds) == []


# --- the head itself stands still ---


def test_a_head_that_stood_still_blames_no_slice(make: Make) -> None:
    world = make(1, 1)
    world.do(HostDisconnected(1, 1, 0))
    world.now += 3600
    world.membership.clock_jumped(world.now, 3600)
    assert world.tick() == []
    assert world.membership.live() == {0: 1, 1: 1}
    assert world.said(0, "the head itself stood still for 3600 s")
    assert world.wait(2.9, beats=(0,)) == []
    assert world.wait(0.2, beats=(0,))[0].index == 1


def test_a_standstill_does_not_count_towards_a_start_or_a_fence(make: Make) -> None:
    world = make(2, 1, started=False)
    world.obeys = False
    world.do(StartRequested())
    world.do(KillRequested(0))
    world.do(RestoreRequested(0))
    world.now += 3600
    world.membership.clock_jumped(world.now, 3600)
    assert world.tick() == []
    assert world.wait(9.9) == []
    assert len(world.wait(0.2)) == 2
    assert world.wait(49.7) == []
    assert world.wait(0.3)[0].index == 1


def test_a_suspect_is_none_after_a_standstill(make: Make) -> None:
    world = make(1)
    world.wait(3)
    assert world.info(0).state == "suspect"
    world.now += 10
    world.membership.clock_jumped(world.now, 10)
    assert world.info(0).state == "up"


def test_the_stall_guard_tells_a_standstill_from_a_late_timer() -> None:
    guard = StallGuard(10.0, period_s=0.25, tolerance_s=0.75)
    assert guard.beat(10.25) == 0
    assert guard.beat(11.2) == 0
    assert guard.beat(15.2) == pytest.approx(4)
    assert guard.beat(15.4) == 0


def test_an_event_never_makes_another_host_late(make: Make) -> None:
    # The heartbeats of a busy loop lie one behind the other: the first must not judge the second.
    world = make(1, 1)
    world.now += 6
    world.obeys = False
    world.beat(0)
    world.beat(1)
    assert world.tick() == []


# --- shutdown ---


def test_shutdown_fences_what_lives_and_loses_nothing(make: Make) -> None:
    world = make(1, 1, 1, restore_after_s=0.0)
    world.obeys = False
    world.do(KillRequested(0))
    seen = len(world.actions)
    world.do(ShutdownRequested())
    assert world.actions[seen:] == [Fence(1, 1), Fence(2, 1)]
    assert world.membership.deadline() is None
    world.exit(0)
    world.exit(1)
    world.wait(100)
    assert world.do(RestoreRequested(0)) == []
    assert world.do(ShutdownRequested()) == []
    assert world.do(HostStarted(1, 1, 0, 9)) == [EndHost(1, 1, 0, 9)]
    assert world.actions[seen:] == [Fence(1, 1), Fence(2, 1), EndHost(1, 1, 0, 9)]
    assert world.membership.refusal(KillRequested(1)) == "slice 1 is shut down with its cluster"


# --- words ---


def test_a_loss_in_words(make: Make) -> None:
    world = make(1, restore_after_s=1.0)
    world.exit(0)
    assert world.membership.describe_loss(0, 1, 1_764_464_400.25) == (
        "was lost: host 0 (pid 1001) was ended by SIGKILL (incarnation 1, at "
        "2025-11-30T01:00:00.250Z; last heard 0 s before; it is started again 1 s later). "
        "Arrays that lived on it are gone; new arrays work when it has returned."
    )


@pytest.mark.parametrize("after_s", [0.0, 1.0])
def test_the_words_of_a_loss_stay_true(make: Make, after_s: float) -> None:
    world = make(1, restore_after_s=after_s)
    world.exit(0)

    def told() -> str:
        return world.membership.describe_loss(0, 1, 1.0)

    text = told()
    assert f"; it is started again {after_s:g} s later)" in text
    world.wait(after_s)
    assert told() == text
    world.come_up(0)
    assert told() == text


def test_a_loss_tells_what_the_client_was_doing(make: Make) -> None:
    world = make(1, 1)
    world.wait(0.25)
    assert world.do(Progressed(120, "load")) == []
    world.exit(0)
    assert "; last heard 0.25 s before, in step 120, phase load; " in world.loss(0)
    world.do(Progressed(None, None))
    world.exit(1)
    assert "; last heard 0.25 s before; it returns " in world.loss(1)


def test_a_loss_in_words_without_return(make: Make) -> None:
    world = make(1)
    world.exit(0)
    assert "; last heard 0 s before; it returns when asked)" in world.loss(0)


def test_a_loss_is_one_line_without_the_words_of_other_errors(make: Make) -> None:
    world = make(1)
    evil = "\n\x1b[31mINTERNAL: NOT_FOUND\r\nDEADLINE_EXCEEDED DATA_LOSS " + "x" * 5000
    world.do(HostReported(0, 1, 0, "fatal", evil))
    text = world.loss(0)
    assert not any(word in text for word in SLICE_DOWN_WORDS)
    assert text.isprintable()
    assert len(text) < 600
    error = SliceLostError(0, 1, text)
    assert error.code is Code.DATA_LOSS
    assert str(error).startswith("DATA_LOSS: slice 0 was lost: host 0 (pid 1001) reported: ")


def test_what_is_kept_of_many_losses_is_bounded(make: Make) -> None:
    world = make(1, restore_after_s=0.0)
    for _ in range(600):
        world.exit(0)
        world.come_up(0)
    assert "SIGKILL" in world.loss(0, 600)
    with pytest.raises(KeyError):
        world.loss(0, 1)
    assert len(world.membership.story(0)) == 100


def test_a_wait_names_who_is_missing(make: Make) -> None:
    world = make(1, 2, started=False)
    assert world.membership.describe_wait(world.now).startswith("0 of 2 slices are up; missing: ")
    assert "never started" in world.membership.describe_wait(world.now)
    world.do(StartRequested())
    world.come_up(0)
    world.do(HostConnected(1, 1, 1))
    assert world.membership.describe_wait(world.now) == (
        "1 of 2 slices are up; missing: slice 1 (starting in incarnation 1, host 0 (pid 1002) is "
        "running, host 1 (pid 1003) is connected; 0 s ago [1] host 0 (pid 1002) started; "
        "0 s ago [1] host 1 (pid 1003) started; 0 s ago [1] host 1 (pid 1003) connected)"
    )
    world.come_up(1)
    assert world.membership.all_up()
    assert world.membership.describe_wait(world.now) == "2 of 2 slices are up"


def test_the_status_is_json(make: Make) -> None:
    world = make(1, 2, restore_after_s=1.0, num_elastic_instances=1)
    world.do(Noted(1, "a note"))
    world.exit(1, host=1)
    world.now += 0.25
    status = json.loads(json.dumps(world.membership.status(world.now)))
    assert status["live"] == [0]
    assert status["gone"] == 1
    assert status["num_elastic_instances"] == 1
    assert status["ended"] is None
    first, second = status["slices"]
    assert first["hosts"] == [{"index": 0, "state": "ready", "pid": 1001, "heard_ago_s": 0.25}]
    assert second["state"] == "lost"
    assert second["losses"] == 1
    assert second["restore_in_s"] == 0.75
    assert [host["state"] for host in second["hosts"]] == ["ready", "gone"]
    texts = [line["text"] for line in second["story"]]
    assert "a note" in texts
    assert second["story"][-1]["ago_s"] == 0.25


# --- bad use ---


def test_slices_and_hosts_that_do_not_exist(make: Make) -> None:
    world = make(1)
    with pytest.raises(UsageError, match="there is no slice 1; the cluster has 1"):
        world.do(KillRequested(1))
    with pytest.raises(UsageError, match="there is no slice -1"):
        world.membership.info(-1)
    with pytest.raises(UsageError, match="slice 0 has no host 1; it has 1"):
        world.do(Heartbeat(0, 1, 1))
    with pytest.raises(UsageError, match="at least one slice"):
        Membership([])
    with pytest.raises(UsageError, match="at least one host"):
        Membership([1, 0])


@pytest.mark.parametrize(
    "policy",
    [
        {"hang_after_s": 0.0},
        {"reconnect_s": -1.0},
        {"start_s": float("nan")},
        {"restore_after_s": -0.1},
        {"num_elastic_instances": -1},
    ],
)
def test_a_policy_that_cannot_be(policy: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(policy))):
        Policy(**policy)


def test_validate_tells_the_story(make: Make) -> None:
    world = make(1)
    world.membership._slices[0].state = "lost"
    with pytest.raises(AssertionError, match=r"without a record of incarnation 1; story: .* up"):
        world.membership.validate()


def test_a_suspended_slice_is_not_lost_and_comes_back_when_asked(make: Make) -> None:
    world = make(1, 2, restore_after_s=1.0, num_elastic_instances=0)
    assert world.do(Suspended(1, "a notice")) == [Leave(1, 1)]
    assert world.info(1).state == "suspended"
    assert world.membership.live() == {0: 1}
    world.exit(1, 0, "exit status 0")
    world.exit(1, 1, "exit status 0")
    assert world.said(1, "its hosts have left")
    world.wait(60.0, beats=(0,))
    assert world.info(1).state == "suspended"
    assert world.membership.status(world.now)["gone"] == 0
    assert world.membership.refusal(RestoreRequested(1)) == (
        "slice 1 is suspended (incarnation 1) and not lost; resume brings it back"
    )
    world.do(ResumeRequested(1))
    world.come_up(1)
    assert world.of(SliceUp)[-1] == SliceUp(1, 2)
    world.do(Resumed(1))
    assert world.of(SliceLost) == []
    world.exit(1)
    assert world.of(SliceLost)[-1].was_up
    assert world.of(JobEnds)


def test_hosts_that_do_not_leave_are_not_waited_for_long(make: Make) -> None:
    world = make(1, fence_s=10.0)
    world.do(Suspended(0, "a notice"))
    world.do(ResumeRequested(0))
    world.wait(9.0)
    assert world.info(0).state == "suspended"
    world.wait(2.0)
    assert world.info(0).incarnation == 2


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1)])
def test_a_suspended_slice_may_come_back_with_other_hosts(
    make: Make, before: int, after: int
) -> None:
    world = make(before, backoff_s=0.5)
    world.do(Suspended(0, "a notice"))
    # Its hosts are still about to leave: the next ones are not counted yet.
    world.do(ResumeRequested(0, after))
    assert len(world.info(0).hosts) == before
    for host in range(before):
        world.exit(0, host, "exit status 0")
    assert world.of(StartHost)[before:] == [StartHost(0, 2, host) for host in range(after)]
    # What the others have left to say harms nobody.
    for host in range(before):
        assert world.do(HostDisconnected(0, 1, host, "", 0)) == []
    with pytest.raises(UsageError, match=f"no host {after}; it has {after}"):
        world.do(HostReady(0, 2, after))
    world.come_up(0)
    world.do(Resumed(0))
    world.exit(0)
    world.do(RestoreRequested(0))
    assert len(world.info(0).hosts) == after


def test_a_slice_that_is_lost_while_its_state_comes_back_is_started_again(make: Make) -> None:
    world = make(1, num_elastic_instances=0, backoff_s=0.5)
    world.do(Suspended(0, "a notice"))
    world.exit(0, 0, "exit status 0")
    world.do(ResumeRequested(0))
    world.come_up(0)
    world.exit(0)
    assert world.of(SliceLost) == [SliceLost(0, 2, world.of(SliceLost)[0].cause, was_up=False)]
    world.wait(0.6)
    world.come_up(0)
    assert world.info(0).incarnation == 3
    world.do(ResumeFailed(0, "a damaged chunk"))
    assert world.info(0).state == "suspended"
    assert world.of(Leave)[-1] == Leave(0, 3)
    assert not world.of(JobEnds)


@pytest.mark.parametrize("commits", [True, False])
def test_a_loss_after_all_was_saved_is_none_if_that_is_committed(
    make: Make, *, commits: bool
) -> None:
    world = make(1, 2, hang_after_s=5.0, num_elastic_instances=0)
    world.do(StateSaved(1))
    world.exit(1, 1)
    assert world.info(1).state == "up"
    assert world.said(
        1, "was ended by SIGKILL; lost unless its state, which is saved, is committed"
    )
    # Its other host falls silent, too, and nothing follows from that either.
    world.wait(60.0, beats=(0,))
    assert world.of(SliceLost) == world.of(JobEnds) == []
    if commits:
        assert world.do(Suspended(1, "a notice")) == [Leave(1, 1)]
        world.exit(1, 0)
        assert world.said(1, "its hosts have left")
        assert world.membership.status(world.now)["slices"][1]["losses"] == 0
        world.do(ResumeRequested(1))
        world.come_up(1)
        assert world.info(1).incarnation == 2
        return
    at = world.now
    world.do(SuspendFailed(1))
    (lost,) = world.of(SliceLost)
    assert lost == SliceLost(1, 1, lost.cause, was_up=True)
    assert "was ended by SIGKILL" in lost.cause
    assert world.of(JobEnds)
    first = world.membership.first_sign(1, 1)
    assert first is not None
    assert first < at - 50


def test_a_suspension_that_fails_leaves_nothing_behind(make: Make) -> None:
    world = make(1, 1, num_elastic_instances=1)
    world.do(StateSaved(0))
    assert world.do(SuspendFailed(0)) == []
    world.exit(0)
    assert world.of(SliceLost)[0].index == 0
    # What takes a slice away on purpose is told at once.
    world.do(StateSaved(1))
    world.do(SliceTaken(1, "another slice takes its place"))
    assert world.of(SliceLost)[1].index == 1
    assert world.do(SuspendFailed(1)) == []
