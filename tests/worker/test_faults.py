"""The faults that a process makes itself, in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys

SAY = """
import os, sys, time
from regrow.worker.faults import Faults
faults = Faults()
def say(text):
    try:
        os.write(1, text)
    except OSError as error:
        return error.strerror
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SAY + code], capture_output=True, text=True, timeout=60
    )


def test_an_exit() -> None:
    done = run("faults.make('exit')")
    assert (done.returncode, done.stdout) == (1, "")


def test_memory_is_used_up_until_the_process_dies_of_it() -> None:
    done = run("faults.make('oom'); time.sleep(50)")
    assert done.returncode == -signal.SIGABRT
    assert "std::bad_alloc" in done.stderr


def test_a_host_without_memory_for_what_it_is_sent_ends() -> None:
    done = run(
        "import resource\n"
        "from regrow.channel import commands as c\n"
        "from regrow.channel.arena import Arena\n"
        "from regrow.worker.host import Host\n"
        "arena = Arena(1 << 30)\n"
        "block = arena.alloc(512 << 20)\n"
        "number = block.ref()[0]\n"
        "path, size = arena.segment_path(number), arena.segment_bytes(number)\n"
        "host = Host([0], '127.0.0.1')\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * os.sysconf('SC_PAGE_SIZE')\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), -1))\n"
        "host.on_payload(c.pack_all((c.Segment(number, path, size),)))\n"
    )
    assert (done.returncode, "no room for" in done.stderr) == (71, True), done.stderr


def test_a_full_disk_takes_nothing_until_it_is_mended() -> None:
    done = run(
        "say(b'before '); faults.make('diskfull'); faults.make('diskfull'); why = say(b'lost');"
        "faults.make('mend'); faults.make('mend'); say(why.encode())"
    )
    assert (done.returncode, done.stdout) == (0, "before No space left on device")
