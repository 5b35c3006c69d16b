"""What the control plane remembers: queued resources, nodes and operations.

A record is plain data: `to_doc` of it is JSON, and `from_doc` reads that again. What a field holds is
replaced, never changed in place.
Times are seconds since 1970.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Final, Literal, Self, final

from regrow.cloud.accelerators import ACCELERATORS, Accelerator, by_topology
from regrow.cloud.names import Place


class QueuedState(StrEnum):
    """QueuedResourceState.State. ACCEPTED is legacy: WAITING_FOR_RESOURCES has replaced it."""

    CREATING = "CREATING"
    ACCEPTED = "ACCEPTED"
    PROVISIONING = "PROVISIONING"
    FAILED = "FAILED"
    DELETING = "DELETING"
    ACTIVE = "ACTIVE"
    SUSPENDING = "SUSPENDING"
    SUSPENDED = "SUSPENDED"
    WAITING_FOR_RESOURCES = "WAITING_FOR_RESOURCES"


class NodeState(StrEnum):
    """Node.State, as far as a local node has them."""

    CREATING = "CREATING"
    READY = "READY"
    RESTARTING = "RESTARTING"
    DELETING = "DELETING"
    REPAIRING = "REPAIRING"
    STOPPED = "STOPPED"
    STOPPING = "STOPPING"
    STARTING = "STARTING"
    PREEMPTED = "PREEMPTED"


class Health(StrEnum):
    """Node.Health, as far as a local node has it."""

    UNSPECIFIED = "HEALTH_UNSPECIFIED"
    HEALTHY = "HEALTHY"
    UNHEALTHY_MAINTENANCE = "UNHEALTHY_MAINTENANCE"


class Tier(StrEnum):
    """How a request is paid for; the earlier ones are served first."""

    RESERVED = "reserved"
    GUARANTEED = "guaranteed"
    ON_DEMAND = "on-demand"
    SPOT = "spot"
    BEST_EFFORT = "best-effort"

    @property
    def preemptible(self) -> bool:
        """Whether slices of it may be taken away."""
        return self in (Tier.SPOT, Tier.BEST_EFFORT)

    @property
    def rank(self) -> int:
        """Its place in the queue; the lower goes first."""
        return list(Tier).index(self)


class Power(StrEnum):
    """What the hosts of a node are to do."""

    ON = "on"
    OFF = "off"
    """No processes; the disk stays."""
    GONE = "gone"
    """No processes and no disk."""


Notice = Literal["", "preemption", "maintenance"]
Initiator = Literal["", "USER", "SERVICE"]
ApiVersion = Literal["v2", "v2alpha1"]

GONE_STATES: Final = frozenset({NodeState.DELETING, NodeState.PREEMPTED})
"""States of a node that will not run again."""


@dataclass(kw_only=True)
class Record:
    """What all records have.

    Attributes:
        name: Full name.
        seq: Order of creation, over all records.
        created_at: When it was created.
        due_at: When its state may change next by the clock alone; None: by an event only.
    """

    kind: ClassVar[str]

    name: str
    seq: int
    created_at: float
    due_at: float | None = None

    @property
    def place(self) -> Place:
        """Where it is."""
        return Place.of(self.name)

    def to_doc(self) -> dict[str, Any]:
        """As JSON; the values are shared, not copied."""
        return {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}

    def times(self) -> tuple[float | None, ...]:
        """When something may be due by the clock alone."""
        return (self.due_at,)

    @classmethod
    def from_doc(cls, doc: dict[str, Any]) -> Self:
        """From `to_doc`."""
        enums = {"power": Power, "health": Health, "tier": Tier}
        fields: dict[str, Any] = {
            key: enums[key](value) if key in enums else value for key, value in doc.items()
        }
        return cls(**fields)


@dataclass(kw_only=True)
class Granted(Record):
    """What asks for capacity.

    Attributes:
        accelerator_type: Shape of each slice.
        topology: Its topology.
        tier: How it is paid for.
        reservation: Id of the reservation; "-": any; None unless the tier is RESERVED.
        api_version: By which version it was created.
    """

    accelerator_type: str
    topology: str
    tier: Tier
    reservation: str | None = None
    api_version: ApiVersion = "v2"

    @property
    def accelerator(self) -> Accelerator:
        """Shape of each slice."""
        named = ACCELERATORS.get(self.accelerator_type)
        if named is not None and named.topology == self.topology:
            return named
        prefix = self.accelerator_type.partition("-")[0]
        kind = next(a.generation for a in ACCELERATORS.values() if a.generation.prefix == prefix)
        found = by_topology(kind.type, self.topology)
        assert found is not None
        return found


@final
@dataclass(kw_only=True)
class QueuedResource(Granted):
    """A request for slices that waits until it can be served whole.

    Attributes:
        body: What the user gave, in the API's own fields.
        node_ids: Ids of its nodes, by slice.
        state: Its state.
        initiator: Who suspends it.
        error: Why it failed, as google.rpc.Status.
        valid_after: It is not served before.
        valid_until: It fails if it is not being served by then.
        failures: How often its slices failed to start.
        preempt_at: When it is to be preempted by chance.
        held: Whether it counts for its project's quota of chips: from being served to deletion.
    """

    kind: ClassVar[str] = "queuedResources"

    body: dict[str, Any]
    node_ids: list[str]
    state: QueuedState = QueuedState.CREATING
    initiator: Initiator = ""
    error: dict[str, Any] | None = None
    valid_after: float | None = None
    valid_until: float | None = None
    failures: int = 0
    preempt_at: float | None = None
    held: bool = False

    def times(self) -> tuple[float | None, ...]:
        """When something may be due by the clock alone."""
        return (self.due_at, self.preempt_at, self.valid_after, self.valid_until)

    @property
    def chips(self) -> int:
        """Chips of all its slices."""
        return self.accelerator.chips * len(self.node_ids)

    @property
    def node_names(self) -> list[str]:
        """Full names of its nodes, by slice."""
        return [self.place.child(Node.kind, node_id) for node_id in self.node_ids]

    @classmethod
    def from_doc(cls, doc: dict[str, Any]) -> QueuedResource:
        """From `to_doc`."""
        return super().from_doc(doc | {"state": QueuedState(doc["state"])})


@final
@dataclass(kw_only=True)
class Node(Granted):
    """A slice.

    Attributes:
        uid: Its number, unlike that of any other node that ever was.
        body: What the user gave, in the API's own fields.
        queued: Name of its queued resource; None if it was created by itself.
        slice_index: Its place in a Multislice.
        slices: Slices of the Multislice; 1: it is none.
        state: Its state.
        power: What its hosts are to do.
        incarnation: Counts the times that its hosts were made anew, with empty disks.
        boot: Counts the starts of its hosts.
        up: Whether the hosts of this boot are up.
        down: Whether the hosts have obeyed the power OFF or GONE.
        run_script: Whether the startup script may run: a replaced slice waits for the others.
        rejoining: Whether the other slices have been reset for it, and it waits for them.
        notice: Of what its hosts are warned.
        holds_capacity: Whether its chips are taken from the pool.
        pool: From which reservation they are taken; None: the zone's free capacity.
        failures: How often in a row its hosts failed.
        was_ready: Whether it has ever been READY.
        start_by: When its hosts must be up.
        preempt_at: When it is to be preempted by chance.
        health: Its health.
        trouble: What last went wrong with its hosts.
        first_host: Number of its first host, from which the addresses follow.
    """

    kind: ClassVar[str] = "nodes"

    uid: int
    body: dict[str, Any]
    queued: str | None = None
    slice_index: int = 0
    slices: int = 1
    state: NodeState = NodeState.CREATING
    power: Power = Power.ON
    incarnation: int = 1
    boot: int = 1
    up: bool = False
    down: bool = False
    run_script: bool = True
    rejoining: bool = False
    notice: Notice = ""
    holds_capacity: bool = False
    pool: str | None = None
    failures: int = 0
    was_ready: bool = False
    start_by: float | None = None
    preempt_at: float | None = None
    health: Health = Health.UNSPECIFIED
    trouble: str = ""
    first_host: int = 0

    def times(self) -> tuple[float | None, ...]:
        """When something may be due by the clock alone."""
        return (self.due_at, self.start_by, self.preempt_at)

    @property
    def chips(self) -> int:
        """Its chips."""
        return self.accelerator.chips

    @classmethod
    def from_doc(cls, doc: dict[str, Any]) -> Node:
        """From `to_doc`."""
        return super().from_doc(doc | {"state": NodeState(doc["state"])})


Await = Literal["stored", "ready", "settled", "stopped", "gone"]


@final
@dataclass(kw_only=True)
class Operation(Record):
    """A long-running operation.

    Attributes:
        verb: What is done, say "create".
        target: Full name of what it is done to.
        awaits: When it is done: once the target is stored, ready, in no transition, stopped, gone.
        api_version: By which version it was started.
        request_id: The client's id of the request that started it.
        ended_at: When it was done; None: it is not.
        error: As google.rpc.Status, if it failed.
        cancel_requested: Whether the user cancelled it.
        response: What the target was when the operation was done; None for a deletion.
    """

    kind: ClassVar[str] = "operations"

    verb: str
    target: str
    awaits: Await
    api_version: ApiVersion
    request_id: str = ""
    ended_at: float | None = None
    error: dict[str, Any] | None = None
    cancel_requested: bool = False
    response: dict[str, Any] | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.ended_at is not None


AnyRecord = QueuedResource | Node | Operation
KINDS: Final[dict[str, type[QueuedResource] | type[Node] | type[Operation]]] = {
    one.kind: one for one in (QueuedResource, Node, Operation)
}
