"""Launches that may not return are left alone."""

from __future__ import annotations

import threading

import pytest

from regrow.worker.maker import Abandoned, Maker


def fails() -> None:
    raise LookupError("text")


def test_what_is_made_is_returned_or_raised() -> None:
    maker = Maker("maker")
    here = threading.get_ident()
    assert maker.make(threading.get_ident) != here
    with pytest.raises(LookupError, match="text"):
        maker.make(fails)
    assert maker.make(lambda: 5) == 5
    assert maker.present is None
    maker.close()


def test_what_does_not_return_is_abandoned_and_so_is_all_that_comes() -> None:
    maker, stuck, entered = Maker("stuck maker"), threading.Event(), threading.Event()
    raised: list[BaseException] = []

    def run() -> None:
        entered.set()
        stuck.wait(60)

    def make() -> None:
        try:
            maker.make(run)
        except Abandoned as abandoned:
            raised.append(abandoned)

    waiting = threading.Thread(target=make)
    waiting.start()
    assert entered.wait(20)
    assert maker.present is not None
    maker.abandon()
    waiting.join(20)
    assert len(raised) == 1
    with pytest.raises(Abandoned):
        maker.make(lambda: 5)
    # The thread itself ends when it comes back.
    (thread,) = [one for one in threading.enumerate() if one.name == "stuck maker"]
    stuck.set()
    thread.join(20)
    assert not thread.is_alive()


def test_what_fails_because_it_was_abandoned_is_abandoned() -> None:
    maker = Maker("maker")

    def run() -> None:
        maker.abandon()
        raise LookupError("a link is down")  # Before who waits for it has woken up.

    with pytest.raises(Abandoned):
        maker.make(run)
