"""A control plane with a world in memory: a clock, and hosts that do (or do not do) as told."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from regrow.cloud.config import CloudConfig
from regrow.cloud.machine import ControlPlane, HostsDown, HostsFailed, HostsLost, HostsUp
from regrow.cloud.names import Place
from regrow.cloud.resources import KINDS, Node, Operation, Power, QueuedResource

PLACE = Place("my-project", "us-central2-b")
RUNTIME = "tpu-ubuntu2204-base"


def node_body(accelerator: str = "v4-16", **fields: Any) -> dict[str, Any]:
    return {"acceleratorType": accelerator, "runtimeVersion": RUNTIME, **fields}


def request(
    accelerator: str = "v4-16", slices: int = 1, *, place: Place = PLACE, **fields: Any
) -> dict[str, Any]:
    """A queued resource as the API takes it; its single node is called like "solo-…"."""
    spec: dict[str, Any] = {"parent": place.name, "node": node_body(accelerator)}
    if slices > 1:
        spec["multisliceParams"] = {"nodeCount": slices}
    else:
        spec["nodeId"] = fields.pop("node_id", "solo")
    return {"tpu": {"nodeSpec": [spec]}, **fields}


class World:
    """What the server is to the control plane: clock, memory on disk, and hosts."""

    def __init__(self, config: CloudConfig | None = None) -> None:
        self.now = 1_700_000_000.0
        self.config = config or CloudConfig()
        self.plane = ControlPlane(self.config)
        self.disk: dict[tuple[str, str], dict[str, Any]] = {}
        self.last_seq = 0
        # How often the startup script of a node has begun, over all its incarnations.
        self.scripts: dict[str, int] = {}
        self.running: dict[int, tuple[int, int]] = {}
        self._script_of: dict[int, tuple[int, int]] = {}

    # --- requests ---

    def create(
        self, name: str, accelerator: str = "v4-16", slices: int = 1, **fields: Any
    ) -> Operation:
        place = fields.pop("place", PLACE)
        options = {key: fields.pop(key) for key in ("version", "request_id") if key in fields}
        fields.setdefault("node_id", f"{name}-node")
        body = request(accelerator, slices, place=place, **fields)
        if slices > 1:
            body.pop("node_id", None)
        return self.did(self.plane.queued.create(place, name, body, self.now, **options))

    def did(self, result: Any) -> Any:
        """Writes down what has changed, as the server does before it answers."""
        for change in self.plane.take_changes():
            if change.record is None:
                self.disk.pop((change.kind, change.name), None)
            else:
                # Through text, so that nothing is shared with what is in memory.
                self.disk[change.kind, change.name] = json.loads(json.dumps(change.record.to_doc()))
        self.last_seq = self.plane.tables.last_seq
        return result

    # --- the past and the future ---

    def restart(self) -> None:
        """The server is killed, and another one reads what it has left."""
        records = [KINDS[kind].from_doc(copy.deepcopy(doc)) for (kind, _), doc in self.disk.items()]
        self.plane = ControlPlane(self.config, records, self.last_seq)

    def wait(self, duration_s: float) -> None:
        end = self.now + duration_s
        for _ in range(10_000):
            due = self.plane.deadline(self.now)
            assert due is None or due > self.now
            if due is None or due > end:
                self.now = end
                self.did(self.plane.tick(self.now))
                return
            self.now = due
            self.did(self.plane.tick(self.now))
        raise AssertionError("time does not pass")

    def obey(self, choose: Callable[[Node], bool] = lambda node: True) -> bool:
        """Has hosts do what they are to do; returns whether anything was left to do."""
        events = []
        for node in list(self.plane.tables.nodes.values()):
            if not choose(node):
                continue
            boot = (node.incarnation, node.boot)
            if node.power is Power.ON:
                if not node.up:
                    self.running[node.uid] = boot
                    events.append(HostsUp(node.uid, *boot))
                if node.run_script and self._script_of.get(node.uid) != boot:
                    self._script_of[node.uid] = boot
                    self.scripts[node.name] = self.scripts.get(node.name, 0) + 1
            elif not node.down:
                self.running.pop(node.uid, None)
                events.append(HostsDown(node.uid, *boot, node.power))
        self.did(self.plane.handle(events, self.now))
        return bool(events)

    def fail(self, node: Node, why: str = "it burns") -> None:
        event = HostsFailed(node.uid, node.incarnation, node.boot, why)
        self.did(self.plane.handle([event], self.now))

    def lose_all(self) -> None:
        """All processes of the machine are lost."""
        self.running.clear()
        events = [HostsLost(n.uid, n.incarnation, n.boot) for n in self.plane.tables.nodes.values()]
        self.did(self.plane.handle(events, self.now))

    def settle(self, duration_s: float = 5.0) -> None:
        """Time passes, and everyone obeys."""
        end = self.now + duration_s
        while True:
            self.obey()
            due = self.plane.deadline(self.now)
            if due is None or due > end:
                if not self.obey():
                    break
                continue
            self.now = due
            self.did(self.plane.tick(self.now))
        self.now = end
        self.did(self.plane.tick(end))
        self.obey()

    # --- looking ---

    def queued(self, name: str) -> QueuedResource:
        return self.plane.queued.get(PLACE.child("queuedResources", name))

    def node(self, name: str) -> Node:
        return self.plane.nodes.get(PLACE.child("nodes", name))

    def nodes(self, name: str) -> list[Node]:
        return self.plane.tables.nodes_of(self.queued(name))

    def states(self, name: str) -> list[str]:
        return [node.state.value for node in self.nodes(name)]
