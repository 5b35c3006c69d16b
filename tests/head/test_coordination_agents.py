"""XLA's own agents at the head's coordination service, each in a process that must not end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from acting_process import ActingProcess
from coordination_rig import Epoch, ServedCoordination

AGENT = Path(__file__).with_name("coordination_agent.py")


class Process(ActingProcess):
    """A process with agents. What comes of an act is ["value", it] or ["error", text]."""

    def __init__(self) -> None:
        super().__init__(AGENT)

    def do(self, *act: Any) -> Any:
        self.begin(*act)
        kind, what = self.end()
        assert kind == "value", what
        return what

    def refused(self, *act: Any) -> str:
        self.begin(*act)
        kind, what = self.end()
        assert kind == "error"
        return str(what)

    def join(self, epoch: Epoch, node: int, name: str = "a") -> None:
        self.do("connect", name, epoch.address, epoch.keys[node])


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedCoordination]:
    made = ServedCoordination(tmp_path / "epochs é?#%20.sock")
    yield made
    made.stop()


@pytest.fixture
def pair(served: ServedCoordination) -> Iterator[tuple[Process, Process]]:
    made = (Process(), Process())
    yield made
    for process in made:
        process.close()


Pair = tuple[Process, Process]


def test_values_go_from_one_to_the_other(served: ServedCoordination, pair: Pair) -> None:
    one, other = pair
    epoch = served.open(3)
    one.join(epoch, 0)  # The third never comes, and nobody waits for it.
    other.join(epoch, 2)
    other.begin("call", "a", "blocking_key_value_get", "later", 60_000)
    one.do("call", "a", "key_value_set", "early", "1")
    one.do("call", "a", "key_value_set", "later", "2")
    assert other.end() == ["value", "2"]
    assert other.do("call", "a", "blocking_key_value_get", "early", 60_000) == "1"
    assert "ALREADY_EXISTS" in other.refused("call", "a", "key_value_set", "early", "9")
    other.do("call", "a", "key_value_set", "early", "9", True)
    assert one.do("call", "a", "key_value_try_get", "early") == "9"
    assert "NOT_FOUND" in one.refused("call", "a", "key_value_try_get", "never")
    # A wait ends at its own deadline, and the agent goes on.
    text = one.refused("call", "a", "blocking_key_value_get", "never", 100)
    assert "DEADLINE_EXCEEDED" in text


def test_directories_and_numbers(served: ServedCoordination, pair: Pair) -> None:
    one, other = pair
    epoch = served.open(2)
    one.join(epoch, 0)
    other.join(epoch, 1)
    for name in ("d/x", "d/y/z", "dd"):
        one.do("call", "a", "key_value_set", name, name.upper())
    found = other.do("call", "a", "key_value_dir_get", "d")
    assert sorted(found) == [["d/x", "D/X"], ["d/y/z", "D/Y/Z"]]
    other.do("call", "a", "key_value_delete", "d")
    assert one.do("call", "a", "key_value_dir_get", "d") == []
    assert one.do("call", "a", "key_value_try_get", "dd") == "DD"
    assert [one.do("call", "a", "key_value_increment", "n", step) for step in (5, -7)] == [5, -2]


def test_members_wait_for_each_other(served: ServedCoordination, pair: Pair) -> None:
    one, other = pair
    epoch = served.open(2)
    one.join(epoch, 0)
    other.join(epoch, 1)
    for again in range(2):
        for nodes in ([], [[0, 1]]):
            one.begin("call", "a", "wait_at_barrier", f"b{again}", 60_000, *nodes)
            other.do("call", "a", "wait_at_barrier", f"b{again}", 60_000, *nodes)
            assert one.end()[0] == "value"
    text = one.refused("call", "a", "wait_at_barrier", "alone", 100)
    assert "DEADLINE_EXCEEDED" in text
    one.do("call", "a", "wait_at_barrier", "self", 60_000, [0])
    one.begin("call", "a", "get_live_nodes", [0, 1])
    assert sorted(other.do("call", "a", "get_live_nodes", [0, 1])) == ["0", "1"]
    assert one.end()[0] == "value"


def test_gangs_form_and_a_newcomer_joins_the_next(served: ServedCoordination, pair: Pair) -> None:
    one, other = pair
    for name in ("a", "b", "c"):
        epoch = served.open(2)
        for node, process in enumerate(pair):
            process.join(epoch, node, name)
        one.begin("form", name, 0, 2)
        assert other.do("form", name, 1, 2) == 4
        assert one.end() == ["value", 4]
    one.do("call", "a", "shutdown")
    one.do("call", "b", "key_value_set", "still", "here")
    assert other.do("call", "b", "key_value_try_get", "still") == "here"


def test_an_absent_member_costs_the_others_nothing_but_the_epoch(
    served: ServedCoordination, pair: Pair
) -> None:
    epoch = served.open(3)
    for node, process in enumerate(pair):
        process.join(epoch, node)
        process.begin("form", "a", node, 3)
    time.sleep(0.2)
    assert pair[0].lives()
    started = time.monotonic()
    served.close(epoch)  # The head has heard of the third's death.
    for process in pair:
        kind, text = process.end()
        assert kind == "error"
        assert "coordination service" in text
    assert time.monotonic() - started < 30  # and not after the minute that XLA would wait
    following = served.open(2)
    for node, process in enumerate(pair):
        process.join(following, node, "b")
        process.begin("form", "b", node, 2)
    assert [process.end() for process in pair] == [["value", 4]] * 2


def test_a_member_that_is_killed_takes_nobody_along(served: ServedCoordination, pair: Pair) -> None:
    one, other = pair
    epoch = served.open(2)
    one.join(epoch, 0)
    other.join(epoch, 1)
    one.begin("call", "a", "wait_at_barrier", "b", 60_000)
    other.kill()
    kind, text = one.end()
    assert (kind, "node 1 has left" in text) == ("error", True)
    assert one.do("call", "a", "get_live_nodes", [0, 1]).keys() == {"0"}
    one.do("call", "a", "key_value_set", "still", "here")


def test_a_service_that_closes_leaves_its_members_alive(
    served: ServedCoordination, pair: Pair
) -> None:
    one, other = pair
    first, second = served.open(2), served.open(2)
    for node, process in enumerate(pair):
        process.join(first, node, "a")
        process.join(second, node, "b")
    one.begin("call", "a", "blocking_key_value_get", "never", 60_000)
    other.begin("call", "a", "wait_at_barrier", "never", 60_000)
    time.sleep(0.2)
    served.close(first)
    for process in pair:
        kind, text = process.end()
        assert kind == "error"
        assert "has closed" in text
    for process in pair:
        assert "has closed" in process.refused("call", "a", "key_value_set", "k", "v")
        assert "has closed" in process.refused("call", "a", "wait_at_barrier", "again", 1000)
        process.do("call", "a", "shutdown")
    # The other epoch goes on, and is not reached from the first.
    one.do("call", "b", "key_value_set", "k", "v")
    assert other.do("call", "b", "blocking_key_value_get", "k", 60_000) == "v"


def test_who_comes_late_or_to_nowhere_lives_on(served: ServedCoordination, pair: Pair) -> None:
    one, other = pair
    epoch, following = served.open(2), served.open(1)
    served.close(epoch)
    for process, key in ((one, epoch.keys[0]), (other, 12345)):
        process.do("connect", "a", epoch.address, key)
        assert "has closed" in process.refused("form", "a", 0, 2)
        process.do("call", "a", "shutdown")
        process.join(following, 0, "b")
        assert process.do("call", "b", "key_value_increment", "n", 1) > 0


def test_an_agent_with_heartbeats_outlives_its_service(
    served: ServedCoordination, pair: Pair
) -> None:
    epoch = served.open(2)
    for node, process in enumerate(pair):
        process.do("connect_beating", "a", epoch.address, epoch.keys[node])
    time.sleep(1.5)
    served.close(epoch)
    time.sleep(3)
    for process in pair:
        process.do("call", "a", "shutdown")
        assert process.lives()
