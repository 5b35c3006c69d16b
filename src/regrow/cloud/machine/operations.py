"""Long-running operations: when they are done, and with what."""

from __future__ import annotations

from typing import Any, Final, final

from regrow.cloud.config import CloudConfig
from regrow.cloud.machine.tables import Tables
from regrow.cloud.names import Place
from regrow.cloud.resources import (
    GONE_STATES,
    ApiVersion,
    Await,
    Node,
    NodeState,
    Operation,
    Power,
    QueuedResource,
    QueuedState,
)
from regrow.errors import Code

_KEPT_S: Final = 3600.0
_MOST_KEPT: Final = 4096
_FORGET_EVERY_S: Final = 60.0


@final
class Operations:
    """Makes operations, and ends them when what they wait for has come."""

    def __init__(self, config: CloudConfig, tables: Tables) -> None:
        self._config = config
        self._tables = tables
        self._forget_at = 0.0

    def begin(
        self,
        verb: str,
        target: str,
        awaits: Await,
        version: ApiVersion,
        now: float,
        request_id: str = "",
    ) -> Operation:
        """Enters a new operation; it lasts for a step at least."""
        seq = self._tables.next_seq()
        operation = Operation(
            name=Place.of(target).child(Operation.kind, f"operation-{int(now * 1000)}-{seq:x}"),
            seq=seq,
            created_at=now,
            due_at=now + self._config.step_s,
            verb=verb,
            target=target,
            awaits=awaits,
            api_version=version,
            request_id=request_id,
        )
        self._tables.add(operation)
        return operation

    def repeated(self, verb: str, target: str, request_id: str) -> Operation | None:
        """The operation that the same request has started before."""
        if not request_id:
            return None
        for operation in self._tables.operations.values():
            if (operation.verb, operation.target, operation.request_id) == (
                verb,
                target,
                request_id,
            ):
                return operation
        return None

    def end(self, operation: Operation, now: float, error: dict[str, Any] | None = None) -> None:
        """Ends an operation; without an error, with what its target is now."""
        operation.ended_at = now
        operation.due_at = None
        operation.error = operation.error or error
        target = self._target(operation)
        if operation.error is None and operation.awaits != "gone" and target is not None:
            operation.response = {"kind": target.kind, "doc": target.to_doc()}
        self._tables.touch(operation)

    def advance(self, operation: Operation, now: float) -> None:
        """Ends an operation that is due and has come to its end."""
        if operation.done or (operation.due_at is not None and now < operation.due_at):
            return
        if operation.error is not None:
            self.end(operation, now)
            return
        target = self._target(operation)
        if target is None and operation.awaits != "gone":
            self.end(operation, now, _aborted(f"{operation.target} was deleted meanwhile."))
        elif target is None or (over := self._is_over(operation, target)) is True:
            self.end(operation, now)
        elif over is not False:
            self.end(operation, now, over)

    def _target(self, operation: Operation) -> QueuedResource | Node | None:
        queued = self._tables.queued.get(operation.target)
        target = queued or self._tables.nodes.get(operation.target)
        # One that was made later by the same name is another one.
        return None if target is None or target.seq > operation.seq else target

    def _is_over(
        self, operation: Operation, target: QueuedResource | Node
    ) -> bool | dict[str, Any]:
        if operation.awaits == "gone":
            return False
        if isinstance(target, QueuedResource):
            return self._queued_is_over(operation, target)
        if operation.awaits == "stored":
            return True
        if target.state in GONE_STATES:
            return _aborted(f"{target.name} is {target.state.value} meanwhile.")
        if operation.awaits == "stopped":
            return target.state is NodeState.STOPPED
        settled = target.power is Power.ON and not target.notice
        return target.state is NodeState.READY and settled

    def _queued_is_over(
        self, operation: Operation, queued: QueuedResource
    ) -> bool | dict[str, Any]:
        if operation.awaits == "stored":
            return queued.state is not QueuedState.CREATING
        if queued.state is not QueuedState.ACTIVE:
            return _aborted(f"{queued.name} is {queued.state.value} meanwhile.")
        nodes = self._tables.live_nodes_of(queued)
        return all(node.state in {NodeState.READY, NodeState.STOPPED} for node in nodes)

    def forget_old(self, now: float) -> None:
        """Removes operations that ended long ago; looks for them now and then."""
        if now < self._forget_at:
            return
        self._forget_at = now + _FORGET_EVERY_S
        ended = [one for one in self._tables.operations.values() if one.ended_at is not None]
        surplus = len(ended) - _MOST_KEPT
        for number, operation in enumerate(ended):
            assert operation.ended_at is not None
            if number < surplus or now - operation.ended_at > _KEPT_S:
                self._tables.remove(operation)


def _aborted(message: str) -> dict[str, Any]:
    return {"code": int(Code.ABORTED), "message": message}
