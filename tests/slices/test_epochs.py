"""Epochs: their keys, numbers and ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.errors import UsageError
from regrow.slices import Epoch, EpochBook


@pytest.fixture
def book() -> EpochBook:
    book = EpochBook()
    for host in range(3):
        book.host_up(host, 1)
    return book


def test_an_epoch_is_of_a_set_of_hosts(book: EpochBook) -> None:
    epoch = book.current([2, 0, 2])
    assert epoch == Epoch(1, ((0, 1), (2, 1)))
    assert epoch.hosts == (0, 2)
    assert epoch.rank(2) == 1
    assert epoch.has(2, 1)
    assert not epoch.has(2, 2)
    assert book.current((0, 2)) is epoch
    assert book.get(1) is epoch
    other = book.current([0, 1, 2])
    assert other is not None
    assert other.number == 2
    assert book.epochs_of(1) == (other,)
    assert book.epochs_of(0) == (epoch, other)


def test_there_is_no_epoch_without_a_host_or_with_one_that_is_not_there(book: EpochBook) -> None:
    assert book.current([]) is None
    assert book.current([0, 7]) is None
    assert book.key([0, 7]) is None
    book.host_lost(0, 1)
    assert book.current([0]) is None


def test_a_lost_host_ends_its_epochs_and_no_others(book: EpochBook) -> None:
    both, one, rest = book.current([0, 1]), book.current([1]), book.current([0, 2])
    assert book.host_lost(1, 1) == (both, one)
    assert book.epochs() == (rest,)
    assert both is not None
    assert book.get(both.number) is None


def test_a_returned_host_makes_new_epochs(book: EpochBook) -> None:
    first = book.current([0, 1])
    book.host_lost(1, 1)
    book.host_up(1, 2)
    second = book.current([0, 1])
    assert first is not None
    assert second == Epoch(2, ((0, 1), (1, 2)))


def test_the_loss_of_an_old_incarnation_ends_nothing(book: EpochBook) -> None:
    book.host_lost(1, 1)
    book.host_up(1, 2)
    epoch = book.current([0, 1])
    assert book.host_lost(1, 1) == ()
    assert book.epochs() == (epoch,)
    assert book.hosts() == ((0, 1), (1, 2), (2, 1))


def test_a_broken_link_ends_an_epoch_but_no_host(book: EpochBook) -> None:
    epoch = book.current([0, 1])
    assert epoch is not None
    assert book.invalidate(epoch.number)
    assert not book.invalidate(epoch.number)
    assert book.current([0, 1]) == Epoch(2, epoch.key)


def test_a_host_cannot_be_two(book: EpochBook) -> None:
    book.host_up(0, 1)
    with pytest.raises(UsageError, match="host 0 comes as incarnation 2, but 1 is not lost"):
        book.host_up(0, 2)


@given(st.lists(st.tuples(st.sampled_from(["lose", "up", "ask", "break"]), st.integers(0, 15))))
def test_whatever_happens_the_book_is_in_order(steps: list[tuple[str, int]]) -> None:
    book = EpochBook()
    incarnations = dict.fromkeys(range(4), 0)
    numbers: set[int] = set()
    for step, value in steps:
        host = value % 4
        if step == "up" and (host not in dict(book.hosts())):
            incarnations[host] += 1
            book.host_up(host, incarnations[host])
        elif step == "lose":
            ended = book.host_lost(host, incarnations[host])
            assert all(epoch.has(host, incarnations[host]) for epoch in ended)
        elif step == "break" and book.epochs():
            assert book.invalidate(book.epochs()[value % len(book.epochs())].number)
        elif step == "ask":
            known = book.epochs()
            epoch = book.current(one for one in range(4) if value & 1 << one)
            if epoch is not None and epoch not in known:
                assert epoch.number not in numbers
                numbers.add(epoch.number)
        book.validate()
