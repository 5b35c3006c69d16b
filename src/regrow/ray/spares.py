"""Places for slices that are held ready: whoever has lost one takes them over, hosts included."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, final

from regrow.errors import LaunchError

log = logging.getLogger(__name__)

_AGAIN_S: Final = 1.0
_ANSWER_S: Final = 5.0


@final
class Group:
    """The place of one incarnation of a slice.

    Attributes:
        placement: Its placement group.
        slice_name: Ray's name of the TPU slice that it is on; empty if it is on none.
        hosts: Its actors, by host.
    """

    def __init__(self, placement: Any, slice_name: str) -> None:
        self.placement = placement
        self.slice_name = slice_name
        self.hosts: dict[int, Any] = {}

    def free(self) -> None:
        """Gives it back."""
        import ray
        from ray.util import remove_placement_group

        for actor in self.hosts.values():
            ray.kill(actor)
        remove_placement_group(self.placement)


@final
class Spares:
    """Groups with hosts that wait."""

    def __init__(self) -> None:
        """Has none until `keep` runs."""
        self._ready: list[Group] = []

    @property
    def slice_names(self) -> set[str]:
        """The TPU slices that they are on."""
        return {group.slice_name for group in self._ready}

    async def keep(self, number: int, make: Callable[[], Awaitable[Group]]) -> None:
        """Makes up for those that were taken, for ever.

        Args:
            number: How many there are to be.
            make: Makes one.
        """
        while number:
            if len(self._ready) < number:
                try:
                    self._ready.append(await make())
                    continue
                except LaunchError as error:
                    log.info("no spare: %s", error)
                except Exception as error:  # noqa: BLE001 - Ray raises many kinds
                    log.warning("no spare: %r", error)
            await asyncio.sleep(_AGAIN_S)

    async def take(self) -> Group | None:
        """One whose hosts all live; None if there is none."""
        while self._ready:
            group = self._ready.pop(0)
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_ANSWER_S):
                    await asyncio.gather(*(one.answer.remote() for one in group.hosts.values()))
                return group
            group.free()
        return None
