"""Cycles end on a thread of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

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

garbage.collect_aside(lambda: 0)
deadline = time.monotonic() + 20
while not ended and time.monotonic() < deadline:
    kept = [InACycle() for _ in range(30_000)]
    del kept
    time.sleep(0.02)
print(ended)
"""

MEMORY = """
import time
from pathlib import Path
from regrow.worker import garbage

garbage._LOOK_S = 0.05
done = 0

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

garbage.collect_aside(lambda: done)
before = resident_mib()
# Some stay: without a trim the pages between them stay, too.
blocks = [bytearray(b"x" * 100_000) for _ in range(2000)]
full = resident_mib()
kept = blocks[::50]
done = 1
time.sleep(WAIT_S)
del blocks
deadline = time.monotonic() + 20
while resident_mib() - before > (full - before) / 4 and time.monotonic() < deadline:
    time.sleep(0.02)
print(full - before > 150, resident_mib() - before <= (full - before) / 4)
"""

REUSED = """
import itertools, resource
from regrow.worker import garbage

garbage.collect_aside(itertools.count().__next__)

def faults_of_another_snapshot():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    [bytearray(b"x") * (8 << 20) for _ in range(4)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

found = [faults_of_another_snapshot() for _ in range(20)]
print(found[0] > 100, sum(found[5:]) < 100)
"""


def run_script(script: str) -> str:
    made = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    return made.stdout.strip()


@pytest.mark.parametrize("wait_s", [0.0, 0.5], ids=["at once", "long after its last work"])
def test_an_idle_process_gives_freed_memory_back(wait_s: float) -> None:
    assert run_script(MEMORY.replace("WAIT_S", str(wait_s))) == "True True"


def test_a_busy_process_keeps_it_for_the_next_snapshot() -> None:
    assert run_script(REUSED) == "True True"


def test_no_other_thread_ends_what_is_in_a_cycle() -> None:
    assert run_script(SCRIPT) == "{'garbage'}"
