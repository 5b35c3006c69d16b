"""Where a program is that asks for nothing."""

from __future__ import annotations

import sys
import threading

from regrow.client import where as module
from regrow.client.where import told, where


def test_the_main_thread_is_told_from_another() -> None:
    found: list = []
    thread = threading.Thread(target=lambda: found.extend(where()))
    thread.start()
    thread.join()
    loads, text = found
    assert bool(loads) is False
    line = bytes(text).decode()
    assert f"{__file__}:" in line
    assert "(test_the_main_thread_is_told_from_another)" in line
    assert "which waits in " in line


class Loader:
    def __next__(self):
        return where()


def test_a_loader_is_known_by_its_name() -> None:
    loads, _ = next(Loader())
    assert bool(loads) is True


def test_a_thread_that_has_ended(monkeypatch) -> None:
    assert told([]) == "its main thread has ended"
    monkeypatch.setattr(sys, "_current_frames", dict)
    loads, text = module.where()
    assert (bool(loads), bytes(text)) == (False, b"its main thread has ended")
