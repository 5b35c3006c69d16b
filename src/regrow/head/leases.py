"""The leases of a head whose slices run on machines that several jobs share.

A slice of the head (its *rank*) is started when there is a lease for it, and given up when that is
over. Who asks for this is the job's process, over the control socket; what it tells the resource
manager about a loss it hears by events of the kind `lease_lost`.
"""

from __future__ import annotations

import logging
from typing import Final, final

from regrow.control import Event
from regrow.errors import UsageError
from regrow.head.control import make_event
from regrow.head.fleet import Fleet
from regrow.launchers.leased import Lease, LeasedLauncher

log = logging.getLogger(__name__)

_END_S: Final = 20.0


@final
class Leases:
    """Which slice of the machines each slice of the head is."""

    def __init__(self, launcher: LeasedLauncher, fleet: Fleet) -> None:
        self._launcher = launcher
        self._fleet = fleet

    def ranks(self) -> set[int]:
        """The slices that have a place."""
        return set(self._launcher.leases)

    def grant(self, rank: int, lease: Lease) -> None:
        """Takes a lease; the slice is started there. The same one again changes nothing."""
        present = self._launcher.leases.get(rank)
        if present == lease:
            return
        log.info("slice %d is %s", rank, lease)
        self._launcher.leases[rank] = lease
        try:
            self._fleet.grant(rank)
        except UsageError:
            del self._launcher.leases[rank]
            raise

    def withdraw(self, lease: Lease, cause: str) -> None:
        """A lease is over: what it was for is given up. Nothing happens to one that is not known."""
        for rank, present in list(self._launcher.leases.items()):
            if present == lease:
                del self._launcher.leases[rank]
                self._fleet.take(rank, cause)

    async def give_back(self, lease: Lease, cause: str) -> None:
        """As `withdraw`; returns when no process is left on it.

        Raises:
            WaitTimeout: One did not end.
        """
        placed = [key for key, place in self._launcher.placed.items() if place == lease]
        self.withdraw(lease, cause)
        for rank, incarnation in placed:
            await self._fleet.wait_ended(rank, incarnation, _END_S)

    def left(self, rank: int, incarnation: int) -> None:
        """An incarnation of a slice has left with its state saved: that is no loss of its lease."""
        self._launcher.placed.pop((rank, incarnation), None)

    def lost(self, rank: int, incarnation: int, cause: str) -> Event | None:
        """An incarnation of a slice is lost; the event that tells of its lease, if it had one."""
        lease = self._launcher.placed.pop((rank, incarnation), None)
        if lease is None:
            return None
        if self._launcher.leases.get(rank) == lease:
            del self._launcher.leases[rank]
        return make_event(
            "lease_lost", slice_index=lease.index, incarnation=lease.incarnation, text=cause
        )
