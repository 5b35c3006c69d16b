"""Processes of a rank that hang: nothing but SIGCONT would have one that is stopped go on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, final

from regrow.processes import ProcessStat

LOOK_S: Final = 1.0
"""How long a watcher waits between two looks, in seconds."""
LOOKS: Final = 5
"""A process that is found stopped so often, one look after the other, hangs."""


@final
class Hung:
    """Counts how often processes were found stopped (SIGSTOP).

    Looks are counted, not seconds: whoever was stopped together with its watcher gets its time anew.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        """Has not looked yet."""
        self._looks = dict.fromkeys(pids, 0)

    def look(self) -> int | None:
        """Looks once; returns a process that hangs, if there is one."""
        for pid in self._looks:
            stat = ProcessStat.of(pid)
            stopped = stat is not None and stat.state == "T"
            self._looks[pid] = self._looks[pid] + 1 if stopped else 0
        return next((pid for pid, looks in self._looks.items() if looks >= LOOKS), None)
