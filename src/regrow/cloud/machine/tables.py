"""The records of the control plane, and which of them have changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from regrow.cloud.accelerators import Accelerator
from regrow.cloud.resources import GONE_STATES, AnyRecord, Node, Operation, QueuedResource


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
    """

    def __init__(self, records: Iterable[AnyRecord], last_seq: int = 0) -> None:
        self.queued: dict[str, QueuedResource] = {}
        self.nodes: dict[str, Node] = {}
        self.operations: dict[str, Operation] = {}
        self.version = 0
        self.last_seq = last_seq
        self._changed: dict[tuple[str, str], None] = {}
        for record in sorted(records, key=lambda one: one.seq):
            self._table(record)[record.name] = record
            self.last_seq = max(self.last_seq, record.seq)

    def _table(self, record: AnyRecord) -> dict[str, AnyRecord]:
        # The kind of a record tells which table it is in.
        table: dict[str, AnyRecord] = {  # type: ignore[assignment]
            QueuedResource.kind: self.queued,
            Node.kind: self.nodes,
            Operation.kind: self.operations,
        }[record.kind]
        return table

    def next_seq(self) -> int:
        """A number that no record has had."""
        self.last_seq += 1
        return self.last_seq

    def add(self, record: AnyRecord) -> None:
        """Enters a new record."""
        self._table(record)[record.name] = record
        self.touch(record)

    def touch(self, record: AnyRecord) -> None:
        """Notes that a record has changed."""
        self.version += 1
        self._changed[record.kind, record.name] = None

    def remove(self, record: AnyRecord) -> None:
        """Removes a record."""
        del self._table(record)[record.name]
        self.touch(record)

    def take_changes(self) -> list[Change]:
        """What has changed since the last call."""
        tables: dict[str, dict[str, AnyRecord]] = {
            QueuedResource.kind: dict(self.queued),
            Node.kind: dict(self.nodes),
            Operation.kind: dict(self.operations),
        }
        changes = [Change(kind, name, tables[kind].get(name)) for kind, name in self._changed]
        self._changed.clear()
        return changes

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
