"""What of a cluster is suspended: known to who suspends slices and to who brings them back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol, TypeAlias, final

from regrow.errors import WaitTimeout
from regrow.head.asking import until
from regrow.head.gate import Gate
from regrow.head.saving import Stored
from regrow.slices import Event, Membership
from regrow.suspend import Snapshots

LEAVE_S: Final = 15.0

Tell: TypeAlias = "Callable[[str, int, int, str], None]"


class Slices(Protocol):
    """What is needed of the fleet."""

    membership: Membership

    def handle(self, event: Event) -> None:
        """Feeds the membership."""
        ...

    def dismiss(self, index: int) -> None:
        """Has the hosts of a slice end as a notice to them would have ended them."""
        ...

    def regroup(self, hosts_per_slice: int) -> None:
        """Slices have so many hosts from now on; raises `ControlError` where they cannot."""
        ...


@final
class SuspendedSlices:
    """The state of suspended slices, and the gate that is closed as long as there are any.

    Attributes:
        stored: For each suspended slice the parts of its hosts, by number of their buffer.
        number: The latest snapshot that was committed, 0: none.
        store: Where it is.
        turn: Held by who changes which slices are suspended.
    """

    def __init__(self, gate: Gate) -> None:
        self.stored: Stored = {}
        self.number = 0
        self.store: Snapshots | None = None
        self.turn = asyncio.Lock()
        self._gate = gate
        self._saves = False

    @property
    def url(self) -> str | None:
        """The place of the latest snapshot; None: there is none."""
        return None if self.store is None else self.store.url

    @contextlib.contextmanager
    def gate_closed(self) -> Iterator[None]:
        """Clients wait, also when the last slice that was suspended comes back meanwhile."""
        self._saves = True
        self._gate.close()
        try:
            yield
        finally:
            self._saves = False

    def open_gate(self) -> None:
        """Lets clients go on, if everything that they have is there."""
        if not self.stored and not self._saves:
            self._gate.open()


async def until_gone(membership: Membership, slices: Sequence[int]) -> None:
    """Waits for the hosts of slices, which have been told to leave."""

    def gone() -> bool:
        infos = [membership.info(index) for index in slices]
        return all(host.state == "gone" for info in infos for host in info.hosts)

    with contextlib.suppress(WaitTimeout):
        await until(gone, LEAVE_S, f"the hosts of {named(slices)} to leave")


def named(slices: Sequence[int]) -> str:
    """Slices in words."""
    names = ", ".join(map(str, slices))
    return f"slice {names}" if len(slices) == 1 else f"slices {names}"
