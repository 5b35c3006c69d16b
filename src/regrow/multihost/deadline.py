"""A deadline for each step, for what lives but gets no further."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from typing import Final, Self, final

from regrow.client.notice import say
from regrow.errors import UsageError

STATUS: Final = 124
"""The exit status of a process whose step has not ended in time; that of timeout(1)."""


@final
class StepDeadline:
    """Ends this process when a step takes too long, so that the hosts that wait for it end, too.

    A storage system that does not answer, a deadlock in the input, or a collective that another host
    never enters: such a process sends its heartbeats, and JAX waits for it for ever. Ended by this it
    tells what it was at, with the stacks of all threads, on the standard error.

        with StepDeadline(300, first_s=1800) as deadline:
            for step in range(steps):
                deadline.begin(f"step {step}")
    """

    def __init__(self, timeout_s: float, *, first_s: float | None = None) -> None:
        """Sets the deadline; it counts inside of `with`.

        Args:
            timeout_s: For each step, in seconds.
            first_s: For all up to the second `begin`, which has to compile; default: `timeout_s`.

        Raises:
            UsageError: One of them is not positive.
        """
        self._timeout_s = timeout_s
        self._first_s = timeout_s if first_s is None else first_s
        if min(self._timeout_s, self._first_s) <= 0:
            raise UsageError("a deadline must be more than 0 seconds")
        self._what = "the start"
        self._begun = 0
        self._limit_s = self._first_s
        self._at = 0.0
        self._changed = threading.Condition()
        self._closed = False

    def begin(self, what: str) -> None:
        """The step before has ended, and another begins.

        Args:
            what: Its name, for the message.
        """
        with self._changed:
            self._begun += 1
            self._what = what
            self._limit_s = self._first_s if self._begun == 1 else self._timeout_s
            self._at = time.monotonic() + self._limit_s
            self._changed.notify_all()

    def __enter__(self) -> Self:
        self._at = time.monotonic() + self._limit_s
        threading.Thread(target=self._watch, name="regrow-deadline", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _watch(self) -> None:
        with self._changed:
            while not self._closed:
                left_s = self._at - time.monotonic()
                if left_s <= 0:
                    self._end()
                self._changed.wait(left_s)

    def _end(self) -> None:
        say(f"{self._what} has not ended within {self._limit_s:g} s; this process ends")
        if sys.stderr is not None:
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        os._exit(STATUS)
