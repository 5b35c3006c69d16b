"""The process that helps the head and is no slice: the compiler.

One that ends is started again, and one that is silent is ended; what was asked of it fails with
UNAVAILABLE, and its users ask anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, final

from regrow.channel import commands as c
from regrow.channel.head_end import HeadChannel
from regrow.errors import Code, LaunchError, StatusError
from regrow.head.guard import unexpected, watch
from regrow.head.links import Link
from regrow.launchers.base import Process

log = logging.getLogger(__name__)

_BACKOFF_S: Final = (0.05, 0.5, 2.0, 5.0)
_PING_S: Final = 2.0
# Pings are counted, and not seconds: the head itself may have slept.
_PINGS_UNANSWERED: Final = 15


class EntryLauncher(Protocol):
    """Starts processes that are no hosts."""

    async def start_entry(
        self, entry: str, spec: Mapping[str, Any], label: str, name: str
    ) -> Process:
        """Starts a process that calls `entry` with `spec`."""
        ...


@final
class Aide:
    """One such process, over all its lives."""

    def __init__(self, role: str, entry: str) -> None:
        self.role = role
        self.link: Link | None = None
        self.on_up: Callable[[], None] = lambda: None
        self.on_call: Callable[[Link, c.Callback], None] | None = None
        self._entry = entry
        self._lives = 0
        self._closing = False
        self._failures = 0
        self._unanswered = 0
        self._starting: asyncio.Task[None] | None = None

    async def start(
        self,
        launcher: EntryLauncher,
        spec: Mapping[str, Any],
        admit: Callable[[str, HeadChannel], None],
    ) -> None:
        """Starts the process; starts it again when it ends."""
        if self._closing:
            return
        self._lives += 1
        self._failures += 1
        life = self._lives
        link = Link(self.role, incarnation=life)
        channel = HeadChannel(
            self.role,
            lambda data: self._payload(link, data),
            lambda cause: log.info("the %s is not connected: %s", self.role, cause),
        )
        link.attach(channel)
        admit(self.role, channel)
        spec = {**spec, "slice": 0, "host": 0, "incarnation": life}
        try:
            process = await launcher.start_entry(
                self._entry, spec, self.role, f"rg-{self.role[:8]}"
            )
        except LaunchError as error:
            log.error("%s", error)
            self._again(launcher, spec, admit)
            return
        process.on_exit(lambda cause: self._ended(link, cause, launcher, spec, admit))
        self._unanswered = 0
        self._watch(link, process)

    def close(self) -> None:
        """It is not started again."""
        self._closing = True

    def _watch(self, link: Link, process: Process) -> None:
        if self._closing or link.lost is not None:
            return
        if self._unanswered >= _PINGS_UNANSWERED:
            silent_s = _PINGS_UNANSWERED * _PING_S
            log.error("the %s has been silent for %g s: it is ended", self.role, silent_s)
            process.kill()
            return
        self._unanswered += 1
        link.send(c.Ping(self._lives))
        asyncio.get_running_loop().call_later(_PING_S, self._watch, link, process)

    def _payload(self, link: Link, data: bytes | memoryview) -> None:
        self._unanswered = 0
        for command in c.unpack(data):
            try:
                self._report(link, command)
            except Exception as error:  # noqa: BLE001 (it ends the head)
                unexpected(f"{type(command).__name__} of the {self.role}", error)

    def _report(self, link: Link, command: Any) -> None:
        match command:
            case c.Up():
                self.link = link
                self._failures = 0
                self.on_up()
            case c.Reply():
                link.answered(command.rid, None, command.value)
            case c.Failed():
                error = StatusError(Code(command.code), command.message)
                link.answered(command.rid, error, None)
            case c.Callback() if self.on_call is not None:
                self.on_call(link, command)
            case _:
                log.debug("the %s sent %s", self.role, type(command).__name__)

    def _ended(self, link: Link, cause: str, *again: Any) -> None:
        if self._closing:
            return
        log.warning("the %s ended: %s; it is started again", self.role, cause)
        self.link = None
        link.lose(StatusError(Code.UNAVAILABLE, f"the {self.role} ended: {cause}"))
        link.ended()
        self._again(*again)

    def _again(self, *again: Any) -> None:
        delay_s = _BACKOFF_S[min(self._failures, len(_BACKOFF_S) - 1)]
        asyncio.get_running_loop().call_later(delay_s, self._start_again, *again)

    def _start_again(self, *again: Any) -> None:
        # The loop itself would not keep the task.
        self._starting = asyncio.get_running_loop().create_task(self.start(*again))
        watch(self._starting)
