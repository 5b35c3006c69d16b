"""The client's threads sleep longer than they ask for; the script's own do not."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from regrow.client.slack import coarse_timers


def slack_ns() -> int:
    return int(Path(f"/proc/{threading.get_native_id()}/timerslack_ns").read_text())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="timer slack is Linux's")
def test_only_threads_that_are_started_inside_may_sleep_longer() -> None:
    told: list[int] = []
    before = slack_ns()
    with coarse_timers():
        thread = threading.Thread(target=lambda: told.append(slack_ns()))
        thread.start()
    thread.join(10)
    assert told == [5_000_000]
    assert slack_ns() == before
