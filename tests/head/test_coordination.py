"""The state of coordination services, without I/O."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.errors import Code, StatusError
from regrow.head import coordination
from regrow.head.coordination import NOWHERE, Coordination, Rendezvous

KEYS = (70, 71, 72)


class Answers:
    """What a call is answered with."""

    def __init__(self) -> None:
        self.all: list[Any] = []

    def __call__(self, error: StatusError | None, value: Any) -> None:
        self.all.append(value if error is None else error.code)


def rendezvous(present: int = 3) -> Rendezvous:
    made = Rendezvous(1, KEYS, 99)
    for key in KEYS[:present]:
        made.register(key, key * 10)
    return made


def code(call: Any, *arguments: Any) -> Code:
    with pytest.raises(StatusError) as caught:
        call(*arguments)
    return caught.value.code


# --- members --------------------------------------------------------------------------------------


def test_epochs_are_told_apart() -> None:
    all_epochs = Coordination("unix:here")
    one, other = all_epochs.open(1, 3), all_epochs.open(2, 2)
    assert len({*one, *other}) == 5
    secret = all_epochs.register(one[2], 5)
    found = all_epochs.find(secret)
    assert found is not None
    assert (found.epoch, found.node(one[2])) == (1, 2)
    assert all_epochs.register(one[0], 6) == secret
    assert all_epochs.register(other[0], 7) not in (secret, NOWHERE)
    assert code(found.node, other[0]) == Code.INVALID_ARGUMENT
    all_epochs.close(1)
    all_epochs.close(1)
    assert all_epochs.find(secret) is None
    assert all_epochs.register(one[2], 5) == NOWHERE
    assert all_epochs.find(NOWHERE) is None
    assert all_epochs.register(other[1], 8) != NOWHERE


def test_a_poll_lasts_until_its_member_leaves_or_the_epoch_ends() -> None:
    meeting = rendezvous()
    polls = [Answers() for _ in KEYS]
    for key, answers in zip(KEYS, polls, strict=True):
        meeting.poll(key, answers)
    meeting.leave(KEYS[0])
    meeting.leave(KEYS[0])
    meeting.leave(12345)
    assert [answers.all for answers in polls] == [[Code.CANCELLED], [], []]
    again = Answers()
    meeting.poll(KEYS[1], again)
    assert polls[1].all == [Code.CANCELLED]
    meeting.close()
    assert (polls[2].all, again.all) == ([Code.CANCELLED], [Code.CANCELLED])
    assert code(meeting.poll, 12345, again) == Code.INVALID_ARGUMENT


def test_members_are_watched() -> None:
    meeting = rendezvous(2)
    now, later = Answers(), Answers()
    meeting.watch(-1, now)
    ((version, members),) = now.all
    assert members == [700, 710, None]
    meeting.watch(version, later)
    assert not later.all
    meeting.register(KEYS[2], 720)
    assert later.all == [(version + 1, [700, 710, 720])]
    # A member whose poll is no more, as its connection is gone, is gone.
    poll = meeting.poll(KEYS[0], Answers())
    gone = Answers()
    meeting.watch(version + 1, gone)
    poll.drop()
    assert gone.all == [(version + 2, [None, 710, 720])]


# --- values ---------------------------------------------------------------------------------------


def test_values_wait_for_their_readers_and_readers_for_their_values() -> None:
    meeting = rendezvous()
    early, late, gone = Answers(), Answers(), Answers()
    meeting.read("a/b", early)
    meeting.read("/a//b/", gone).drop()
    meeting.insert("a/b", b"1", False)
    meeting.read("a/b", late)
    assert (early.all, late.all, gone.all) == ([b"1"], [b"1"], [])
    assert code(meeting.insert, "a/b/", b"2", False) == Code.ALREADY_EXISTS
    meeting.insert("a/b", b"2", True)
    assert meeting.read_now("a/b") == b"2"
    assert early.all == [b"1"]
    assert code(meeting.read_now, "a") == Code.NOT_FOUND


def test_directories() -> None:
    meeting = rendezvous()
    for name in ("a", "a/b", "a/c/d", "ab"):
        meeting.insert(name, name.encode(), False)
    assert meeting.directory("a/") == [("a/b", b"a/b"), ("a/c/d", b"a/c/d")]
    meeting.delete("a")
    assert meeting.directory("a") == []
    assert code(meeting.read_now, "a") == Code.NOT_FOUND
    assert meeting.read_now("ab") == b"ab"


def test_numbers() -> None:
    meeting = rendezvous()
    reader = Answers()
    meeting.read("n", reader)
    assert [meeting.increment("n", step) for step in (3, -5)] == [b"3", b"-2"]
    assert reader.all == [b"3"]
    meeting.insert("text", b"x", False)
    assert code(meeting.increment, "text", 1) == Code.FAILED_PRECONDITION
    meeting.insert("large", b"%d" % ((1 << 63) - 1), False)
    assert code(meeting.increment, "large", 1) == Code.OUT_OF_RANGE


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination, "_VALUES_BYTES", 10_000)
    monkeypatch.setattr(coordination, "_WAITS", 3)
    meeting = rendezvous()
    meeting.insert("a", bytes(9_000), False)
    assert code(meeting.insert, "b", bytes(9_000), False) == Code.RESOURCE_EXHAUSTED
    meeting.insert("a", bytes(9_500), True)
    meeting.delete("a")
    meeting.insert("b", bytes(9_000), False)
    for number in range(100):
        meeting.increment("n", number)
    waits = [meeting.read("c", Answers()) for _ in range(3)]
    for wait, arguments in ((meeting.read, ["c"]), (meeting.poll, [70]), (meeting.watch, [-1])):
        assert code(wait, *arguments, Answers()) == Code.RESOURCE_EXHAUSTED
    waits[0].drop()
    meeting.read("c", Answers())


# --- waiting for each other -----------------------------------------------------------------------


def test_a_barrier() -> None:
    meeting = rendezvous()
    answers = [Answers() for _ in KEYS]
    meeting.barrier("b", 0, [], KEYS[0], answers[0])
    meeting.barrier("b", 1, [], KEYS[0], Answers())
    meeting.barrier("b", 0, [2, 1, 0], KEYS[1], answers[1])
    assert not answers[1].all
    meeting.barrier("b", 0, [], KEYS[2], answers[2])
    assert all(len(each.all) == 1 and not isinstance(each.all[0], Code) for each in answers)
    some = Answers()
    meeting.barrier("c", 0, [0, 1], KEYS[0], some)
    assert code(meeting.barrier, "c", 0, [0, 2], KEYS[2], Answers()) == Code.INVALID_ARGUMENT
    assert code(meeting.barrier, "d", 0, [0, 1], KEYS[2], Answers()) == Code.INVALID_ARGUMENT
    assert code(meeting.barrier, "d", 0, [0, 3], KEYS[0], Answers()) == Code.INVALID_ARGUMENT
    meeting.barrier("c", 0, [0, 1], KEYS[1], Answers())
    assert len(some.all) == 1


def test_a_barrier_that_is_given_up() -> None:
    meeting = rendezvous()
    first, second = Answers(), Answers()
    meeting.barrier("b", 0, [], KEYS[0], first).drop()
    meeting.barrier("b", 0, [], KEYS[1], second)
    meeting.barrier("b", 0, [], KEYS[2], Answers())
    assert not second.all  # The first has not come.
    meeting.cancel_barrier("b", 0)
    meeting.cancel_barrier("b", 0)
    assert (first.all, second.all) == ([], [Code.CANCELLED])
    again = Answers()
    meeting.barrier("b", 0, [], KEYS[1], again)
    meeting.poll(KEYS[0], Answers())
    meeting.leave(KEYS[0])
    assert again.all == [Code.ABORTED]
    late, without = Answers(), Answers()
    meeting.barrier("c", 0, [], KEYS[1], late)
    meeting.barrier("d", 0, [1], KEYS[1], without)
    assert late.all == [Code.ABORTED]
    assert without.all == [[(1, KEYS[1] * 10)]]
    meeting.register(KEYS[0], 1)
    back = Answers()
    meeting.barrier("c", 1, [], KEYS[1], back)
    assert not back.all


def test_who_is_alive() -> None:
    meeting = rendezvous(2)
    one, other = Answers(), Answers()
    polls = {key: meeting.poll(key, Answers()) for key in KEYS[:2]}
    meeting.alive([0, 1, 2], KEYS[0], one)
    assert not one.all
    polls[KEYS[1]].drop()  # It has been killed.
    assert one.all == [[(0, 700)]]
    meeting.alive([0, 1], KEYS[0], other)
    assert other.all == [[(0, 700)]]
    assert code(meeting.alive, [1, 2], KEYS[0], Answers()) == Code.INVALID_ARGUMENT


# --- anything -------------------------------------------------------------------------------------

names = st.sampled_from(["", "a", "a/b", "/a//b", "é"])
keys = st.sampled_from([*KEYS, 5])
nodes = st.lists(st.integers(-1, 3), max_size=3)
acts = st.one_of(
    st.tuples(st.just("register"), keys, st.integers(0, 3)),
    st.tuples(st.just("leave"), keys),
    st.tuples(st.just("insert"), names, st.binary(max_size=3), st.booleans()),
    st.tuples(st.just("delete"), names),
    st.tuples(st.just("increment"), names, st.integers(-2, 2)),
    st.tuples(st.just("cancel_barrier"), names, st.integers(0, 1)),
    st.tuples(st.just("poll"), keys),
    st.tuples(st.just("watch"), st.integers(-1, 5)),
    st.tuples(st.just("read"), names),
    st.tuples(st.just("barrier"), names, st.integers(0, 1), nodes, keys),
    st.tuples(st.just("alive"), nodes, keys),
    st.tuples(st.just("drop"), st.integers(0, 50)),
)


@given(st.lists(acts, max_size=60))
def test_every_wait_ends_once_and_nothing_is_kept(script: list[Any]) -> None:
    meeting = Rendezvous(1, KEYS, 99)
    waits: list[tuple[Any, Answers]] = []
    dropped = set()
    for name, *arguments in script:
        if name == "drop":
            for number, (wait, answers) in enumerate(waits):
                if number == arguments[0] and not answers.all:
                    wait.drop()
                    dropped.add(number)
            continue
        try:
            if name in ("poll", "watch", "read", "barrier", "alive"):
                answers = Answers()
                waits.append((getattr(meeting, name)(*arguments, answers), answers))
            else:
                getattr(meeting, name)(*arguments)
        except StatusError:
            continue  # Refused: it shall leave nothing behind.
    meeting.close()
    for number, (_, answers) in enumerate(waits):
        assert len(answers.all) == (number not in dropped)
    kept = (meeting._waits, meeting._reads, meeting._polls, meeting._watches, meeting._gatherings)
    assert not any(kept)
    for name in list(meeting._values):
        meeting.delete(name)
    assert meeting._used_bytes == 0
