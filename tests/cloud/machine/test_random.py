"""The control plane under random requests and faults: what must hold whatever comes.

A judge of its own keeps the model: which courses a state may take, who must be served when, and
what may never happen again.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from cloud_world import PLACE, World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from regrow.cloud.config import CloudConfig
from regrow.cloud.resources import Node, Operation, Power, QueuedResource
from regrow.errors import CloudApiError, Code

# The courses of the fact sheet, and with them the two that faults add to it: a spot request may be
# preempted while it is provisioned, and whatever has a name may be deleted.
COURSES = {
    None: {"CREATING"},
    "CREATING": {"WAITING_FOR_RESOURCES", "FAILED", "DELETING"},
    "WAITING_FOR_RESOURCES": {"PROVISIONING", "FAILED", "DELETING"},
    "PROVISIONING": {"ACTIVE", "FAILED", "SUSPENDING", "DELETING"},
    "ACTIVE": {"SUSPENDING", "DELETING"},
    "SUSPENDING": {"SUSPENDED", "DELETING"},
    "SUSPENDED": {"DELETING"},
    "FAILED": {"DELETING"},
    "DELETING": set(),
}
NODE_COURSES = {
    None: {"CREATING"},
    "CREATING": {"READY", "REPAIRING", "DELETING", "PREEMPTED"},
    "READY": {"RESTARTING", "REPAIRING", "DELETING", "PREEMPTED", "STOPPING"},
    "RESTARTING": {"READY", "REPAIRING", "DELETING", "PREEMPTED"},
    "REPAIRING": {"READY", "DELETING", "PREEMPTED"},
    "STOPPING": {"STOPPED", "DELETING", "PREEMPTED"},
    "STOPPED": {"STARTING", "DELETING", "PREEMPTED"},
    "STARTING": {"READY", "REPAIRING", "DELETING", "PREEMPTED"},
    "PREEMPTED": {"DELETING"},
    "DELETING": set(),
}
RANK = {"reserved": 0, "guaranteed": 1, "on-demand": 2, "spot": 3, "best-effort": 4}
CHIPS = 24
QUOTA = {"on-demand": 32, "spot": 32}
NAMES = st.sampled_from(["a", "b", "c", "d"])


class Random(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.chips = CHIPS
        self.world = World(self.config())
        self.seen: dict[int, str] = {}
        self.seen_nodes: dict[int, str] = {}
        self.ended: dict[str, tuple[Any, ...]] = {}
        # Requests that have been served, and boots of slices when one of them went into repair.
        self.served: set[int] = set()
        self.before: dict[int, dict[str, tuple[int, int]]] = {}
        self.repaired: dict[int, set[str]] = {}

    def config(self) -> CloudConfig:
        return CloudConfig(
            zones={PLACE.zone: {"v4": self.chips}},
            reservations=(),
            on_demand_quota={"v4": QUOTA["on-demand"]},
            spot_quota={"v4": QUOTA["spot"]},
            queued_resources_quota=6,
            notice_s=2.0,
            start_deadline_s=30.0,
        )

    @initialize()
    def begin(self) -> None:
        self.look()

    # --- users ---

    def attempt(self, function: Any, *allowed: Code) -> Any:
        before = dict(self.world.disk)
        try:
            result = self.world.did(function())
            self.look()
            return result
        except CloudApiError as error:
            refused = error
        self.world.did(None)
        assert refused.code in allowed, refused
        assert self.world.disk == before, "a refusal changes nothing"
        self.look()
        return None

    @rule(
        name=NAMES,
        slices=st.sampled_from([1, 1, 2, 3]),
        spot=st.booleans(),
        until=st.sampled_from([None, "3s", "40s"]),
        after=st.sampled_from([None, None, "5s"]),
    )
    def create(
        self, name: str, slices: int, spot: bool, until: str | None, after: str | None
    ) -> None:
        self.ask(name, slices, spot, until, after)

    @rule(
        names=st.permutations(["a", "b", "c", "d"]),
        slices=st.lists(st.integers(1, 3), min_size=4, max_size=4),
        spot=st.booleans(),
    )
    def create_many(self, names: list[str], slices: list[int], spot: bool) -> None:
        """A queue forms."""
        for name, number in zip(names, slices, strict=True):
            self.ask(name, number, spot)

    def ask(
        self,
        name: str,
        slices: int,
        spot: bool,
        until: str | None = None,
        after: str | None = None,
    ) -> None:
        fields: dict[str, Any] = {"spot": {}} if spot else {}
        if until:
            fields["queueingPolicy"] = {"validUntilDuration": until}
        elif after:
            fields["queueingPolicy"] = {"validAfterDuration": after}
        self.attempt(
            lambda: self.world.create(name, "v4-16", slices, **fields),
            Code.ALREADY_EXISTS,
            Code.RESOURCE_EXHAUSTED,
        )

    @rule(name=NAMES, force=st.booleans())
    def delete(self, name: str, force: bool) -> None:
        full = PLACE.child(QueuedResource.kind, name)
        plane = self.world.plane
        self.attempt(
            lambda: plane.queued.delete(full, self.world.now, force=force),
            Code.NOT_FOUND,
            Code.FAILED_PRECONDITION,
        )

    @rule(name=NAMES)
    def reset(self, name: str) -> None:
        full = PLACE.child(QueuedResource.kind, name)
        plane = self.world.plane
        self.attempt(
            lambda: plane.queued.reset(full, self.world.now),
            Code.NOT_FOUND,
            Code.FAILED_PRECONDITION,
        )

    @rule(name=NAMES)
    def preempt(self, name: str) -> None:
        full = PLACE.child(QueuedResource.kind, name)
        plane = self.world.plane
        self.attempt(
            lambda: plane.queued.preempt(full, self.world.now),
            Code.NOT_FOUND,
            Code.FAILED_PRECONDITION,
        )

    @rule(
        number=st.integers(0, 9),
        what=st.sampled_from(["delete", "stop", "start", "maintain", "preempt"]),
    )
    def touch_node(self, number: int, what: str) -> None:
        name = self.pick(number)
        if name is None:
            return
        nodes, now = self.world.plane.nodes, self.world.now
        act = {
            "delete": lambda: nodes.delete(name, now),
            "stop": lambda: nodes.stop(name, now),
            "start": lambda: nodes.start(name, now),
            "maintain": lambda: nodes.maintain([name], name, now),
            "preempt": lambda: self.world.plane.queued.preempt(name, now),
        }[what]
        self.attempt(act, Code.FAILED_PRECONDITION)

    @rule(accelerator=st.sampled_from(["v4-8", "v4-16"]), spot=st.booleans())
    def create_node(self, accelerator: str, spot: bool) -> None:
        body: dict[str, Any] = {"acceleratorType": accelerator, "runtimeVersion": "tpu-vm-base"}
        if spot:
            body["schedulingConfig"] = {"spot": True}
        self.attempt(
            lambda: self.world.plane.nodes.create(PLACE, "alone", body, self.world.now),
            Code.ALREADY_EXISTS,
            Code.RESOURCE_EXHAUSTED,
        )

    def pick(self, number: int) -> str | None:
        names = sorted(self.world.plane.tables.nodes)
        return names[number % len(names)] if names else None

    # --- the world ---

    @rule()
    def obey(self) -> None:
        self.world.obey()
        self.look()

    @rule(number=st.integers(0, 9))
    def obey_one(self, number: int) -> None:
        name = self.pick(number)
        self.world.obey(lambda node: node.name == name)
        self.look()

    @rule(number=st.integers(0, 9))
    def fail(self, number: int) -> None:
        name = self.pick(number)
        if name is not None:
            self.world.fail(self.world.plane.tables.nodes[name])
            self.look()

    @rule(duration_s=st.sampled_from([0.01, 0.02, 0.5, 3.0, 31.0]))
    def wait(self, duration_s: float) -> None:
        self.pass_time(duration_s)

    def pass_time(self, duration_s: float) -> None:
        end = self.world.now + duration_s
        for _ in range(1000):
            due = self.world.plane.deadline(self.world.now)
            step = end if due is None else min(due, end)
            self.world.wait(step - self.world.now)
            self.look()
            if step >= end:
                return
        raise AssertionError("time does not pass")

    @rule()
    def settle(self) -> None:
        """Everyone obeys for a while."""
        for _ in range(8):
            self.world.obey()
            self.pass_time(0.03)

    @rule()
    def settle_more(self) -> None:
        """Once more, so that things often get far."""
        self.settle()

    @rule()
    def kill_the_server(self) -> None:
        before = dict(self.world.disk)
        self.world.restart()
        self.world.did(self.world.plane.tick(self.world.now))
        assert self.world.disk == before, "what has been written down is all there is"
        self.look()

    @rule()
    def cut_the_power(self) -> None:
        self.world.restart()
        self.world.lose_all()
        self.look()

    @rule(chips=st.sampled_from([8, 16, CHIPS]))
    def change_capacity(self, chips: int) -> None:
        self.chips = chips
        self.world.config = self.config()
        self.world.did(self.world.plane.configure(self.world.config, self.world.now))
        self.look()

    # --- the judge ---

    def look(self) -> None:
        tables = self.world.plane.tables
        for queued in tables.queued.values():
            self.judge(self.seen, COURSES, queued)
            if queued.state.value in ("PROVISIONING", "ACTIVE", "SUSPENDING"):
                self.served.add(queued.seq)
            self.judge_repair(queued)
        for node in tables.nodes.values():
            self.judge(self.seen_nodes, NODE_COURSES, node)

    def judge_repair(self, queued: QueuedResource) -> None:
        """When a repair is over, every slice has started anew since it began."""
        nodes = self.world.plane.tables.live_nodes_of(queued)
        boots = {node.name: (node.incarnation, node.boot) for node in nodes}
        if queued.state.value != "ACTIVE":
            self.before.pop(queued.seq, None)
        elif repaired := {node.name for node in nodes if node.state.value == "REPAIRING"}:
            self.before.setdefault(queued.seq, boots)
            self.repaired[queued.seq] = repaired
        else:
            former = self.before.pop(queued.seq, None)
            # Unless the user has deleted what was in repair.
            if former is not None and self.repaired[queued.seq] & set(boots):
                assert all(boots[name] > former[name] for name in boots)

    def used(self, tier: str) -> int:
        """Chips that count for a quota: of requests from being served to their deletion."""
        tables = self.world.plane.tables
        queued = [one for one in tables.queued.values() if one.seq in self.served]
        alone = [one for one in tables.nodes.values() if one.queued is None]
        return sum(one.chips for one in (*queued, *alone) if one.tier.value == tier)

    def judge(self, seen: dict[int, str], courses: Any, record: QueuedResource | Node) -> None:
        """From the last state that was seen there is a way to the present one."""
        last, now = seen.get(record.seq), record.state.value
        reached = {last}
        while now not in reached:
            further = set().union(*(courses[state] for state in reached)) | reached
            assert further != reached, f"{record.name}: from {last} to {now}"
            reached = further
        seen[record.seq] = now

    @invariant()
    def chips_are_given_once(self) -> None:
        held: Counter[str] = Counter()
        for node in self.world.plane.tables.nodes.values():
            if node.holds_capacity:
                held["all"] += node.chips
        # Capacity that is taken away is not taken from those who have it.
        assert held["all"] <= CHIPS

    @invariant()
    def projects_keep_within_their_quotas(self) -> None:
        for tier, limit in QUOTA.items():
            assert self.used(tier) <= limit

    @invariant()
    def all_slices_or_none(self) -> None:
        tables = self.world.plane.tables
        for queued in tables.queued.values():
            count = len(tables.nodes_of(queued))
            if queued.state.value in ("CREATING", "WAITING_FOR_RESOURCES"):
                assert count == 0
            if queued.state.value == "PROVISIONING":
                assert count == len(queued.node_ids)

    @invariant()
    def who_is_first_is_served(self) -> None:
        """Of those who wait, the first that its quota lets through has not got enough chips.

        Whoever waits for a quota holds up those behind it that count for the same one.
        """
        tables, now = self.world.plane.tables, self.world.now
        waiting = sorted(
            (
                queued
                for queued in tables.queued.values()
                if queued.state.value == "WAITING_FOR_RESOURCES"
                and queued.due_at <= now
                and (queued.valid_after or 0) <= now
            ),
            key=lambda one: (RANK[one.tier.value], one.seq),
        )
        free = self.chips - sum(
            node.chips
            for node in tables.nodes.values()
            if node.holds_capacity or node.state.value == "REPAIRING"
        )
        held_up = set()
        for queued in waiting:
            tier = queued.tier.value
            if tier in held_up:
                continue
            if self.used(tier) + queued.chips <= QUOTA[tier]:
                assert queued.chips > free
                return
            held_up.add(tier)

    @invariant()
    def hosts_have_addresses_of_their_own(self) -> None:
        numbers: Counter[int] = Counter()
        for node in self.world.plane.tables.nodes.values():
            numbers.update(range(node.first_host, node.first_host + node.accelerator.hosts))
        assert not numbers or max(numbers.values()) == 1

    @invariant()
    def repaired_slices_wait_for_each_other(self) -> None:
        for node in self.world.plane.tables.nodes.values():
            assert node.run_script or node.state.value == "REPAIRING" or node.power is not Power.ON

    @invariant()
    def what_is_over_stays_over(self) -> None:
        for operation in self.world.plane.tables.operations.values():
            if not operation.done:
                continue
            end = (operation.ended_at, operation.error)
            assert self.ended.setdefault(operation.name, end) == end
            if operation.error is None and operation.verb != "delete":
                assert operation.response is not None

    def teardown(self) -> None:
        """When the world obeys again, everything comes to its end."""
        self.chips = CHIPS
        self.world.config = self.config()
        self.world.did(self.world.plane.configure(self.world.config, self.world.now))
        self.world.settle(200)
        tables = self.world.plane.tables
        for node in tables.nodes.values():
            assert node.state.value in ("READY", "STOPPED", "PREEMPTED"), node
        states = {queued.state.value for queued in tables.queued.values()}
        rest = {"WAITING_FOR_RESOURCES", "ACTIVE", "SUSPENDED", "FAILED"}
        assert states <= rest, (states, list(tables.queued.values()))
        open_ones = [op for op in tables.operations.values() if not op.done]
        # Somebody may have stopped a node under a maintenance event, which then never ends.
        assert all(isinstance(op, Operation) and op.awaits == "settled" for op in open_ones)
        for queued in list(tables.queued.values()):
            self.world.did(self.world.plane.queued.delete(queued.name, self.world.now, force=True))
        self.world.settle(20)
        assert not self.world.plane.tables.queued
        assert all(node.queued is None for node in self.world.plane.tables.nodes.values())


TestRandom = Random.TestCase
TestRandom.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
