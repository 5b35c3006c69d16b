"""Until hosts have joined: each action follows from what is seen."""

from __future__ import annotations

import pytest

from regrow.errors import UsageError
from regrow.ray.readiness import (
    Create,
    Delete,
    Done,
    GiveUp,
    JoinPolicy,
    Readiness,
    Rejoin,
    Sight,
    Wait,
)


def sight(condition: str, joined: int = 0, error: str = "") -> Sight:
    return Sight(condition, condition.upper(), joined, 2, error)  # type: ignore[arg-type]


def test_the_usual_way() -> None:
    readiness = Readiness("t", JoinPolicy(join_s=10))
    assert readiness.next(sight("absent"), 0.0) == Create()
    waits = readiness.next(sight("coming"), 1.0)
    assert isinstance(waits, Wait)
    assert waits.text == "Waiting for t, which is COMING..."
    none = readiness.next(sight("ready"), 2.0)
    assert isinstance(none, Wait)
    assert none.text.startswith("Detected 0 of 2 hosts of t in the cluster")
    again = readiness.next(sight("ready"), 2.5)
    assert isinstance(again, Wait)
    assert not again.text, "what has been told is not told again"
    one = readiness.next(sight("ready", 1), 3.0)
    assert isinstance(one, Wait)
    assert one.text.startswith("Detected 1 of 2")
    assert readiness.next(sight("ready", 2), 4.0) == Done()


def test_pauses_grow_up_to_the_longest_and_shrink_with_news() -> None:
    readiness = Readiness("t", JoinPolicy(join_s=1e6, poll_s=5))
    pauses = []
    for step in range(20):
        action = readiness.next(sight("ready"), float(step))
        assert isinstance(action, Wait)
        pauses.append(action.pause_s)
    assert pauses == sorted(pauses)
    assert pauses[0] == 0.25
    assert pauses[-1] == 5
    news = readiness.next(sight("ready", 1), 30.0)
    assert isinstance(news, Wait)
    assert news.pause_s == 0.25


def test_hosts_that_do_not_join_are_made_anew_with_more_patience_each_time() -> None:
    readiness = Readiness("t", JoinPolicy(join_s=10, recreations=2))
    now = 0.0
    for patience in (10, 20):
        assert isinstance(readiness.next(sight("ready", 1), now), Wait)
        assert isinstance(readiness.next(sight("ready", 1), now + patience - 1), Wait)
        action = readiness.next(sight("ready", 1), now + patience)
        assert action == Delete(
            f"only 1 of 2 hosts of t joined the Ray cluster within {patience} s"
        )
        assert readiness.next(sight("absent"), now + patience) == Create()
        now += 100
    assert isinstance(readiness.next(sight("ready", 1), now), Wait)
    end = readiness.next(sight("ready", 1), now + 40)
    assert isinstance(end, GiveUp)
    assert "(tried 3 times)" in end.reason


def test_a_startup_script_that_fails_is_not_waited_for() -> None:
    readiness = Readiness("t", JoinPolicy(join_s=10, recreations=1))
    broken = sight("ready", 0, "host 1: exit status 1: no such file")
    assert isinstance(readiness.next(broken, 0.0), Delete)
    end = readiness.next(broken, 1.0)
    assert isinstance(end, GiveUp)
    assert "host 1: exit status 1: no such file" in end.reason


def test_hosts_of_another_version_are_not_made_anew() -> None:
    readiness = Readiness("t", JoinPolicy(join_s=10, recreations=3))
    differs = sight("ready", 0, "host 0: exit status 1: RuntimeError: Version mismatch: …")
    end = readiness.next(differs, 0.0)
    assert isinstance(end, GiveUp)
    assert "Version mismatch" in end.reason


def test_hosts_that_have_lost_ray_join_again_as_they_are() -> None:
    readiness = Readiness("t", JoinPolicy(join_s=10))
    lapsed = Sight("ready", "READY", 1, 2, lapsed=True)
    assert isinstance(readiness.next(lapsed, 0.0), Wait), "Ray may hear of the node a bit later"
    assert readiness.next(lapsed, 1.0) == Rejoin()
    assert isinstance(readiness.next(lapsed, 1.1), Wait)
    assert readiness.next(lapsed, 2.2) == Rejoin()
    assert isinstance(readiness.next(lapsed, 9.0), Wait), "and not for ever"
    assert isinstance(readiness.next(lapsed, 10.0), Delete)


def test_a_host_that_was_there_and_is_lost_joins_again_at_once() -> None:
    readiness = Readiness("t", JoinPolicy(join_s=10))
    lost = Sight("ready", "READY", 1, 2, lapsed=True, lost=True)
    assert readiness.next(lost, 0.0) == Rejoin()
    assert isinstance(readiness.next(lost, 0.1), Wait), "the node may be heard of a bit later"
    assert readiness.next(lost, 1.2) == Rejoin()
    under_way = Sight("ready", "READY", 1, 2, lost=True)
    assert isinstance(Readiness("t", JoinPolicy()).next(under_way, 0.0), Wait)


def test_a_dead_tpu_is_made_anew_and_the_time_to_join_begins_again() -> None:
    readiness = Readiness("t", JoinPolicy(join_s=10, recreations=5))
    assert isinstance(readiness.next(sight("ready"), 0.0), Wait)
    assert readiness.next(sight("dead"), 5.0) == Delete("t is DEAD")
    assert isinstance(readiness.next(sight("ready"), 9.0), Wait)
    assert isinstance(readiness.next(sight("ready"), 28.0), Wait), "20 s from when it was ready"


@pytest.mark.parametrize("wrong", [{"join_s": 0}, {"poll_s": -1}, {"recreations": -1}])
def test_wrong_policies(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        JoinPolicy(**wrong)  # type: ignore[arg-type]


def test_hosts_whose_scripts_found_no_head_join_again_before_they_are_made_anew() -> None:
    readiness = Readiness("t", JoinPolicy(join_s=1000, recreations=1))
    seen = Sight("ready", "READY", 1, 2, "host 1: exit status 1: no GCS", lapsed=True)
    for now in (0.0, 10.0):
        assert isinstance(readiness.next(seen, now), Wait)
        assert readiness.next(seen, now + 5) == Rejoin()
    action = readiness.next(seen, 20.0)
    assert action == Delete("the startup script of t failed: host 1: exit status 1: no GCS")
