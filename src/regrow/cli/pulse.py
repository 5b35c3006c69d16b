"""A head that stands still is ended: then everything that waits for it ends, too."""

from __future__ import annotations

import signal
import time
from typing import Final, final

from regrow.client.settings import HEAD_DEADLINE_VARIABLE
from regrow.control import ControlConnection
from regrow.errors import RegrowError
from regrow.processes import Child, is_traced

_ASKED: Final = 6


@final
class Pulse:
    """Asks a head now and then whether it lives, and ends it if it has not answered for too long.

    Questions are counted, and not seconds: whoever asks may itself have slept. A head that a debugger
    is attached to may stand still.

    Attributes:
        lost: Why the head was ended; None: it was not.
    """

    def __init__(self, head: Child, control: ControlConnection, deadline_s: float | None) -> None:
        """Begins.

        Args:
            head: The process, a child of this one.
            control: Where it is asked; whoever reads there tells `heard`.
            deadline_s: How long it may be silent; None: for ever.
        """
        self.lost: str | None = None
        self._head = head
        self._control = control
        self._deadline_s = deadline_s
        self._unanswered = 0
        self._next_at = None if deadline_s is None else time.monotonic()

    @property
    def failing(self) -> bool:
        """Whether the last questions were not answered."""
        return self._unanswered > 1

    def heard(self) -> None:
        """The head has said something."""
        self._unanswered = 0

    def wait_s(self) -> float | None:
        """How long nothing is to be done; None: for ever."""
        return None if self._next_at is None else max(0.0, self._next_at - time.monotonic())

    def step(self) -> None:
        """Asks, or ends the head, if that is due."""
        if self._deadline_s is None or self.wait_s() != 0:
            return
        self._next_at = time.monotonic() + self._deadline_s / _ASKED
        if is_traced(self._head.pid):
            self._unanswered = 0
        if self._unanswered >= _ASKED:
            self._next_at = None
            self.end(f"has not answered for {self._deadline_s:g} s ({HEAD_DEADLINE_VARIABLE})")
            return
        try:
            self._control.send("ping")
            self._unanswered += 1
        except RegrowError:
            self._next_at = None  # It has ended, or is about to; its own descriptor tells.

    def end(self, why: str) -> None:
        """Ends the head with SIGKILL, which no process can put off."""
        self.lost = why
        self._head.send(signal.SIGKILL)
