"""The control plane: everything that can be asked of it, and everything that can happen to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from regrow.cloud.config import CloudConfig
from regrow.cloud.machine.capacity import Capacity
from regrow.cloud.machine.core import Core
from regrow.cloud.machine.events import Event
from regrow.cloud.machine.node_requests import NodeRequests
from regrow.cloud.machine.operation_requests import OperationRequests
from regrow.cloud.machine.queued_requests import QueuedRequests
from regrow.cloud.machine.tables import Change, Tables
from regrow.cloud.resources import AnyRecord


@final
class ControlPlane:
    """Queued resources, nodes and operations as one state machine, without I/O and clock.

    Every method that changes something takes the time, and leaves all that is due by then done.
    `take_changes` then tells which records have changed; the caller writes them down before it
    answers, and has the hosts do what the nodes say.

    Attributes:
        queued: Requests about queued resources.
        nodes: Requests about nodes.
        operations: Requests about operations.
    """

    def __init__(
        self, config: CloudConfig, records: Iterable[AnyRecord] = (), last_seq: int = 0
    ) -> None:
        """Begins with what an earlier one has written down.

        Args:
            config: The world it lives in.
            records: The records of an earlier control plane.
            last_seq: The greatest number that it had given to a record.
        """
        self._core = Core(config, records, last_seq)
        self.queued = QueuedRequests(self._core)
        self.nodes = NodeRequests(self._core)
        self.operations = OperationRequests(self._core)

    @property
    def config(self) -> CloudConfig:
        """The world it lives in."""
        return self._core.config

    @property
    def tables(self) -> Tables:
        """All records; others than the control plane read them only."""
        return self._core.tables

    @property
    def capacity(self) -> Capacity:
        """Who has which chips."""
        return self._core.capacity

    def configure(self, config: CloudConfig, now: float) -> None:
        """Changes capacity, quotas and times; what has been given stays given."""
        self._core.configure(config)
        self._core.tick(now)

    def handle(self, events: Iterable[Event], now: float) -> None:
        """Takes in what the hosts did. News of a former incarnation or boot is dropped."""
        self._core.handle(events, now)

    def tick(self, now: float) -> None:
        """Does all that is due."""
        self._core.tick(now)

    def deadline(self, now: float) -> float | None:
        """When `tick` has to be called next, if nothing else happens; None: never."""
        return self._core.deadline(now)

    def take_changes(self) -> list[Change]:
        """The records that have changed since the last call."""
        return self._core.tables.take_changes()
