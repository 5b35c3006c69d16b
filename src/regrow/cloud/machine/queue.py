"""The life of a queued resource: its wait, its slices as a gang, their repair, its end."""

from __future__ import annotations

from typing import Any, Final, final

from regrow.cloud.config import CloudConfig
from regrow.cloud.machine.capacity import Capacity, Pool, Quota
from regrow.cloud.machine.slices import Slices
from regrow.cloud.machine.tables import Tables
from regrow.cloud.resources import (
    GONE_STATES,
    Initiator,
    Node,
    NodeState,
    Power,
    QueuedResource,
    QueuedState,
)
from regrow.errors import Code

NOT_SERVED: Final = frozenset(
    {QueuedState.CREATING, QueuedState.ACCEPTED, QueuedState.WAITING_FOR_RESOURCES}
)
"""States before there are any nodes."""


@final
class Queue:
    """Moves queued resources from state to state, and serves those that wait."""

    def __init__(
        self, config: CloudConfig, tables: Tables, capacity: Capacity, slices: Slices
    ) -> None:
        self._config = config
        self._tables = tables
        self._capacity = capacity
        self._slices = slices

    # --- what happens to one ---

    def _to(self, queued: QueuedResource, state: QueuedState, now: float) -> None:
        queued.state = state
        queued.due_at = now + self._config.step_s
        queued.preempt_at = None
        self._tables.touch(queued)

    def fail(self, queued: QueuedResource, code: Code, message: str, now: float) -> None:
        """Gives up a request; what there is of its slices goes with it."""
        queued.error = {"code": int(code), "message": message}
        self._delete_nodes(queued, now)
        self._to(queued, QueuedState.FAILED, now)

    def suspend(self, queued: QueuedResource, initiator: Initiator, now: float) -> None:
        """Takes its slices away for good."""
        queued.initiator = initiator
        for node in self._tables.live_nodes_of(queued):
            if initiator == "USER":
                self._slices.delete(node, now)
            elif node.notice != "preemption":
                self._slices.warn(node, "preemption", now)
        self._to(queued, QueuedState.SUSPENDING, now)

    def delete(self, queued: QueuedResource, now: float) -> None:
        """Removes it, after its nodes."""
        self._delete_nodes(queued, now)
        self._to(queued, QueuedState.DELETING, now)

    def _delete_nodes(self, queued: QueuedResource, now: float) -> None:
        for node in self._tables.nodes_of(queued):
            if node.state is not NodeState.DELETING:
                self._slices.delete(node, now)

    def node_deleted(self, queued: QueuedResource, now: float) -> None:
        """The user has deleted one of its nodes: with the last one, or too early, it is over."""
        ends = {
            QueuedState.ACTIVE: not self._tables.live_nodes_of(queued),
            QueuedState.PROVISIONING: True,
        }
        if ends.get(queued.state, False):
            self.suspend(queued, "USER", now)

    def node_failed(self, queued: QueuedResource, node: Node, why: str, now: float) -> None:
        """The hosts of one of its nodes have failed: a new slice, or too many failures."""
        if queued.state is QueuedState.PROVISIONING:
            queued.failures += 1
            self._tables.touch(queued)
            if queued.failures >= self._config.max_start_failures:
                text = f"Cloud TPU was unable to complete the operation: {node.name}: {why}"
                self.fail(queued, Code.UNKNOWN, text, now)
                return
        self._slices.repair(node, why, now)

    # --- the clock ---

    def advance(self, queued: QueuedResource, now: float) -> None:
        """Takes the next step of one queued resource, if it is due."""
        if queued.state in NOT_SERVED and _is_over(queued.valid_until, now):
            text = "The request expired before its resources became available (valid until)."
            self.fail(queued, Code.DEADLINE_EXCEEDED, text, now)
        if queued.preempt_at is not None and now >= queued.preempt_at:
            self.suspend(queued, "SERVICE", now)
        if queued.due_at is not None and now < queued.due_at:
            return
        match queued.state:
            case QueuedState.CREATING:
                self._to(queued, QueuedState.WAITING_FOR_RESOURCES, now)
            case QueuedState.PROVISIONING:
                self._gather(queued, now)
            case QueuedState.ACTIVE:
                self._rejoin(queued, now)
            case QueuedState.SUSPENDING if self._is_without_slices(queued):
                self._to(queued, QueuedState.SUSPENDED, now)
            case QueuedState.DELETING if not self._tables.nodes_of(queued):
                self._tables.remove(queued)
            case _:
                pass

    def _is_without_slices(self, queued: QueuedResource) -> bool:
        states = {node.state for node in self._tables.nodes_of(queued)}
        return states <= {NodeState.PREEMPTED}

    def _gather(self, queued: QueuedResource, now: float) -> None:
        """All slices or none: it is active once every one is up."""
        nodes = self._tables.nodes_of(queued)
        if not all(node.up for node in nodes):
            return
        for node in nodes:
            self._slices.ready(node, now)
        self._to(queued, QueuedState.ACTIVE, now)
        if queued.tier.preemptible:
            queued.preempt_at = self._slices.chance(nodes[0].uid, now)

    def _rejoin(self, queued: QueuedResource, now: float) -> None:
        """After the repair of some slices all the others are reset, and then all are ready.

        A new slice runs its startup script when the others have been reset: before, it would meet
        what runs there of the job that has failed.
        """
        nodes = self._tables.live_nodes_of(queued)
        repaired = [node for node in nodes if node.state is NodeState.REPAIRING]
        if not repaired or not all(node.up and _is_over(node.due_at, now) for node in repaired):
            return
        if not all(node.rejoining for node in repaired):
            for node in nodes:
                is_up = node.state in {NodeState.READY, NodeState.RESTARTING}
                # One that is being preempted comes back in its own time, with another reset.
                if is_up and node.notice != "preemption":
                    self._slices.restart(node, now)
            for node in repaired:
                node.rejoining = True
                self._tables.touch(node)
        elif not any(node.state is NodeState.RESTARTING for node in nodes):
            for node in repaired:
                self._slices.ready(node, now)

    # --- the queue ---

    def serve(self, now: float) -> None:
        """Gives chips to those who are first: slices in repair, then requests by tier and age.

        A request that has to wait for chips holds up those behind it that want the same; one that
        has to wait for its project's quota only those that count for the same quota.
        """
        for node in self._in_repair(now):
            pool = self._capacity.find(node)
            if pool is not None:
                self._slices.replace(node, pool, now, hold_script=node.slices > 1)
        held_up: set[Pool | Quota] = set()
        for queued in self._waiting(now):
            quota = self._capacity.quota_of(queued)
            wanted: set[Pool | Quota] = {*self._capacity.pools(queued)}
            if quota in held_up:
                continue
            if wanted & held_up:
                held_up |= wanted
            elif quota is not None and not self._capacity.quota_allows(queued):
                held_up.add(quota)
            elif (pool := self._capacity.find(queued)) is not None:
                self._provide(queued, pool, now)
            else:
                held_up |= wanted
                self._make_room(queued, now)

    def _in_repair(self, now: float) -> list[Node]:
        return [
            node
            for node in self._tables.nodes.values()
            if node.state is NodeState.REPAIRING
            and node.power is Power.GONE
            and node.down
            and _is_over(node.due_at, now)
        ]

    def _waiting(self, now: float) -> list[QueuedResource]:
        waiting = [
            queued
            for queued in self._tables.queued.values()
            if queued.state is QueuedState.WAITING_FOR_RESOURCES
            and _is_over(queued.due_at, now)
            and (queued.valid_after is None or now >= queued.valid_after)
        ]
        return sorted(waiting, key=lambda one: (one.tier.rank, one.seq))

    def _provide(self, queued: QueuedResource, pool: Pool, now: float) -> None:
        queued.held = True
        self._to(queued, QueuedState.PROVISIONING, now)
        for index, name in enumerate(queued.node_names):
            self._slices.provide(self._node(queued, index, name, now), pool, now)

    def _node(self, queued: QueuedResource, index: int, name: str, now: float) -> Node:
        seq = self._tables.next_seq()
        body: dict[str, Any] = queued.body["tpu"]["nodeSpec"][0]["node"]
        return Node(
            name=name,
            seq=seq,
            created_at=now,
            accelerator_type=queued.accelerator_type,
            topology=queued.topology,
            tier=queued.tier,
            reservation=queued.reservation,
            api_version=queued.api_version,
            uid=uid_of(seq, now),
            body=body,
            queued=queued.name,
            slice_index=index,
            slices=len(queued.node_ids),
        )

    def _make_room(self, queued: QueuedResource, now: float) -> None:
        """Preempts spot slices for a request that goes before them, if that is enough."""
        if queued.tier.preemptible:
            return
        for pool in self._capacity.pools(queued):
            taken = self._capacity.taken()[pool] + self._capacity.claimed()[pool]
            missing = queued.chips - self._capacity.size(pool) + taken - self._leaving(pool)
            victims: list[QueuedResource] = []
            for one in sorted(self._tables.queued.values(), key=lambda one: -one.seq):
                if missing > 0 and self._may_go(one, pool):
                    victims.append(one)
                    missing -= one.chips
            if missing <= 0:
                for victim in victims:
                    self.suspend(victim, "SERVICE", now)
                return

    def _leaving(self, pool: Pool) -> int:
        """Chips of nodes that are about to give them back."""
        return sum(
            node.chips
            for node in self._tables.nodes.values()
            if node.holds_capacity
            and self._capacity.pools(node)[:1] == [pool]
            and (node.notice == "preemption" or node.state in GONE_STATES)
        )

    def _may_go(self, queued: QueuedResource, pool: Pool) -> bool:
        states = {QueuedState.PROVISIONING, QueuedState.ACTIVE}
        return (
            queued.tier.preemptible
            and queued.state in states
            and self._capacity.pools(queued) == [pool]
        )


def uid_of(seq: int, now: float) -> int:
    """A positive number of 63 bits that no other node has."""
    return (int(now) << 24 | seq & 0xFFFFFF) & (2**63 - 1)


def _is_over(at: float | None, now: float) -> bool:
    return at is not None and now >= at
