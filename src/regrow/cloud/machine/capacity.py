"""Chips: how many there are, who has them, and who may have more."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final, final

from regrow.cloud.config import CloudConfig, ReservationConfig
from regrow.cloud.machine.tables import Tables
from regrow.cloud.names import Place
from regrow.cloud.resources import Granted, Node, NodeState, QueuedResource, Tier
from regrow.errors import CloudApiError, Code

ANY_RESERVATION: Final = "-"


@final
@dataclass(frozen=True, slots=True)
class Pool:
    """Chips that requests compete for: those of a zone, or of a reservation in it."""

    zone: str
    generation: str
    reservation: str | None = None


@final
@dataclass(frozen=True, slots=True)
class Quota:
    """A limit on the chips of a project in a zone."""

    project: str
    zone: str
    generation: str
    spot: bool

    @property
    def metric(self) -> str:
        """Its name in error messages."""
        spot = "Preemptible" if self.spot else ""
        return f"TPU{self.generation.upper()}{spot}PerProjectPerZoneForTPUAPI"


@final
class Capacity:
    """Who holds which chips, and what is left; computed from the tables when it is asked for."""

    def __init__(self, config: CloudConfig, tables: Tables) -> None:
        self._config = config
        self._tables = tables

    def limit(self, quota: Quota) -> int:
        """Chips that a quota allows."""
        table = self._config.spot_quota if quota.spot else self._config.on_demand_quota
        return table.get(quota.generation, 0)

    def quota_of(self, record: Granted) -> Quota | None:
        """The quota that a request counts for; None for reserved ones."""
        if record.tier is Tier.RESERVED:
            return None
        place = record.place
        generation = record.accelerator.generation.name
        return Quota(place.project, place.zone, generation, record.tier.preemptible)

    def used_of(self, quota: Quota) -> int:
        """Chips that a project holds: dead queued resources hold theirs until they are deleted."""
        queued = (one for one in self._tables.queued.values() if one.held)
        alone = (one for one in self._tables.nodes.values() if one.queued is None)
        holders: list[QueuedResource | Node] = [*queued, *alone]
        return sum(one.chips for one in holders if self.quota_of(one) == quota)

    def quota_allows(self, record: QueuedResource | Node) -> bool:
        """Whether a project may have so many chips more now."""
        quota = self.quota_of(record)
        return quota is None or self.used_of(quota) + record.chips <= self.limit(quota)

    def check_limit(self, record: QueuedResource | Node) -> None:
        """Refuses what no quota will ever allow.

        Raises:
            CloudApiError: RESOURCE_EXHAUSTED.
        """
        quota = self.quota_of(record)
        if quota is not None and record.chips > self.limit(quota):
            raise quota_error(quota, self.limit(quota))

    def exhausted(self, record: QueuedResource | Node) -> CloudApiError:
        """The answer to a request that its project's quota does not allow now."""
        quota = self.quota_of(record)
        assert quota is not None
        return quota_error(quota, self.limit(quota))

    def reservations(self, place: Place) -> list[ReservationConfig]:
        """The reservations that a project may use in a zone."""
        return [
            one
            for one in self._config.reservations
            if one.zone == place.zone and one.project in ("*", place.project)
        ]

    def pools(self, record: Granted) -> list[Pool]:
        """Where the chips of a request may come from, each from one alone."""
        place, generation = record.place, record.accelerator.generation.name
        if record.tier is not Tier.RESERVED:
            return [Pool(place.zone, generation)]
        return [
            Pool(place.zone, generation, one.name)
            for one in self.reservations(place)
            if one.generation == generation
            and record.reservation in (ANY_RESERVATION, None, one.name)
        ]

    def size(self, pool: Pool) -> int:
        """Chips of a pool, taken or not."""
        if pool.reservation is None:
            return self._config.zones.get(pool.zone, {}).get(pool.generation, 0)
        found = (
            one.chips
            for one in self._config.reservations
            if (one.zone, one.generation, one.name)
            == (pool.zone, pool.generation, pool.reservation)
        )
        return sum(found)

    def taken(self) -> Counter[Pool]:
        """Chips that nodes hold, by pool."""
        taken: Counter[Pool] = Counter()
        for node in self._tables.nodes.values():
            if node.holds_capacity:
                taken[pool_of(node)] += node.chips
        return taken

    def claimed(self) -> Counter[Pool]:
        """Chips that nodes in repair will take again before anybody else may."""
        claimed: Counter[Pool] = Counter()
        for node in self._tables.nodes.values():
            if node.state is NodeState.REPAIRING and not node.holds_capacity:
                claimed[pool_of(node)] += node.chips
        return claimed

    def find(self, record: QueuedResource | Node) -> Pool | None:
        """A pool that has the chips for all of a request now, or for a node in repair."""
        in_repair = isinstance(record, Node) and record.state is NodeState.REPAIRING
        taken = self.taken() if in_repair else self.taken() + self.claimed()
        for pool in self.pools(record):
            if self.size(pool) - taken[pool] >= record.chips:
                return pool
        return None


def pool_of(node: Node) -> Pool:
    """The pool that a node takes its chips from."""
    return Pool(node.place.zone, node.accelerator.generation.name, node.pool)


def quota_error(quota: Quota, limit: int) -> CloudApiError:
    """The answer to a request that is beyond a quota."""
    return CloudApiError(
        Code.RESOURCE_EXHAUSTED,
        f"Quota limit '{quota.metric}' has been exceeded. Limit: {limit} chips in zone {quota.zone}.",
    )


def no_capacity(record: Granted) -> CloudApiError:
    """The answer to a request that there are no chips for."""
    if record.tier is Tier.RESERVED:
        return CloudApiError(
            Code.RESOURCE_EXHAUSTED,
            "Insufficient reserved capacity. Ask for a larger reservation, or for fewer chips.",
        )
    return CloudApiError(
        Code.RESOURCE_EXHAUSTED,
        f'There is no more capacity in the zone "{record.place.zone}"; you can try in another zone '
        "where Cloud TPU Nodes are offered (see https://cloud.google.com/tpu/docs/regions)",
    )
