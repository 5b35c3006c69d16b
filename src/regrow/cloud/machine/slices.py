"""The life of a node: one slice, its hosts, and what becomes of it."""

from __future__ import annotations

import random
from typing import Final, final

from regrow.cloud.config import CloudConfig
from regrow.cloud.machine.capacity import Pool
from regrow.cloud.machine.tables import Tables
from regrow.cloud.resources import Health, Node, NodeState, Notice, Power, QueuedState

_UP_STATES: Final = {NodeState.STARTING, NodeState.RESTARTING}
_LONGEST_PAUSE_S: Final = 60.0


@final
class Slices:
    """Moves nodes from state to state; what concerns several of them is for `Queue`."""

    def __init__(self, config: CloudConfig, tables: Tables) -> None:
        self._config = config
        self._tables = tables

    # --- beginnings ---

    def provide(self, node: Node, pool: Pool, now: float) -> None:
        """Gives a new node its chips and starts its hosts."""
        node.pool, node.holds_capacity = pool.reservation, True
        node.first_host = self._tables.free_hosts(node.accelerator)
        self._tables.add(node)
        self._power_on(node, NodeState.CREATING, now)

    def restart(self, node: Node, now: float, state: NodeState = NodeState.RESTARTING) -> None:
        """Starts its hosts again, with the disks that they have and empty memory."""
        node.boot += 1
        self._power_on(node, state, now)

    def _power_on(self, node: Node, state: NodeState, now: float) -> None:
        node.state, node.power, node.notice = state, Power.ON, ""
        node.up = node.down = node.rejoining = False
        node.health = Health.UNSPECIFIED
        node.due_at = now + self._config.step_s
        node.start_by = now + self._config.start_deadline_s
        self._tables.touch(node)

    def ready(self, node: Node, now: float) -> None:
        """Its hosts are up, and it is what was asked for."""
        fresh, node.was_ready = not node.was_ready, True
        node.state, node.health, node.run_script = NodeState.READY, Health.HEALTHY, True
        node.due_at = node.start_by = None
        node.failures, node.trouble, node.rejoining = 0, "", False
        if fresh and node.queued is None and node.tier.preemptible:
            node.preempt_at = self.chance(node.uid, now)
        self._tables.touch(node)

    def chance(self, uid: int, now: float) -> float | None:
        """When something is preempted by chance: a matter of its number and the seed alone."""
        rate = self._config.preemptions_per_hour
        if not rate:
            return None
        pick = random.Random(f"{self._config.seed}/{uid}")  # noqa: S311 - a simulation
        return now + pick.expovariate(rate / 3600.0)

    # --- interruptions ---

    def repair(self, node: Node, why: str, now: float) -> None:
        """Gives up its hosts and disks, to make new ones when there is capacity."""
        pause_s = min(self._config.step_s * 2 ** min(node.failures, 20), _LONGEST_PAUSE_S)
        node.failures += 1
        node.trouble = why
        node.holds_capacity = False
        self._power_off(node, NodeState.REPAIRING, Power.GONE, now + pause_s)

    def replace(self, node: Node, pool: Pool, now: float, *, hold_script: bool) -> None:
        """Makes new hosts for a node in repair that has got chips again."""
        node.pool, node.holds_capacity = pool.reservation, True
        node.incarnation += 1
        node.boot = 1
        self._power_on(node, NodeState.REPAIRING, now)
        node.run_script = not hold_script

    def warn(self, node: Node, notice: Notice, now: float) -> None:
        """Tells its hosts what is about to happen to them."""
        node.notice = notice
        node.preempt_at = None
        node.due_at = now + (self._config.notice_s if node.up else 0.0)
        if notice == "maintenance":
            node.health = Health.UNHEALTHY_MAINTENANCE
        self._tables.touch(node)

    def stop(self, node: Node, now: float) -> None:
        """Ends its hosts' processes; the disks stay."""
        self._power_off(node, NodeState.STOPPING, Power.OFF, now + self._config.step_s)

    def delete(self, node: Node, now: float) -> None:
        """Ends its hosts, and then removes it."""
        self._power_off(node, NodeState.DELETING, Power.GONE, now + self._config.step_s)

    def _power_off(self, node: Node, state: NodeState, power: Power, due_at: float) -> None:
        node.state, node.power, node.notice = state, power, ""
        node.up = node.down = False
        node.health = Health.UNSPECIFIED
        node.start_by = node.preempt_at = None
        node.due_at = due_at
        self._tables.touch(node)

    # --- the clock ---

    def advance(self, node: Node, now: float) -> None:
        """Takes the next step of one node, if it is due."""
        if node.due_at is not None and now < node.due_at:
            return
        match node.state:
            case _ if node.notice == "maintenance":
                self.repair(node, "a maintenance event", now)
            case _ if node.notice == "preemption":
                self._take_away(node, now)
            case NodeState.CREATING if node.up and node.queued is None:
                self.ready(node, now)
            case state if state in _UP_STATES and node.up:
                self.ready(node, now)
            case NodeState.STOPPING if node.down:
                node.state, node.due_at = NodeState.STOPPED, None
                self._tables.touch(node)
            case NodeState.DELETING if node.down:
                self._tables.remove(node)
            case _:
                pass

    def _take_away(self, node: Node, now: float) -> None:
        if node.power is not Power.OFF:
            node.power, node.up, node.down = Power.OFF, False, False
            node.due_at = node.start_by = None
        elif node.down and self._is_to_return(node):
            self.repair(node, "it was preempted", now)
        elif node.down:
            node.state, node.notice = NodeState.PREEMPTED, ""
            node.health, node.holds_capacity = Health.UNSPECIFIED, False
        else:
            return
        self._tables.touch(node)

    def _is_to_return(self, node: Node) -> bool:
        """Whether it is a slice of a Multislice that goes on."""
        queued = self._tables.queued.get(node.queued or "")
        return queued is not None and node.slices > 1 and queued.state is QueuedState.ACTIVE
