"""Notices: hosts are told that they are going to be ended, and their slices are suspended in time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, Protocol, final

from regrow.config import HeadConfig
from regrow.errors import RegrowError
from regrow.head.suspended import Slices, SuspendedSlices
from regrow.slices import LIVE

log = logging.getLogger(__name__)

_GATHER_S: Final = 0.05


class Suspend(Protocol):
    """Suspends slices in the time that there is."""

    async def __call__(self, slices: Sequence[int], why: str, *, grace_s: float) -> dict[str, Any]:
        """Returns what was suspended, by "slices"."""
        ...


@final
class Notices:
    """Answers the notices of all slices."""

    def __init__(
        self,
        config: HeadConfig,
        slices: Slices,
        suspended: SuspendedSlices,
        suspend: Suspend,
        resume: Callable[[Sequence[int]], Awaitable[Any]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """There are none yet.

        Args:
            config: Of the head.
            slices: The slices.
            suspended: What is suspended.
            suspend: Suspends slices.
            resume: Brings slices back.
            spawn: Runs a coroutine until it ends.
        """
        self._config = config
        self._slices = slices
        self._suspended = suspended
        self._suspend = suspend
        self._resume = resume
        self._spawn = spawn
        self._noticed: set[int] = set()

    def noticed(self, index: int, why: str) -> None:
        """A host of a slice was told that it is going to be ended."""
        if index in self._noticed:
            return
        if not self._noticed:
            self._spawn(self._answer_notices(why))
        self._noticed.add(index)

    async def _answer_notices(self, why: str) -> None:
        await asyncio.sleep(_GATHER_S)  # Who is ended together is suspended together.
        noticed, self._noticed = sorted(self._noticed), set()
        began = time.monotonic()
        try:
            done = await self._suspend(noticed, f"a notice: {why}", grace_s=self._config.grace_s)
        except RegrowError as error:
            log.warning("after a notice: %s", error)
            for index in noticed:
                self._dismiss(index)
            return
        log.info("suspended %.2f s after the notice", time.monotonic() - began)
        if self._config.resume_after_s is not None:
            await asyncio.sleep(self._config.resume_after_s)
            again = [index for index in done["slices"] if index in self._suspended.stored]
            if again:
                await self._resume_by_itself(again)

    def _dismiss(self, index: int) -> None:
        if (
            index not in self._suspended.stored
            and self._slices.membership.info(index).state in LIVE
        ):
            self._slices.dismiss(index)

    async def _resume_by_itself(self, slices: Sequence[int]) -> None:
        try:
            await self._resume(slices)
        except RegrowError as error:
            log.error("%s", error)
