"""The parts of the control plane, and what moves them: events and the clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, TypeVar, final

from regrow.cloud.config import CloudConfig
from regrow.cloud.machine.capacity import Capacity
from regrow.cloud.machine.events import Event, HostsDown, HostsFailed, HostsLost, HostsUp
from regrow.cloud.machine.operations import Operations
from regrow.cloud.machine.queue import Queue
from regrow.cloud.machine.slices import Slices
from regrow.cloud.machine.tables import Tables
from regrow.cloud.resources import (
    AnyRecord,
    ApiVersion,
    Await,
    Node,
    NodeState,
    Operation,
    Power,
    QueuedResource,
)
from regrow.errors import Code

_MOST_STEPS: Final = 100
_Record = TypeVar("_Record", Node, QueuedResource)


@final
class Core:
    """All parts of the control plane.

    Attributes:
        config: The world it lives in.
        tables: All records.
        capacity: Who has which chips.
        slices: Moves nodes.
        queue: Moves queued resources.
        operations: Moves operations.
    """

    def __init__(self, config: CloudConfig, records: Iterable[AnyRecord], last_seq: int) -> None:
        self.tables = Tables(records, last_seq)
        self.configure(config)

    def configure(self, config: CloudConfig) -> None:
        """Changes capacity, quotas and times; what has been given stays given."""
        self.config = config
        self.capacity = Capacity(config, self.tables)
        self.slices = Slices(config, self.tables)
        self.queue = Queue(config, self.tables, self.capacity, self.slices)
        self.operations = Operations(config, self.tables)

    def begin(
        self,
        verb: str,
        target: str,
        awaits: Await,
        version: ApiVersion,
        now: float,
        request_id: str = "",
    ) -> Operation:
        """Enters an operation for what has just been begun."""
        operation = self.operations.begin(verb, target, awaits, version, now, request_id)
        self.tick(now)
        return operation

    # --- what happens ---

    def handle(self, events: Iterable[Event], now: float) -> None:
        """Takes in what the hosts did. News of a former incarnation or boot is dropped."""
        nodes = {node.uid: node for node in self.tables.nodes.values()}
        for event in events:
            node = nodes.get(event.uid)
            if node is None or (node.incarnation, node.boot) != (event.incarnation, event.boot):
                continue
            match event:
                case HostsUp() if node.power is Power.ON and not node.up:
                    node.up = True
                    self.tables.touch(node)
                case HostsDown(power=power) if node.power is power and not node.down:
                    node.down = True
                    self.tables.touch(node)
                case HostsFailed(why=why) if node.power is Power.ON:
                    self._failed(node, why, now)
                case HostsLost() if node.notice == "preemption":
                    # What is to be taken away is not started again first.
                    self._failed(node, "the machine has been down", now)
                case HostsLost() if node.power is Power.ON:
                    self.slices.restart(node, now, _after_loss(node.state))
                case _:
                    pass
        self.tick(now)

    def _failed(self, node: Node, why: str, now: float) -> None:
        queued = self.tables.queued.get(node.queued or "")
        if node.notice == "preemption":
            node.up, node.start_by = False, None
            node.due_at = now
            self.tables.touch(node)
        elif queued is not None:
            self.queue.node_failed(queued, node, why, now)
        elif not node.was_ready and node.failures + 1 >= self.config.max_start_failures:
            self._give_up(node, why, now)
        else:
            self.slices.repair(node, why, now)

    def _give_up(self, node: Node, why: str, now: float) -> None:
        text = f"Cloud TPU was unable to complete the operation: {node.name}: {why}"
        for operation in self.tables.operations.values():
            if operation.target == node.name and not operation.done:
                operation.error = {"code": int(Code.UNKNOWN), "message": text}
                self.tables.touch(operation)
        self.slices.delete(node, now)

    # --- the clock ---

    def tick(self, now: float) -> None:
        """Does all that is due."""
        for _ in range(_MOST_STEPS):
            before = self.tables.version
            self._step(now)
            if self.tables.version == before:
                break
        else:
            raise AssertionError("the control plane does not come to rest")

    def _step(self, now: float) -> None:
        for node in self._restless(Node, now):
            if node.start_by is not None and now >= node.start_by and not node.up:
                self._failed(node, "its hosts were not up in time", now)
            if node.preempt_at is not None and now >= node.preempt_at:
                self.slices.warn(node, "preemption", now)
            self.slices.advance(node, now)
            if node.queued is not None:
                # What a slice waits for may be all that its queued resource waits for.
                self.tables.restless[QueuedResource.kind][node.queued] = None
            elif node.state is NodeState.REPAIRING and node.up and _is_due(node, now):
                self.slices.ready(node, now)
        for queued in self._restless(QueuedResource, now):
            self.queue.advance(queued, now)
        self.queue.serve(now)
        for operation in list(self.tables.open_operations()):
            self.operations.advance(operation, now)
        self.operations.forget_old(now)

    def _restless(self, kind: type[_Record], now: float) -> Iterator[_Record]:
        """Those records of a kind whose next step may be due, each until it only waits for news."""
        for record in self.tables.take_restless(kind.kind):
            assert isinstance(record, kind)
            yield record
            if any(at is not None and at > now for at in record.times()):
                self.tables.restless[kind.kind][record.name] = None

    def deadline(self, now: float) -> float | None:
        """When `tick` has to be called next, if nothing else happens; None: never."""
        times = (at for one in self.tables.still_restless() for at in one.times())
        return min((at for at in times if at is not None and at > now), default=None)


def _is_due(node: Node, now: float) -> bool:
    return node.due_at is None or now >= node.due_at


def _after_loss(state: NodeState) -> NodeState:
    """What a node is while its hosts start again after all processes of the machine were lost."""
    return NodeState.RESTARTING if state is NodeState.READY else state
