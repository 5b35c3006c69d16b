"""What is made of the ends of startup scripts."""

from __future__ import annotations

import pytest

from regrow.errors import NoRayHeadError
from regrow.ray.hosts import how_scripts_went
from regrow.ray.knock import knock, unanswered

NO_HEAD = ("1", "RuntimeError: Failed to connect to GCS within 60 seconds")
LATE = ("1", "Exception: the node timed out during startup")
RUNS = ("running", "")
FAILED = ("1", "cp: cannot stat '/no/such/disk'")
WELL = ("0", "")


def test_a_host_that_found_no_head_is_no_failure_while_others_go_on() -> None:
    assert how_scripts_went({0: NO_HEAD, 1: RUNS}) == ("", False)
    assert how_scripts_went({0: NO_HEAD, 1: LATE}) == ("", False)
    assert how_scripts_went({0: WELL, 1: NO_HEAD}) == (
        f"host 1: exit status 1: {NO_HEAD[1]}",
        True,
    )


def test_a_script_that_failed_is_told_at_once_and_before_a_missing_head() -> None:
    told = (f"host 1: exit status 1: {FAILED[1]}", False)
    assert how_scripts_went({0: RUNS, 1: FAILED}) == told
    assert how_scripts_went({0: NO_HEAD, 1: FAILED}) == told


def test_scripts_that_ended_well_leave_nothing_under_way() -> None:
    assert how_scripts_went({0: WELL, 1: WELL}) == ("", True)
    assert how_scripts_went({}) == ("", False), "no host can tell"


def test_a_start_that_gave_up_waiting_for_a_head_is_no_failure() -> None:
    with pytest.raises(NoRayHeadError) as nobody:
        knock("127.0.0.1:1")
    for error in (nobody.value, unanswered("10.0.0.1:6379", "nothing within 10 s")):
        text = f"Error: {error}"
        assert how_scripts_went({0: ("1", text)}) == (f"host 0: exit status 1: {text}", True)
