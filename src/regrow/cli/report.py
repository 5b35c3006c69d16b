"""What `regrow run` and `regrow up` tell of a cluster: a line for each thing that happens."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from typing import Final, final

from regrow.config import HeadConfig
from regrow.control import Event
from regrow.processes import ProcessStat

_SAID_ALREADY: Final = re.compile(r"^slice \d+ was lost: ")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def say(text: str) -> None:
    """Prints a line about the cluster; standard output belongs to the script."""
    if sys.stderr is not None:  # Else `print` would take it to standard output.
        print(f"regrow: {text}", file=sys.stderr, flush=True)


def since_start_s() -> float:
    """Seconds since this process began, the start of Python included."""
    stat = ProcessStat.of(os.getpid())
    assert stat is not None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - stat.start_ticks / _TICKS_PER_S


def count(number: int, thing: str) -> str:
    """A number of things in words."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def duration(seconds: float) -> str:
    """A duration for people."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"


@contextlib.contextmanager
def goes_on(what: str, name: str) -> Iterator[None]:
    """Tells at a Ctrl-C that what a head or a manager was asked for goes on."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"{what} goes on; see: regrow status --cluster {name}")
        raise SystemExit(128 + signal.SIGINT) from None


def healthy_line(config: HeadConfig) -> str:
    """Tells that a cluster is up."""
    hosts = config.hosts_per_slice
    hosts_text = f" on {count(hosts, 'host')}" if hosts > 1 else ""
    return (
        f"{count(config.slices, 'slice')} of {count(config.devices_per_slice, 'device')}"
        f"{hosts_text} up in {since_start_s():.1f} s (cluster {config.name})"
    )


def _cause(text: str) -> str:
    """The part of a loss's text that the line does not say itself."""
    return _SAID_ALREADY.sub("", text).partition(". Arrays that lived on it")[0]


@final
class EventReporter:
    """Turns events into lines, with times from its own making on."""

    def __init__(self, *, verbose: bool = False) -> None:
        self._verbose = verbose
        self._began_at = time.time()
        self._lost_at: dict[int | None, float] = {}

    def stamp(self) -> str:
        """The time that a line begins with."""
        return f"[{time.time() - self._began_at:.2f} s]"

    def report(self, event: Event) -> None:
        """Prints the line for an event, if it is worth one."""
        text = self._text(event)
        if text is not None:
            first, *more = text.splitlines()
            say(f"{self.stamp()} {first}")
            for line in more:
                say(line)

    def _text(self, event: Event) -> str | None:
        index = event["slice"]
        match event["kind"]:
            case "slice_lost":
                self._lost_at[index] = event["at"]
                return f"slice {index} is lost: {_cause(event['text'])}"
            case "slice_up":
                lost_at = self._lost_at.pop(index, None)
                after = "" if lost_at is None else f" after {event['at'] - lost_at:.2f} s"
                return f"slice {index} is back{after} (incarnation {event['incarnation']})"
            case "slice_suspended":
                return f"slice {index} is suspended: {event['text']}"
            case "slice_resumed":
                return f"slice {index} is resumed (incarnation {event['incarnation']})"
            case "job_ends":
                return f"the job ends: {event['text']}"
            case "elastic_event" | "long_wait" | "warning":
                return event["text"]
            case "client_connected" if self._verbose:
                return "a client has connected"
            case "client_gone" if self._verbose:
                return "a client is gone"
            case _:
                return None
