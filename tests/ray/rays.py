"""What tests need to know of Ray's processes."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import waiting
from regrow.processes import ProcessStat, name_of

LONG = 300.0
until = functools.partial(waiting.until, timeout_s=LONG)


def raylet_at(address: str) -> int:
    """The raylet of the node with an address."""
    for pid in raylets_at(address):
        return pid
    raise AssertionError(f"no raylet at {address}")


def raylets_at(address: str) -> Iterator[int]:
    """The raylets that say that they are of the node with an address."""
    wanted = f"--node_ip_address={address}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"/raylet") and wanted in words:
            yield int(entry.name)


def described(pids: Iterable[int]) -> str:
    """Processes in one line: state, age and command of each, and below whom it is."""
    return "; ".join(one for pid in sorted(pids) if (one := _described(pid)))


def _described(pid: int) -> str:
    stat = ProcessStat.of(pid)
    if stat is None:
        return ""
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - stat.start_ticks / os.sysconf("SC_CLK_TCK")
    try:
        # A process that has named itself leaves the rest of its words empty.
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    command = " ".join(filter(None, words)) or name_of(pid)
    above = " < ".join(_above(stat.parent)) or "nobody"
    return f"{pid} ({stat.state}, {age_s:.0f} s old) {command!r} below {above}"


def _above(pid: int) -> Iterator[str]:
    while pid > 1 and (stat := ProcessStat.of(pid)):
        yield f"{pid} {name_of(pid)} ({stat.state})"
        pid = stat.parent
