"""What a rank leaves above it: Ray's supervisor of the job, which cannot end while its raylet hangs.

The job has ended for the head as soon as the supervisor has said so, often before the head finds the
raylet hung; then nobody would look after that host until a next job needs it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from typing import Final

from regrow.processes import ProcessStat, name_of
from regrow.ray.hung import LOOK_S, Hung

_RAYLET: Final = "raylet"
# Where the raylet answers, a supervisor ends within a second.
_LOOKS: Final = 30


def see_supervisor_end() -> None:
    """Has a process of its own end Ray's supervisor, this process's parent, if its raylet hangs.

    Called last, for a supervisor that is ended too soon cannot say how the job has ended.
    """
    supervisor = os.getppid()
    stat = ProcessStat.of(supervisor)
    if stat is None or name_of(stat.parent) != _RAYLET:
        return
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(supervisor)
        if os.fork() == 0:
            try:
                # Out of the group of processes that Ray ends with the job.
                os.setsid()
                _see_end(descriptor, stat.parent)
            finally:
                os._exit(0)


def _see_end(supervisor: int, raylet: int) -> None:
    """Waits until the supervisor has ended; ends it if the raylet was stopped long enough."""
    hung = Hung([raylet])
    poller = select.poll()
    poller.register(supervisor, select.POLLIN)
    for _ in range(_LOOKS):
        if poller.poll(LOOK_S * 1000):
            return
        if hung.look() is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(supervisor, signal.SIGKILL)
            return
