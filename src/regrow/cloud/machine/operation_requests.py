"""What can be asked of operations."""

from __future__ import annotations

from typing import final

from regrow.cloud.machine.core import Core
from regrow.cloud.machine.refusals import found
from regrow.cloud.resources import NodeState, Operation
from regrow.errors import Code


@final
class OperationRequests:
    """The methods of operations."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def get(self, name: str) -> Operation:
        """An operation.

        Raises:
            CloudApiError: NOT_FOUND.
        """
        return found(self._core.tables.operations, name)

    def cancel(self, name: str, now: float) -> None:
        """Cancels an operation where that is possible: the creation of a node."""
        operation = self.get(name)
        if operation.done:
            return
        operation.cancel_requested = True
        self._core.tables.touch(operation)
        node = self._core.tables.nodes.get(operation.target)
        if operation.verb == "create" and node is not None and node.state is NodeState.CREATING:
            operation.error = {
                "code": int(Code.CANCELLED),
                "message": "The operation was cancelled.",
            }
            operation.due_at = None
            self._core.slices.delete(node, now)
        self._core.tick(now)

    def delete(self, name: str) -> None:
        """Forgets an operation; what it does goes on."""
        self._core.tables.remove(self.get(name))
