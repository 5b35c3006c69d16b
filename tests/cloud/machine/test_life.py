"""The life of queued resources and nodes, one course of events after the other."""

from __future__ import annotations

import pytest
from cloud_world import PLACE, World, node_body, request

from regrow.cloud.config import CloudConfig, ReservationConfig
from regrow.cloud.machine import HostsFailed
from regrow.cloud.names import Place
from regrow.cloud.resources import Node, NodeState, Power, QueuedResource, QueuedState
from regrow.errors import CloudApiError, Code

STEP = 0.02


def name_of(queued_id: str) -> str:
    return PLACE.child(QueuedResource.kind, queued_id)


def small(**options) -> World:
    """A world with 16 chips of v4: two slices of v4-16."""
    zones = {PLACE.zone: {"v4": 16}}
    return World(CloudConfig(zones=zones, reservations=(), **options))


@pytest.fixture
def world() -> World:
    return World()


def course(world: World, name: str, limit: int = 200) -> list[str]:
    """The states that a queued resource goes through while everyone obeys."""
    seen = [world.queued(name).state.value]
    for _ in range(limit):
        world.obey()
        world.wait(STEP / 2)
        if name_of(name) not in world.plane.tables.queued:
            return [*seen, "gone"]
        state = world.queued(name).state.value
        if state != seen[-1]:
            seen.append(state)
    return seen


class TestCreation:
    def test_goes_through_every_state(self, world: World) -> None:
        operation = world.create("four", slices=4)
        assert not operation.done
        assert course(world, "four") == [
            "CREATING",
            "WAITING_FOR_RESOURCES",
            "PROVISIONING",
            "ACTIVE",
        ]
        assert operation.done
        assert operation.error is None
        assert world.states("four") == ["READY"] * 4
        assert [node.name.rpartition("/")[2] for node in world.nodes("four")] == [
            f"four-{index}" for index in range(4)
        ]

    def test_is_done_before_there_are_nodes(self, world: World) -> None:
        operation = world.create("q")
        world.wait(STEP * 1.5)
        assert operation.done
        assert world.queued("q").state is QueuedState.WAITING_FOR_RESOURCES
        assert not world.nodes("q")

    def test_waits_for_the_slowest_slice(self, world: World) -> None:
        world.create("q", slices=2)
        world.wait(1)
        world.obey(lambda node: node.slice_index == 0)
        world.wait(1)
        assert world.queued("q").state is QueuedState.PROVISIONING
        assert world.states("q") == ["CREATING", "CREATING"]

    def test_a_request_may_be_sent_again(self, world: World) -> None:
        first = world.create("q", request_id="abc")
        again = world.create("q", request_id="abc")
        assert again is first
        with pytest.raises(CloudApiError, match="already exists"):
            world.create("q", request_id="other")

    def test_a_slice_that_never_starts(self, world: World) -> None:
        world.create("q", slices=2)
        for _ in range(3):
            world.wait(1)
            assert world.queued("q").state is QueuedState.PROVISIONING
            world.obey(lambda node: node.power is not Power.ON)
            world.wait(1)
            world.fail(world.nodes("q")[1], "no disk")
        queued = world.queued("q")
        assert queued.state is QueuedState.FAILED
        assert queued.error is not None
        assert "no disk" in queued.error["message"]
        world.settle()
        assert not world.nodes("q"), "all slices or none"

    def test_hosts_that_do_not_come_up(self) -> None:
        world = World(CloudConfig(start_deadline_s=10, max_start_failures=1))
        world.create("q")
        world.wait(11)
        assert world.queued("q").state is QueuedState.FAILED


