"""Hosts without processes, for load tests of the control plane."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import final

from regrow.cloud.machine import Change, Event, HostsDown, HostsUp
from regrow.cloud.resources import Node, Power


@final
class SimulatedFleet:
    """Does at once whatever nodes say."""

    def __init__(self, report: Callable[[Sequence[Event]], None]) -> None:
        self._report = report
        self._events: list[Event] = []

    def apply(self, changes: Sequence[Change]) -> None:
        """Has the hosts be what they are to be, a moment later."""
        for change in changes:
            node = change.record
            if not isinstance(node, Node):
                continue
            if node.power is Power.ON and not node.up:
                self._events.append(HostsUp(node.uid, node.incarnation, node.boot))
            elif node.power is not Power.ON and not node.down:
                event = HostsDown(node.uid, node.incarnation, node.boot, node.power)
                self._events.append(event)
        if self._events:
            asyncio.get_running_loop().call_soon(self._tell)

    def recover(self, nodes: Iterable[Node], *, lost: bool) -> None:
        """They are as they were."""
        self.apply([Change(node.kind, node.name, node) for node in nodes])

    def _tell(self) -> None:
        events, self._events = self._events, []
        if events:
            self._report(events)

    def guest_attributes(self, node: Node, worker: int) -> dict[str, dict[str, str]]:
        """There are none."""
        return {}

    async def close(self) -> None:
        """Nothing is left."""
