"""Cycles end on a thread of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from regrow import LocalCluster

ARENA = 64 << 20

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


THREADS = """
import threading, time
import numpy as np
from pathlib import Path
from regrow.worker import garbage

garbage._LOOK_S = 0.05
garbage.share_one_arena()
garbage.collect_aside(lambda: 0)
together = threading.Barrier(6)

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

def work():
    together.wait()
    pieces = [np.ones(10_000) for _ in range(300)]
    together.wait()

before = resident_mib()
threads = [threading.Thread(target=work) for _ in range(5)]
for thread in threads:
    thread.start()
together.wait()
together.wait()
for thread in threads:
    thread.join()
deadline = time.monotonic() + 20
while resident_mib() - before > 20 and time.monotonic() < deadline:
    time.sleep(0.02)
print(resident_mib() - before <= 20)
"""

STUCK = """
import gc, threading
from regrow.worker import garbage

gc.disable()
begun, go_on, gone = threading.Event(), threading.Event(), threading.Event()

class InACycle:
    def __init__(self, end):
        self.me, self.end = self, end

    def __del__(self):
        self.end()

def be_stuck():
    begun.set()
    go_on.wait(20)

InACycle(be_stuck)
stuck = threading.Thread(target=garbage.collect)
stuck.start()
begun.wait(20)
InACycle(gone.set)
other = threading.Thread(target=garbage.collect)
other.start()
other.join(0.2)
go_on.set()
stuck.join()
other.join()
print(gone.is_set())
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


def test_what_threads_held_that_have_ended_goes_back() -> None:
    assert run_script(THREADS) == "True"


def test_what_becomes_garbage_while_another_thread_is_stuck_in_its_end_goes_too() -> None:
    assert run_script(STUCK) == "True"


def test_all_threads_of_a_worker_share_the_arena_that_goes_back() -> None:
    with LocalCluster(slices=1, devices_per_slice=2) as cluster:
        (pid,) = cluster.slices[0].pids
        assert further_arenas(pid) == 0


def further_arenas(pid: int) -> int:
    """How many arenas of malloc's there are beside the first: each reserves 64 MiB at such a place."""
    rows = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    spans = [tuple(int(end, 16) for end in row[0].split("-")) for row in rows]
    return sum(
        start % ARENA == 0 and kind[1].startswith("rw") and rest == (end, start + ARENA)
        for (start, end), rest, kind in zip(spans, spans[1:], rows, strict=False)
    )