class TestQueue:
    def test_first_come_first_served(self) -> None:
        world = small()
        world.create("a", slices=2)
        world.settle()
        world.create("b", slices=2)
        world.wait(1)
        world.create("c")
        world.settle()
        assert world.queued("a").state is QueuedState.ACTIVE
        # One slice would fit as soon as one is free, but the older request goes first.
        world.plane.queued.delete(name_of("a"), world.now, force=True)
        world.settle()
        assert world.queued("b").state is QueuedState.ACTIVE
        assert world.queued("c").state is QueuedState.WAITING_FOR_RESOURCES
        world.plane.queued.delete(name_of("b"), world.now, force=True)
        world.settle()
        assert world.queued("c").state is QueuedState.ACTIVE

    def test_a_large_request_holds_up_the_small_ones(self) -> None:
        world = small()
        world.create("a")
        world.settle()
        world.create("large", slices=2)
        world.wait(1)
        world.create("small")
        world.settle()
        assert world.queued("large").state is QueuedState.WAITING_FOR_RESOURCES
        assert world.queued("small").state is QueuedState.WAITING_FOR_RESOURCES

    def test_a_projects_quota_holds_up_only_itself(self) -> None:
        world = small(on_demand_quota={"v4": 8})
        world.create("a")
        world.settle()
        world.create("b")
        other = Place("other-project", PLACE.zone)
        world.create("c", place=other)
        world.settle()
        assert world.queued("b").state is QueuedState.WAITING_FOR_RESOURCES
        there = world.plane.queued.get(other.child(QueuedResource.kind, "c"))
        assert there.state is QueuedState.ACTIVE

    def test_a_higher_tier_goes_first(self) -> None:
        world = small()
        world.create("a", slices=2)
        world.settle()
        world.create("cheap", spot={})
        world.wait(1)
        world.create("dear", slices=2)
        world.settle()
        world.plane.queued.delete(name_of("a"), world.now, force=True)
        world.settle()
        assert world.queued("dear").state is QueuedState.ACTIVE
        assert world.queued("cheap").state is QueuedState.WAITING_FOR_RESOURCES

    def test_spot_makes_room(self) -> None:
        world = small(notice_s=3)
        world.create("old", spot={})
        world.settle()
        world.create("new", spot={})
        world.settle()
        world.create("dear")
        world.wait(1)
        assert world.queued("new").state is QueuedState.SUSPENDING
        assert world.node("new-node").notice == "preemption"
        world.settle()
        assert world.queued("new").state is QueuedState.SUSPENDED
        assert world.queued("new").initiator == "SERVICE"
        assert world.queued("old").state is QueuedState.ACTIVE
        assert world.queued("dear").state is QueuedState.ACTIVE

    def test_a_valid_interval(self, world: World) -> None:
        world.create("q", queueingPolicy={"validAfterDuration": "100s"})
        world.settle(99)
        assert world.queued("q").state is QueuedState.WAITING_FOR_RESOURCES
        world.settle(2)
        assert world.queued("q").state is QueuedState.ACTIVE

    def test_expires(self) -> None:
        world = small()
        world.create("a", slices=2)
        world.settle()
        world.create("late", queueingPolicy={"validUntilDuration": "60s"})
        world.settle(61)
        late = world.queued("late")
        assert late.state is QueuedState.FAILED
        assert late.error is not None
        assert late.error["code"] == Code.DEADLINE_EXCEEDED
        world.plane.queued.delete(name_of("a"), world.now, force=True)
        world.settle(60)
        assert late.state is QueuedState.FAILED, "it stays until it is deleted"

    def test_reservations(self) -> None:
        reservation = ReservationConfig("mine", PLACE.zone, "v4", 8)
        world = World(CloudConfig(zones={PLACE.zone: {}}, reservations=(reservation,)))
        world.create("a", guaranteed={"reserved": True})
        world.settle()
        assert world.queued("a").state is QueuedState.ACTIVE
        full = f"{PLACE.name}/reservations/mine"
        world.create("b", reservationName=full)
        world.create("free")
        world.settle()
        assert world.queued("b").state is QueuedState.WAITING_FOR_RESOURCES
        assert world.queued("free").state is QueuedState.WAITING_FOR_RESOURCES
        with pytest.raises(CloudApiError, match="no reservation other"):
            world.create("c", reservationName=f"{PLACE.name}/reservations/other")


