"""The program by which pathwaysutils, and our own client, have all hosts traced by the profiler.

It is executed twice: the first time starts a trace on every host that is up, the second stops it, and
has each host write its files. A host that is lost meanwhile takes its part of the trace along; a slice
that comes back is not traced until the next start.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, final

from regrow.channel.commands import StartTrace, StopTrace
from regrow.errors import Code, StatusError
from regrow.head.links import Link
from regrow.head.tables import Later

log = logging.getLogger(__name__)

MARK: Final = b"profileRequest"
"""Stands in the text of such a program."""

_SESSION: Final = re.compile(r"[\w][\w.-]{0,99}", re.ASCII)
_HOST_LEVEL: Final = 2


@final
class Profile:
    """One such program.

    Attributes:
        name: Its name.
        with_output: Whether the client expects a result.
        running: Whether a trace is being taken.
    """

    def __init__(self, data: bytes, links: dict[int, Link]) -> None:
        """Reads a plugin program; `links` are the hosts that are up, also later.

        Raises:
            StatusError: It is no request for a profile, or for one in a place that is no directory.
        """
        self.name = "profile"
        self.running = False
        self._links = links
        self._traced: dict[Link, str] = {}
        try:
            request = json.loads(data[data.index(b"{") :])["profileRequest"]
            options = request.get("xprofTraceOptions") or {}
            self.with_output = "xprofTraceOptions" in request
            self._host_level = int(options.get("hostTraceLevel", _HOST_LEVEL))
            self._directory = str(request["traceLocation"])
            session = options.get("traceSessionName") or time.strftime("%Y_%m_%d_%H_%M_%S")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise StatusError.user(
                Code.INVALID_ARGUMENT, f"a request for a profile that is none: {data[:80]!r}"
            ) from None
        self._session = str(session)
        self._check()

    def _check(self) -> None:
        if not Path(self._directory).is_absolute():
            raise StatusError.user(
                Code.INVALID_ARGUMENT,
                f"traces cannot be written to {self._directory[:200]!r}: it must be the absolute "
                "path of a directory on the machine of the cluster",
            )
        if not _SESSION.fullmatch(self._session):
            raise StatusError.user(
                Code.INVALID_ARGUMENT, f"{self._session[:100]!r} cannot be the name of a trace"
            )

    def toggle(self) -> Later:
        """Starts a trace, or stops it; settled when every host has, or is lost."""
        self.running = not self.running
        return self._start() if self.running else self._stop()

    def unload(self) -> None:
        """A trace that nobody will stop is stopped."""
        if self.running:
            self.running = False
            self._stop()

    def _start(self) -> Later:
        self._traced = {
            link: link.name.replace(" host ", "-host").replace(" ", "")
            for link in self._links.values()
        }
        ask = functools.partial(StartTrace, host_level=self._host_level)
        return self._ask(dict.fromkeys(self._traced, ask))

    def _stop(self) -> Later:
        traced, self._traced = self._traced, {}
        return self._ask(
            {
                link: functools.partial(
                    StopTrace, directory=self._directory, session=self._session, name=name
                )
                for link, name in traced.items()
            }
        )

    def _ask(self, questions: dict[Link, Callable[[int], Any]]) -> Later:
        """Asks all hosts; fails only with the error of a host that lives."""
        later = Later()
        left = len(questions)
        failure: StatusError | None = None

        def answered(link: Link, error: StatusError | None, _: Any) -> None:
            nonlocal left, failure
            left -= 1
            if error is not None:
                log.warning("profile of %s: %s", link.name, error)
                if link.lost is None:
                    failure = error
            if not left:
                later.settle(failure, None)

        if not questions:
            later.settle(None, None)
        for link, question in questions.items():
            link.ask(question, functools.partial(answered, link))
        return later
