"""Cycles end on a thread of their own."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import threading, time
from regrow.worker import garbage

garbage._LOOK_S = 0.01
ended = set()

class InACycle:
    def __init__(self):
        self.me = self

    def __del__(self):
        ended.add(threading.current_thread().name)

garbage.collect_aside()
deadline = time.monotonic() + 20
while not ended and time.monotonic() < deadline:
    kept = [InACycle() for _ in range(30_000)]
    del kept
    time.sleep(0.02)
print(ended)
"""


def test_no_other_thread_ends_what_is_in_a_cycle() -> None:
    made = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True
    )
    assert made.stdout.strip() == "{'garbage'}"