class TestQuota:
    def test_of_queued_resources(self) -> None:
        world = World(CloudConfig(queued_resources_quota=1))
        world.create("a", spot={})
        world.settle()
        world.plane.queued.preempt(name_of("a"), world.now)
        world.settle(10)
        assert world.queued("a").state is QueuedState.SUSPENDED
        with pytest.raises(CloudApiError, match="Limit: 1") as refusal:
            world.create("b")
        assert refusal.value.code is Code.RESOURCE_EXHAUSTED

    def test_of_chips_is_held_by_the_dead(self) -> None:
        world = World(CloudConfig(spot_quota={"v4": 8}))
        world.create("a", spot={})
        world.settle()
        world.plane.queued.preempt(name_of("a"), world.now)
        world.create("b", spot={})
        world.settle(10)
        assert world.queued("b").state is QueuedState.WAITING_FOR_RESOURCES
        world.plane.queued.delete(name_of("a"), world.now)
        world.settle()
        assert world.queued("b").state is QueuedState.ACTIVE

    def test_a_request_beyond_any_quota(self) -> None:
        world = World(CloudConfig(on_demand_quota={"v4": 8}))
        with pytest.raises(CloudApiError, match=r"TPUV4PerProjectPerZone.* Limit: 8 chips"):
            world.create("a", slices=2)


class TestDeletion:
    def test_needs_force_while_there_are_nodes(self, world: World) -> None:
        world.create("q", slices=2)
        world.settle()
        with pytest.raises(CloudApiError, match="use force") as refusal:
            world.plane.queued.delete(name_of("q"), world.now)
        assert refusal.value.code is Code.FAILED_PRECONDITION
        operation = world.plane.queued.delete(name_of("q"), world.now, force=True)
        assert course(world, "q") == ["DELETING", "gone"]
        assert operation.done
        assert operation.error is None
        assert not world.plane.tables.nodes

    def test_while_it_is_being_created(self, world: World) -> None:
        creation = world.create("q")
        operation = world.plane.queued.delete(name_of("q"), world.now)
        world.settle()
        assert operation.done
        assert creation.done
        assert not world.plane.tables.queued

    def test_the_name_is_free_again(self, world: World) -> None:
        world.create("q")
        world.settle()
        deletion = world.plane.queued.delete(name_of("q"), world.now, force=True)
        with pytest.raises(CloudApiError, match="already exists"):
            world.create("q")
        world.settle()
        world.create("q")
        world.settle()
        assert deletion.done
        assert world.queued("q").state is QueuedState.ACTIVE

    def test_of_its_nodes_suspends_it(self, world: World) -> None:
        world.create("q", slices=2)
        world.settle()
        for node in world.nodes("q"):
            assert world.queued("q").state is QueuedState.ACTIVE
            world.plane.nodes.delete(node.name, world.now)
        assert world.queued("q").state is QueuedState.SUSPENDING
        world.settle()
        assert world.queued("q").state is QueuedState.SUSPENDED
        assert world.queued("q").initiator == "USER"
        world.plane.queued.delete(name_of("q"), world.now)
        world.settle()
        assert not world.plane.tables.queued


