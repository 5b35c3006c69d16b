"""Whether the head still answers: the stock client itself would wait for it without end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, final

from regrow.client.callhost import knock
from regrow.client.connections import dial, hang_up, known_as, peer_pid
from regrow.client.settings import HEAD_DEADLINE_VARIABLE, Settings
from regrow.errors import ProtocolError
from regrow.processes import is_traced

_KNOCKS: Final = 6
_LOOK_AGAIN_S: Final = 1.0


@final
class Vigil:
    """Knocks at the head now and then; if it is silent for too long, ends all connections to it.

    Then jaxlib knows that the head is gone, and every wait for it ends. Knocks are counted, and not
    seconds: this process may itself have slept. A head on this machine that a debugger is attached to
    may stand still.
    """

    def __init__(self, settings: Settings, on_silent: Callable[[str], None]) -> None:
        """Readies it.

        Args:
            settings: The cluster.
            on_silent: Is told in what way the head is silent, before the connections end.
        """
        self._settings = settings
        self._peers = known_as(settings.address)
        self._on_silent = on_silent
        self._closed = threading.Event()

    def start(self) -> None:
        """Begins, unless the head may be silent for ever."""
        deadline_s = self._settings.head_deadline_s
        if deadline_s is not None:
            threading.Thread(
                target=self._watch, args=(deadline_s,), name="regrow-vigil", daemon=True
            ).start()

    def close(self) -> None:
        """The session is over."""
        self._closed.set()

    def _watch(self, deadline_s: float) -> None:
        pause_s = deadline_s / _KNOCKS
        unanswered = 0
        while unanswered < _KNOCKS:
            again_at = time.monotonic() + pause_s
            unanswered = 0 if self._answers(pause_s) else unanswered + 1
            if self._closed.wait(max(0.0, again_at - time.monotonic())):
                return
        self._on_silent(
            f"it has not answered for {deadline_s:g} s; {HEAD_DEADLINE_VARIABLE} sets how long is waited"
        )
        while True:
            # gRPC may try once more to connect, which a stopped head's kernel does not refuse.
            hang_up(self._peers)
            if self._closed.wait(_LOOK_AGAIN_S):
                return

    def _answers(self, timeout_s: float) -> bool:
        try:
            with dial(self._settings.address, timeout_s) as sock:
                sock.settimeout(timeout_s)
                pid = peer_pid(sock)
                try:
                    knock(sock, self._settings.token)
                except TimeoutError:
                    return pid is not None and is_traced(pid)
        except (OSError, EOFError, ProtocolError):
            return False
        return True
