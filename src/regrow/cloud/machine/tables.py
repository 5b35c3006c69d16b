"""The records of the control plane, and which of them have changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

from regrow.cloud.accelerators import Accelerator
from regrow.cloud.resources import (
    GONE_STATES,
    KINDS,
    AnyRecord,
    Node,
    Operation,
    QueuedResource,
)


@final
@dataclass(frozen=True, slots=True)
class Change:
    """A record that is new, changed or gone (then it is None)."""

    kind: str
    name: str
    record: AnyRecord | None


@final
class Tables:
    """All records, by kind and name.

    Attributes:
        queued: Queued resources.
        nodes: Nodes.
        operations: Operations.
        version: Grows with every change.
        restless: Names of the nodes, queued resources and operations whose next step may be due: those
            that have changed, and those that wait for a time to come.
    """

    def __init__(self, records: Iterable[AnyRecord], last_seq: int = 0) -> None:
        self.queued: dict[str, QueuedResource] = {}
        self.nodes: dict[str, Node] = {}
        self.operations: dict[str, Operation] = {}
        self.version = 0
        self.restless: dict[str, dict[str, None]] = {kind: {} for kind in KINDS}
        self.last_seq = last_seq
        self._changed: dict[tuple[str, str], None] = {}
        for record in sorted(records, key=lambda one: one.seq):
            self._table(record)[record.name] = record
            self.restless[record.kind][record.name] = None
            self.last_seq = max(self.last_seq, record.seq)

    def _of_kind(self, kind: str) -> dict[str, AnyRecord]:
        tables: dict[str, Any] = {
            QueuedResource.kind: self.queued,
            Node.kind: self.nodes,
            Operation.kind: self.operations,
        }
        table: dict[str, AnyRecord] = tables[kind]
        return table

    def _table(self, record: AnyRecord) -> dict[str, AnyRecord]:
        return self._of_kind(record.kind)

    def next_seq(self) -> int:
        """A number that no record has had."""
        self.last_seq += 1
        return self.last_seq

    def add(self, record: AnyRecord) -> None:
        """Enters a new record."""
        self._table(record)[record.name] = record
        self.touch(record)

    def touch(self, record: AnyRecord) -> None:
        """Notes that a record has changed; its operations and its queued resource are concerned."""
        self.version += 1
        self._changed[record.kind, record.name] = None
        self.restless[record.kind][record.name] = None
        if isinstance(record, Node) and record.queued is not None:
            self.restless[QueuedResource.kind][record.queued] = None

    def remove(self, record: AnyRecord) -> None:
        """Removes a record."""
        del self._table(record)[record.name]
        self.touch(record)

    def take_changes(self) -> list[Change]:
        """What has changed since the last call."""
        changes = [
            Change(kind, name, self._of_kind(kind).get(name)) for kind, name in self._changed
        ]
        self._changed.clear()
        return changes

    def take_restless(self, kind: str) -> list[AnyRecord]:
        """The restless records of a kind; whoever takes them puts back those that stay so."""
        names, self.restless[kind] = self.restless[kind], {}
        table = self._of_kind(kind)
        return [table[name] for name in names if name in table]

    def open_operations(self) -> list[Operation]:
        """The operations that have not ended."""
        names = self.restless[Operation.kind]
        found = (self.operations.get(name) for name in names)
        ongoing = [one for one in found if one is not None and not one.done]
        self.restless[Operation.kind] = {one.name: None for one in ongoing}
        return ongoing

    def still_restless(self) -> list[AnyRecord]:
        """All restless records."""
        return [
            table[name]
            for kind, names in self.restless.items()
            for table in (self._of_kind(kind),)
            for name in names
            if name in table
        ]

    def nodes_of(self, queued: QueuedResource) -> list[Node]:
        """The nodes of a queued resource that there are now, by slice."""
        found = (self.nodes.get(name) for name in queued.node_names)
        return [node for node in found if node is not None and node.queued == queued.name]

    def live_nodes_of(self, queued: QueuedResource) -> list[Node]:
        """Those of its nodes that are neither being deleted nor preempted."""
        return [node for node in self.nodes_of(queued) if node.state not in GONE_STATES]

    def free_hosts(self, accelerator: Accelerator) -> int:
        """The first of so many consecutive numbers that no host has."""
        first = 0
        for node in sorted(self.nodes.values(), key=lambda one: one.first_host):
            if node.first_host - first >= accelerator.hosts:
                break
            first = max(first, node.first_host + node.accelerator.hosts)
        return first