class TestRepair:
    def test_replaces_the_failed_slice_and_resets_the_others(self, world: World) -> None:
        world.create("q", slices=3)
        world.settle()
        before = {node.name: node.incarnation for node in world.nodes("q")}
        failed = world.nodes("q")[1]
        world.fail(failed, "SIGKILL (signal 9)")
        assert world.states("q") == ["READY", "REPAIRING", "READY"]
        world.obey()
        world.wait(STEP * 2)
        assert failed.incarnation == 2
        assert not failed.run_script, "it waits for the others"
        world.obey()
        world.wait(STEP * 2)
        assert world.states("q") == ["RESTARTING", "REPAIRING", "RESTARTING"]
        assert not failed.run_script, "it waits until nothing of the old job runs"
        world.settle()
        assert world.states("q") == ["READY"] * 3
        assert world.queued("q").state is QueuedState.ACTIVE
        assert set(world.scripts.values()) == {2}, "each script has run once more"
        others = [node for node in world.nodes("q") if node is not failed]
        assert all(node.incarnation == before[node.name] for node in others), "disks are kept"

    def test_of_two_slices_at_once(self, world: World) -> None:
        world.create("q", slices=3)
        world.settle()
        world.fail(world.nodes("q")[0])
        world.wait(0.001)
        world.fail(world.nodes("q")[2])
        world.settle()
        assert world.states("q") == ["READY"] * 3
        assert set(world.scripts.values()) == {2}

    def test_waits_for_capacity(self) -> None:
        world = small()
        world.create("q", slices=2)
        world.settle()
        world.plane.configure(
            CloudConfig(zones={PLACE.zone: {"v4": 8}}, reservations=()), world.now
        )
        world.fail(world.nodes("q")[0])
        world.settle(100)
        assert world.states("q") == ["REPAIRING", "READY"]
        assert world.queued("q").state is QueuedState.ACTIVE
        world.plane.configure(world.config, world.now)
        world.settle()
        assert world.states("q") == ["READY", "READY"]

    def test_goes_before_those_who_wait(self) -> None:
        world = small()
        world.create("q", slices=2)
        world.settle()
        world.create("next")
        world.settle()
        world.fail(world.nodes("q")[0])
        world.settle()
        assert world.states("q") == ["READY", "READY"]
        assert world.queued("next").state is QueuedState.WAITING_FOR_RESOURCES

    def test_a_maintenance_event_is_announced(self, world: World) -> None:
        world.create("q", slices=2)
        world.settle()
        node = world.nodes("q")[0]
        operation = world.plane.nodes.maintain([node.name], node.name, world.now)
        assert node.notice == "maintenance"
        assert node.health == "UNHEALTHY_MAINTENANCE"
        assert node.state is NodeState.READY
        world.settle(4)
        assert node.state is NodeState.READY
        assert not operation.done
        world.settle(5)
        assert world.states("q") == ["READY", "READY"]
        assert node.incarnation == 2
        assert operation.done

    def test_does_not_spin(self) -> None:
        world = World()
        world.create("q")
        world.settle()
        node = world.nodes("q")[0]
        began = world.now
        for _ in range(14):
            world.fail(node)
            while node.power is Power.GONE:
                world.obey(lambda one: one.power is Power.GONE)
                world.wait(STEP)
        assert world.now - began > 60


class TestReset:
    def test_restarts_every_host(self, world: World) -> None:
        world.create("q", slices=2)
        world.settle()
        operation = world.plane.queued.reset(name_of("q"), world.now)
        assert world.states("q") == ["RESTARTING", "RESTARTING"]
        assert world.queued("q").state is QueuedState.ACTIVE
        world.settle()
        assert operation.done
        assert operation.error is None
        assert set(world.scripts.values()) == {2}
        assert [node.incarnation for node in world.nodes("q")] == [1, 1]

    def test_is_for_active_ones(self, world: World) -> None:
        world.create("q")
        with pytest.raises(CloudApiError, match="must be ACTIVE") as refusal:
            world.plane.queued.reset(name_of("q"), world.now)
        assert refusal.value.code is Code.FAILED_PRECONDITION


