"""Who waits for a step or a phase of the clients' work: whoever places a fault there, say.

It hears what the observer hears. As long as nobody waits for a phase, a request costs no more than a
look whether somebody does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Set
from typing import Final, TypeVar, final

from regrow.errors import UsageError
from regrow.head.phases import OF_REQUESTS

_OF_CLIENTS: Final = ("step", "snapshot", "load", "scale-up")
PHASES: Final = frozenset((*OF_REQUESTS, *_OF_CLIENTS))
"""What can be waited for."""

_T = TypeVar("_T")


@final
class Watch:
    """Wakes who waits for what the clients do.

    Attributes:
        phases: Who waits for a phase, and the index of the slice that it has to concern.
    """

    def __init__(self) -> None:
        self.phases: dict[asyncio.Future[None], tuple[str, int]] = {}
        self._steps: dict[asyncio.Future[None], int] = {}

    async def step(self, step: int) -> None:
        """Returns when a client says that it begins this step, or a later one."""
        await _wait(self._steps, step)

    async def phase(self, phase: str, slice_index: int) -> None:
        """Returns when this phase next begins for this slice, or for all.

        Raises:
            UsageError: There is no such phase.
        """
        if phase not in PHASES:
            raise UsageError(f"there is no phase {phase!r}; there are {', '.join(sorted(PHASES))}")
        await _wait(self.phases, (phase, slice_index))

    def told(self, step: int | None, phase: str | None) -> None:
        """A client says that it is in this step, or phase."""
        for future, wanted in self._steps.items():
            if step is not None and wanted <= step:
                _wake(future)
        if phase in _OF_CLIENTS:
            self.begins((phase,), None)

    def begins(self, phases: tuple[str, ...], slices: Set[int] | None) -> None:
        """Phases begin that concern these slices; None: all."""
        for future, (wanted, index) in self.phases.items():
            if wanted in phases and (slices is None or index in slices):
                _wake(future)


async def _wait(waiting: dict[asyncio.Future[None], _T], what: _T) -> None:
    future = asyncio.get_running_loop().create_future()
    waiting[future] = what
    try:
        await future
    finally:
        del waiting[future]


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
