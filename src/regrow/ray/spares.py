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
        hosts: Its actors, by host.
    """

    def __init__(self, placement: Any, slice_name: str, used: set[str]) -> None:
        """Uses a TPU slice until it is freed.

        Args:
            placement: Its placement group.
            slice_name: Ray's name of the TPU slice that it is on; empty if it is on none.
            used: Those that groups are on.
        """
        self.placement = placement
        self.hosts: dict[int, Any] = {}
        self._slice_name = slice_name
        self._used = used
        used.add(slice_name)

    def free(self) -> None:
        """Gives it back."""
        import ray
        from ray.util import remove_placement_group

        self._used.discard(self._slice_name)
        for actor in self.hosts.values():
            ray.kill(actor)
        remove_placement_group(self.placement)

    async def lives(self) -> bool:
        """Whether all its hosts answer."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_ANSWER_S):
                await asyncio.gather(*(one.answer.remote() for one in self.hosts.values()))
            return True
        return False


@final
class Spares:
    """Groups with hosts that wait."""

    def __init__(self) -> None:
        """Has none until `keep` runs."""
        self._ready: list[Group] = []

    async def keep(self, number: int, make: Callable[[], Awaitable[Group]]) -> None:
        """Makes up for those that were taken or have died, for ever.

        Args:
            number: How many there are to be.
            make: Makes one.
        """
        while number:
            await self._drop_dead()
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
            if await group.lives():
                return group
            group.free()
        return None

    async def _drop_dead(self) -> None:
        for group in list(self._ready):
            # Whoever has taken it meanwhile frees it.
            if not await group.lives() and group in self._ready:
                self._ready.remove(group)
                group.free()