class TestPreemption:
    def test_has_a_notice(self) -> None:
        world = World(CloudConfig(notice_s=30))
        world.create("q", slices=2, spot={})
        world.settle()
        world.plane.queued.preempt(name_of("q"), world.now)
        assert world.queued("q").state is QueuedState.SUSPENDING
        world.settle(29)
        assert [node.notice for node in world.nodes("q")] == ["preemption"] * 2
        assert [node.power for node in world.nodes("q")] == [Power.ON] * 2
        world.wait(2)
        assert [node.power for node in world.nodes("q")] == [Power.OFF] * 2
        world.settle()
        assert world.states("q") == ["PREEMPTED"] * 2
        queued = world.queued("q")
        assert (queued.state, queued.initiator) == (QueuedState.SUSPENDED, "SERVICE")
        world.settle(1000)
        assert queued.state is QueuedState.SUSPENDED, "it is never served again"

    def test_of_one_slice_of_several_ends_in_its_repair(self, world: World) -> None:
        world.create("q", slices=2, spot={})
        world.settle()
        before = [(node.incarnation, node.boot) for node in world.nodes("q")]
        name = world.nodes("q")[1].name
        world.plane.queued.preempt(name, world.now)
        with pytest.raises(CloudApiError, match="must be READY"):
            world.plane.queued.preempt(name, world.now)
        assert world.queued("q").state is QueuedState.ACTIVE
        world.settle()
        world.settle()
        assert world.states("q") == ["READY"] * 2
        (incarnation, boot), (preempted, _) = before
        assert [(node.incarnation, node.boot) for node in world.nodes("q")] == [
            (incarnation, boot + 1),
            (preempted + 1, 1),
        ]

    def test_of_a_slice_and_then_of_all(self, world: World) -> None:
        world.create("q", slices=2, spot={})
        world.settle()
        world.plane.queued.preempt(world.nodes("q")[1].name, world.now)
        world.plane.queued.preempt(name_of("q"), world.now)
        world.settle()
        assert world.states("q") == ["PREEMPTED"] * 2
        assert world.queued("q").state is QueuedState.SUSPENDED

    def test_while_it_is_being_provisioned(self, world: World) -> None:
        world.create("q", slices=2, spot={})
        world.wait(1)
        world.plane.queued.preempt(name_of("q"), world.now)
        world.settle()
        assert world.queued("q").state is QueuedState.SUSPENDED

    def test_goes_on_after_a_power_cut(self, world: World) -> None:
        world.create("q", spot={})
        world.settle()
        world.did(world.plane.queued.preempt(name_of("q"), world.now))
        world.restart()
        world.lose_all()
        world.settle()
        assert world.queued("q").state is QueuedState.SUSPENDED
        assert world.states("q") == ["PREEMPTED"]

    def test_is_for_spot_only(self, world: World) -> None:
        world.create("q")
        world.settle()
        with pytest.raises(CloudApiError, match="only spot"):
            world.plane.queued.preempt(name_of("q"), world.now)

    def test_by_chance_is_a_matter_of_the_seed(self) -> None:
        def ends(seed: int) -> float:
            world = World(CloudConfig(preemptions_per_hour=1, seed=seed))
            world.create("q", spot={})
            began = world.now
            world.settle(24 * 3600)
            assert world.queued("q").state is QueuedState.SUSPENDED
            changed = world.queued("q").due_at
            assert changed is not None
            return changed - began

        assert ends(1) == ends(1)
        assert ends(1) != ends(2)


class TestNodes:
    def test_life(self, world: World) -> None:
        operation = world.plane.nodes.create(PLACE, "n", node_body("v4-8"), world.now)
        assert world.node("n").state is NodeState.CREATING
        world.settle()
        assert operation.done
        name = world.node("n").name
        stop = world.plane.nodes.stop(name, world.now)
        assert world.node("n").state is NodeState.STOPPING
        world.settle()
        assert (world.node("n").state, stop.done) == (NodeState.STOPPED, True)
        with pytest.raises(CloudApiError, match="must be READY"):
            world.plane.nodes.stop(name, world.now)
        start = world.plane.nodes.start(name, world.now)
        assert world.node("n").state is NodeState.STARTING
        world.settle()
        assert (world.node("n").state, start.done) == (NodeState.READY, True)
        assert world.scripts[name] == 2
        world.plane.nodes.delete(name, world.now)
        world.settle()
        assert not world.plane.tables.nodes

    def test_without_capacity(self) -> None:
        world = small()
        world.create("q", slices=2)
        world.settle()
        operation = world.plane.nodes.create(PLACE, "n", node_body(), world.now)
        world.settle()
        assert operation.error is not None
        assert operation.error["code"] == Code.RESOURCE_EXHAUSTED
        assert "There is no more capacity in the zone" in operation.error["message"]

    def test_several_hosts_cannot_be_stopped(self, world: World) -> None:
        world.plane.nodes.create(PLACE, "n", node_body("v4-16"), world.now)
        world.settle()
        with pytest.raises(CloudApiError, match="several hosts"):
            world.plane.nodes.stop(world.node("n").name, world.now)

    def test_repair_of_one_alone(self, world: World) -> None:
        world.plane.nodes.create(PLACE, "n", node_body(), world.now)
        world.settle()
        world.fail(world.node("n"))
        assert world.node("n").state is NodeState.REPAIRING
        world.settle()
        assert (world.node("n").state, world.node("n").incarnation) == (NodeState.READY, 2)

    def test_that_never_starts(self, world: World) -> None:
        operation = world.plane.nodes.create(PLACE, "n", node_body(), world.now)
        while world.plane.tables.nodes:
            node = world.node("n")
            if node.power is Power.ON:
                world.fail(node, "no disk")
            world.obey(lambda one: one.power is not Power.ON)
            world.wait(1)
        assert operation.error is not None
        assert "no disk" in operation.error["message"]

    def test_cancelled(self, world: World) -> None:
        operation = world.plane.nodes.create(PLACE, "n", node_body(), world.now)
        world.plane.operations.cancel(operation.name, world.now)
        world.settle()
        assert operation.error == {"code": 1, "message": "The operation was cancelled."}
        assert not world.plane.tables.nodes

    def test_old_news_is_no_news(self, world: World) -> None:
        world.plane.nodes.create(PLACE, "n", node_body(), world.now)
        world.settle()
        old = world.node("n")
        world.plane.handle([HostsFailed(old.uid, old.incarnation, old.boot - 1, "x")], world.now)
        assert old.state is NodeState.READY


