"""What can be asked of nodes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

from regrow.cloud.machine import admission
from regrow.cloud.machine.capacity import no_capacity
from regrow.cloud.machine.core import Core
from regrow.cloud.machine.queue import NOT_SERVED
from regrow.cloud.machine.refusals import already_exists, found, not_in
from regrow.cloud.names import Place
from regrow.cloud.resources import ApiVersion, Await, Node, NodeState, Operation
from regrow.errors import CloudApiError, Code


@final
class NodeRequests:
    """The methods of nodes."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def create(
        self,
        place: Place,
        node_id: str,
        body: dict[str, Any],
        now: float,
        *,
        version: ApiVersion = "v2",
        request_id: str = "",
    ) -> Operation:
        """Makes a node at once, or not at all: then the operation has the error.

        Raises:
            CloudApiError: INVALID_ARGUMENT, NOT_FOUND (the zone), ALREADY_EXISTS,
                RESOURCE_EXHAUSTED (the quota).
        """
        name = place.child(Node.kind, node_id)
        if known := self._core.operations.repeated("create", name, request_id):
            return known
        admission.check_zone(self._core.config, place)
        node = admission.node_from(body, place, node_id, version, self._core.tables.next_seq(), now)
        planned = (one for one in self._core.tables.queued.values() if one.state in NOT_SERVED)
        if name in self._core.tables.nodes or any(name in one.node_names for one in planned):
            raise already_exists(name)
        if not self._core.capacity.quota_allows(node):
            raise self._core.capacity.exhausted(node)
        pool = self._core.capacity.find(node)
        if pool is not None:
            self._core.slices.provide(node, pool, now)
            return self._core.begin("create", name, "ready", version, now, request_id)
        operation = self._core.operations.begin("create", name, "ready", version, now, request_id)
        refusal = no_capacity(node)
        operation.error = {"code": int(refusal.code), "message": refusal.message}
        self._core.tick(now)
        return operation

    def get(self, name: str) -> Node:
        """A node.

        Raises:
            CloudApiError: NOT_FOUND.
        """
        return found(self._core.tables.nodes, name)

    def patch(
        self, name: str, changes: dict[str, Any], now: float, *, version: ApiVersion = "v2"
    ) -> Operation:
        """Replaces fields of a node by their new values; None removes one.

        Raises:
            CloudApiError: NOT_FOUND, INVALID_ARGUMENT.
        """
        node = self.get(name)
        admission.check_description(changes)
        admission.check_labels(changes)
        node.body = {k: v for k, v in (node.body | changes).items() if v is not None}
        self._core.tables.touch(node)
        return self._core.begin("update", name, "stored", version, now)

    def delete(
        self, name: str, now: float, *, version: ApiVersion = "v2", request_id: str = ""
    ) -> Operation:
        """Deletes a node; with its last node a queued resource is suspended.

        Raises:
            CloudApiError: NOT_FOUND.
        """
        if known := self._core.operations.repeated("delete", name, request_id):
            return known
        node = self.get(name)
        if node.state is not NodeState.DELETING:
            self._core.slices.delete(node, now)
        if node.queued is not None and node.queued in self._core.tables.queued:
            self._core.queue.node_deleted(self._core.tables.queued[node.queued], now)
        return self._core.begin("delete", name, "gone", version, now, request_id)

    def stop(self, name: str, now: float, *, version: ApiVersion = "v2") -> Operation:
        """Ends the processes of a node of a single host; its disk stays.

        Raises:
            CloudApiError: NOT_FOUND, FAILED_PRECONDITION.
        """
        node = self.get(name)
        if node.accelerator.hosts > 1 or node.slices > 1:
            raise CloudApiError(
                Code.FAILED_PRECONDITION,
                f"{name} has several hosts: only single ones can be stopped.",
            )
        if node.state is not NodeState.READY or node.notice:
            raise not_in(name, node.state, "stopped", "READY")
        self._core.slices.stop(node, now)
        return self._core.begin("stop", name, "stopped", version, now)

    def start(self, name: str, now: float, *, version: ApiVersion = "v2") -> Operation:
        """Starts a stopped node again.

        Raises:
            CloudApiError: NOT_FOUND, FAILED_PRECONDITION.
        """
        node = self.get(name)
        if node.state is not NodeState.STOPPED:
            raise not_in(name, node.state, "started", "STOPPED")
        self._core.slices.restart(node, now, NodeState.STARTING)
        return self._core.begin("start", name, "ready", version, now)

    def maintain(
        self, names: Iterable[str], target: str, now: float, *, version: ApiVersion = "v2alpha1"
    ) -> Operation:
        """Has a maintenance event come over nodes: a notice, then new hosts.

        Args:
            names: The nodes.
            target: The node or queued resource that the operation is about.
            now: The time.
            version: The API version.

        Raises:
            CloudApiError: NOT_FOUND, FAILED_PRECONDITION.
        """
        nodes = [self.get(name) for name in names]
        for node in nodes:
            if node.state is not NodeState.READY or node.notice:
                raise not_in(node.name, node.state, "maintained", "READY")
        for node in nodes:
            self._core.slices.warn(node, "maintenance", now)
        awaits: Await = "ready" if target in self._core.tables.queued else "settled"
        return self._core.begin("update", target, awaits, version, now)
