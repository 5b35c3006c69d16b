"""What can be asked of queued resources."""

from __future__ import annotations

from typing import Any, Final, final

from regrow.cloud.machine import admission
from regrow.cloud.machine.core import Core
from regrow.cloud.machine.queue import NOT_SERVED
from regrow.cloud.machine.refusals import already_exists, found, not_in
from regrow.cloud.names import Place
from regrow.cloud.resources import (
    GONE_STATES,
    ApiVersion,
    Node,
    NodeState,
    Operation,
    QueuedResource,
    QueuedState,
)
from regrow.errors import CloudApiError, Code

_DELETABLE: Final = NOT_SERVED | {QueuedState.FAILED, QueuedState.SUSPENDED, QueuedState.DELETING}
_RESETTABLE: Final = {NodeState.READY, NodeState.RESTARTING}


@final
class QueuedRequests:
    """The methods of queuedResources, and the preemption of spot capacity."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def create(
        self,
        place: Place,
        queued_id: str,
        body: dict[str, Any],
        now: float,
        *,
        version: ApiVersion = "v2",
        request_id: str = "",
    ) -> Operation:
        """Takes a request in.

        Raises:
            CloudApiError: INVALID_ARGUMENT, NOT_FOUND (the zone), ALREADY_EXISTS,
                RESOURCE_EXHAUSTED (a quota, or a request that no quota will ever allow).
        """
        name = place.child(QueuedResource.kind, queued_id)
        if known := self._core.operations.repeated("create", name, request_id):
            return known
        admission.check_zone(self._core.config, place)
        queued = admission.queued_from(body, place, queued_id, version, 0, now)
        self._check_new(queued)
        self._check_quota(queued)
        queued.seq = self._core.tables.next_seq()
        queued.due_at = now + self._core.config.step_s
        self._core.tables.add(queued)
        return self._core.begin("create", name, "stored", version, now, request_id)

    def _check_new(self, queued: QueuedResource) -> None:
        if queued.name in self._core.tables.queued:
            raise already_exists(queued.name)
        planned = {
            name
            for other in self._core.tables.queued.values()
            if other.state in NOT_SERVED
            for name in other.node_names
        }
        for name in queued.node_names:
            if name in self._core.tables.nodes or name in planned:
                raise already_exists(name)

    def _check_quota(self, queued: QueuedResource) -> None:
        same = [one for one in self._core.tables.queued.values() if one.place == queued.place]
        limit = self._core.config.queued_resources_quota
        if len(same) >= limit:
            raise CloudApiError(
                Code.RESOURCE_EXHAUSTED,
                "Quota limit 'QueuedResourcesPerProjectPerZoneForTPUAPI' has been exceeded. Limit: "
                f"{limit} in zone {queued.place.zone}; failed and suspended ones count until they "
                "are deleted.",
            )
        self._core.capacity.check_limit(queued)
        if not self._core.capacity.pools(queued):
            raise CloudApiError(
                Code.INVALID_ARGUMENT,
                f"There is no reservation {queued.reservation or 'for this accelerator'} that "
                f"{queued.place.project} may use in {queued.place.zone}.",
            )

    def get(self, name: str) -> QueuedResource:
        """A queued resource.

        Raises:
            CloudApiError: NOT_FOUND.
        """
        return found(self._core.tables.queued, name)

    def delete(
        self,
        name: str,
        now: float,
        *,
        force: bool = False,
        version: ApiVersion = "v2",
        request_id: str = "",
    ) -> Operation:
        """Deletes a queued resource; with `force` also its nodes.

        Raises:
            CloudApiError: NOT_FOUND, FAILED_PRECONDITION (it has nodes and `force` is not given).
        """
        if known := self._core.operations.repeated("delete", name, request_id):
            return known
        queued = self.get(name)
        if not force and queued.state not in _DELETABLE and self._core.tables.nodes_of(queued):
            raise CloudApiError(
                Code.FAILED_PRECONDITION,
                f"{name} is {queued.state.value} and has nodes; delete them first, or use force.",
            )
        if queued.state is not QueuedState.DELETING:
            self._core.queue.delete(queued, now)
        return self._core.begin("delete", name, "gone", version, now, request_id)

    def reset(self, name: str, now: float, *, version: ApiVersion = "v2") -> Operation:
        """Restarts all hosts of a queued resource: memory is lost, disks stay.

        Raises:
            CloudApiError: NOT_FOUND, FAILED_PRECONDITION (it is not ACTIVE).
        """
        queued = self.get(name)
        if queued.state is not QueuedState.ACTIVE:
            raise not_in(name, queued.state, "reset", "ACTIVE")
        for node in self._core.tables.live_nodes_of(queued):
            # One that is being repaired resets the others itself, when it is back.
            if node.state in _RESETTABLE:
                self._core.slices.restart(node, now)
        return self._core.begin("reset", name, "ready", version, now)

    def preempt(self, name: str, now: float) -> None:
        """Preempts a queued resource, one slice of a Multislice, or a node of its own.

        A slice of a Multislice is replaced when there is capacity. Anything else is over with that.

        Raises:
            CloudApiError: NOT_FOUND, FAILED_PRECONDITION (it is not spot, or has no slices).
        """
        node = self._core.tables.nodes.get(name)
        if node is not None and node.queued is not None and node.slices == 1:
            name, node = node.queued, None
        target = node or self.get(name)
        if not target.tier.preemptible:
            raise CloudApiError(
                Code.FAILED_PRECONDITION, f"{name} is {target.tier.value}: only spot is preempted."
            )
        if isinstance(target, Node):
            in_multislice = target.queued is not None
            if target.state in GONE_STATES or (
                in_multislice and (target.state is not NodeState.READY or target.notice)
            ):
                raise not_in(name, target.state, "preempted", "READY")
            self._core.slices.warn(target, "preemption", now)
        else:
            if target.state not in {QueuedState.PROVISIONING, QueuedState.ACTIVE}:
                raise not_in(name, target.state, "preempted", "ACTIVE")
            self._core.queue.suspend(target, "SERVICE", now)
        self._core.tick(now)
