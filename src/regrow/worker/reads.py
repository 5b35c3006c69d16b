"""What the head asks of values: to have their bytes, and to hear when they are there.

The executor never waits for a value; a helper does. But an array that is given away to a program
(donated) is gone at its launch, so whatever comes before that in the queue must have taken hold of the
value by then: at once where it is there, else the part is marked as being read, and the launch waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, final

from regrow.channel.arena import ArenaView
from regrow.channel.commands import Failed, Get, Ready, Reply
from regrow.worker import transfers
from regrow.worker.store import Part, PartError, Store, is_ready, wait_for

_AT_ONCE_BYTES = 64 * 1024


@final
class Reads:
    """Answers `Get` and `Ready`; for the executor's thread."""

    def __init__(
        self,
        store: Store,
        memory: ArenaView,
        spawn: Callable[[Callable[[], None]], Any],
        report: Callable[[Any], None],
    ) -> None:
        """Begins with no question.

        Args:
            store: Where parts are.
            memory: Where bulks are.
            spawn: Runs a function on a helper thread.
            report: Sends an answer to the head.
        """
        self._store = store
        self._memory = memory
        self._spawn = spawn
        self._report = report

    def get(self, command: Get) -> None:
        """Brings a shard to the host."""
        part = self._store.get(command.aid)
        if not is_ready(part):
            reading = part.read()
            self._spawn(lambda: self._get_later(command, part, reading))
            return
        try:
            value = transfers.value(command, part)
        except PartError as error:
            self._fail(command.rid, error)
            return
        size = len(value) if isinstance(value, bytes) else value.nbytes
        if size <= _AT_ONCE_BYTES:
            self._hand_over(command, value)
        else:
            self._spawn(lambda: self._hand_over(command, value))

    def _get_later(self, command: Get, part: Part, reading: threading.Event) -> None:
        try:
            value = transfers.value(command, part)
        except PartError as error:
            self._fail(command.rid, error)
            return
        finally:
            reading.set()
        self._hand_over(command, value)

    def _hand_over(self, command: Get, value: Any) -> None:
        try:
            answer = transfers.hand_over(command, value, self._memory)
        except Exception as error:  # noqa: BLE001 - told to who asked
            self._fail(command.rid, PartError.of(error))
        else:
            self._report(Reply(command.rid, answer))

    def ready(self, command: Ready) -> None:
        """Answers when all of these parts hold values."""
        parts = [self._store.get(aid) for aid in command.aids]
        if all(is_ready(part) for part in parts):
            self._answer_ready(command.rid, parts)
        else:
            self._spawn(lambda: self._answer_ready(command.rid, parts))

    def _answer_ready(self, rid: int, parts: list[Part]) -> None:
        try:
            wait_for(parts)
        except PartError as error:
            self._fail(rid, error)
        else:
            self._report(Reply(rid, None))

    def _fail(self, rid: int, error: PartError) -> None:
        self._report(Failed(rid, int(error.code), error.message, error.epoch))