class TestServerRestart:
    def test_nothing_is_lost(self, world: World) -> None:
        world.create("a", slices=2)
        world.create("b", spot={})
        world.settle()
        before = dict(world.disk)
        world.restart()
        world.wait(0)
        assert world.disk == before
        assert world.states("a") == ["READY", "READY"]

    def test_after_a_power_cut_every_slice_starts_again(self, world: World) -> None:
        world.create("a", slices=2)
        world.settle()
        world.restart()
        world.lose_all()
        assert world.states("a") == ["RESTARTING", "RESTARTING"]
        world.settle()
        assert world.states("a") == ["READY", "READY"]
        assert set(world.scripts.values()) == {2}
        assert [node.incarnation for node in world.nodes("a")] == [1, 1]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"acceleratorType": "v4-17"}, "'v4-17' is unknown; .* v4-8, v4-16"),
        ({"acceleratorType": "v7-8"}, "unknown"),
        ({"runtimeVersion": ""}, "runtime_version is required"),
        ({"runtimeVersion": "windows"}, "'windows' is unknown; .* tpu-ubuntu2204-base"),
        ({"description": "x" * 513}, "512"),
        ({"networkConfig": {}, "networkConfigs": [{}]}, "only one of"),
        ({"acceleratorConfig": {"type": "V4", "topology": "2x2x2"}}, "only one of"),
        ({"schedulingConfig": {"spot": True, "reserved": True}}, "both reserved and spot"),
        ({"labels": {"No": "x"}}, "no valid label"),
    ],
)
def test_wrong_nodes(world: World, change: dict, text: str) -> None:
    body = request()
    body["tpu"]["nodeSpec"][0]["node"] |= change
    with pytest.raises(CloudApiError, match=text) as refusal:
        world.plane.queued.create(PLACE, "q", body, world.now)
    assert refusal.value.code is Code.INVALID_ARGUMENT
    assert not world.plane.tables.queued


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("a b", {}, "does not match"),
        ("q", {"slices": 257}, "it must be from 2 to 256"),
        ("q", {"slices": 2, "accelerator": "v3-32"}, "Multislice is supported on v4 and later"),
        ("q", {"spot": {}, "guaranteed": {"reserved": True}}, "only one of"),
        ("q", {"spot": {}, "reservationName": "x"}, "both reserved and spot"),
        ("q", {"queueingPolicy": {"validUntilTime": "2001-01-01T00:00:00Z"}}, "is past"),
    ],
)
def test_wrong_requests(world: World, name: str, arguments: dict, text: str) -> None:
    with pytest.raises(CloudApiError, match=text) as refusal:
        world.create(name, **arguments)
    assert refusal.value.code is Code.INVALID_ARGUMENT


def test_an_unknown_zone(world: World) -> None:
    with pytest.raises(CloudApiError, match="us-central2-b") as refusal:
        world.create("q", place=Place("p", "mars-1"))
    assert refusal.value.code is Code.NOT_FOUND


def test_hosts_have_numbers_of_their_own(world: World) -> None:
    for index in range(3):
        world.create(f"q{index}", slices=2)
    world.settle()
    world.plane.queued.delete(name_of("q1"), world.now, force=True)
    world.settle()
    world.create("q3", accelerator="v4-32")
    world.settle()
    taken: list[int] = []
    for node in world.plane.tables.nodes.values():
        assert isinstance(node, Node)
        taken += range(node.first_host, node.first_host + node.accelerator.hosts)
    assert sorted(taken) == list(range(12))
