"""`TpuController`: one TPU of the Cloud TPU API, a node or a queued resource of several slices."""

from __future__ import annotations

import getpass
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, final
from urllib.parse import urlsplit

from regrow.cloud.accelerators import ACCELERATORS, Accelerator, by_topology
from regrow.cloud.bodies import NodeRequest, QueuedRequest
from regrow.cloud.client import CloudClient
from regrow.cloud.names import Place
from regrow.cloud.nodes import (
    being_made,
    create_node,
    delete_node,
    found_node,
    found_queued,
    guest_attributes,
    update_startup_script,
)
from regrow.cloud.remote.copying import RemotePath, Transfer
from regrow.cloud.remote.fanout import Result, Tell, run_everywhere
from regrow.cloud.remote.keys import propagate, public_key
from regrow.cloud.remote.sessions import LocalShell, SshShell
from regrow.cloud.remote.targets import Host, hosts_of_node
from regrow.cloud.resources import QueuedState
from regrow.cloud.waiting import DEAD, Deadlines, given_up_deleted, wait_ready
from regrow.errors import CloudApiError, Code, UsageError
from regrow.ray.startup import check_tpu_name

Json = dict[str, Any]
Say = Callable[[str], None]
Condition = Literal["absent", "coming", "ready", "dead"]

_DELETE_S: Final = 600.0
_LONGEST_TOLD: Final = 160
_DEAD_NODES: Final = frozenset({"PREEMPTED", "TERMINATED", "STOPPED", "STOPPING", "DELETING"})


@final
@dataclass(frozen=True, kw_only=True)
class TpuSpec:
    """What a TPU is to be like.

    Attributes:
        name: Its id.
        node: Each of its slices, their tier included.
        slices: How many slices.
        queued: Whether it is asked for as a queued resource; several slices always are.
    """

    name: str
    node: NodeRequest
    slices: int = 1
    queued: bool = False

    def __post_init__(self) -> None:
        check_tpu_name(self.name)
        if self.slices < 1:
            raise UsageError(f"slices={self.slices}: a TPU has at least one")

    @property
    def is_queued(self) -> bool:
        """Whether it is a queued resource."""
        return self.queued or self.slices > 1

    @property
    def accelerator(self) -> Accelerator:
        """The shape of a slice.

        Raises:
            UsageError: If there is none such.
        """
        node = self.node
        shape: Json = node.body()
        if node.accelerator_type is not None:
            found = ACCELERATORS.get(node.accelerator_type)
        else:
            config = shape["acceleratorConfig"]
            found = by_topology(config["type"], str(config["topology"]))
        if found is None:
            wanted = node.accelerator_type or f"{node.type} {node.topology}"
            raise UsageError(f"there is no accelerator {wanted!r}; v4-16 or V4 2x2x2 would be one")
        return found

    @property
    def hosts(self) -> int:
        """Hosts of all slices."""
        return self.slices * self.accelerator.hosts

    @property
    def node_ids(self) -> list[str]:
        """Ids of its slices."""
        if self.slices == 1:
            return [self.name]
        return [f"{self.name}-{index}" for index in range(self.slices)]

    def with_metadata(self, metadata: Mapping[str, str]) -> TpuSpec:
        """The same with more metadata."""
        node = replace(self.node, metadata=dict(self.node.metadata) | dict(metadata))
        return replace(self, node=node)

    def queued_body(self, place: Place) -> Json:
        """The request for a queued resource."""
        node = replace(self.node, spot=False, preemptible=False, reserved=False)
        request = QueuedRequest(
            node=node,
            node_id=self.name if self.slices == 1 else None,
            node_count=self.slices if self.slices > 1 else None,
            spot=self.node.spot or self.node.preemptible,
            reserved=self.node.reserved,
        )
        return request.body(place)


@final
@dataclass(frozen=True, slots=True)
class TpuView:
    """A TPU as the API shows it.

    Attributes:
        condition: Whether it can be used.
        state: The API's own word: that of the queued resource if not ACTIVE, else of the worst node.
        health: That of the worst node.
        nodes: Its nodes, as the API has them.
    """

    condition: Condition
    state: str
    health: str
    nodes: tuple[Json, ...]


@final
class TpuController:
    """One TPU. Its methods raise CloudApiError if the API refuses, NoClusterError if it is away."""

    def __init__(
        self,
        client: CloudClient,
        place: Place,
        spec: TpuSpec,
        *,
        say: Say = lambda _: None,
        shell: LocalShell | SshShell | None = None,
    ) -> None:
        """Asks nothing yet.

        Args:
            client: Of the API (`regrow.cloud.local.connect`).
            place: Project and zone.
            spec: What the TPU is to be like when it is made.
            say: Is told what is done.
            shell: How its hosts are reached; default: OpenSSH, or the agents of local hosts.
        """
        self.client = client
        self.place = place
        self.spec = spec
        self._say = say
        self._shell = shell or self._usual_shell()

    def _usual_shell(self) -> LocalShell | SshShell:
        return LocalShell() if self.is_local else SshShell(getpass.getuser())

    @property
    def is_local(self) -> bool:
        """Whether its hosts are those of the local Cloud TPU."""
        return urlsplit(self.client.endpoint).scheme == "http"

    # --- what it is like ---

    def exists(self) -> bool:
        """Whether there is one, in whatever state."""
        return self.describe() is not None

    def describe(self) -> Json | None:
        """The node or queued resource as the API has it; None if there is none."""
        find = found_queued if self.spec.is_queued else found_node
        return find(self.client, self.place, self.spec.name)

    def nodes(self) -> list[Json]:
        """Its slices as far as they are there."""
        found = (found_node(self.client, self.place, one) for one in self.spec.node_ids)
        return [one for one in found if one is not None]

    def view(self) -> TpuView:
        """What the API shows of it, in one look."""
        described = self.describe()
        if described is None:
            return TpuView("absent", "ABSENT", "", ())
        if not self.spec.is_queued:
            return _view_of([described], 1)
        state = str(described.get("state", {}).get("state", "STATE_UNSPECIFIED"))
        if state in DEAD or state in (QueuedState.SUSPENDING, QueuedState.DELETING):
            return TpuView("dead", state, "", ())
        if state != QueuedState.ACTIVE:
            return TpuView("coming", state, "", ())
        return _view_of(self.nodes(), self.spec.slices)

    def state(self) -> str:
        """Its state in the API's own words; "ABSENT" if there is none."""
        return self.view().state

    def health(self) -> str:
        """The health of its worst slice in the API's own words; empty if it has none yet."""
        return self.view().health

    def addresses(self) -> list[str]:
        """The internal addresses of its hosts, slice by slice; asked anew each time."""
        return [
            str(endpoint.get("ipAddress", ""))
            for node in self.nodes()
            for endpoint in node.get("networkEndpoints", [])
        ]

    def hosts(self) -> list[Host]:
        """Its hosts, slice by slice.

        Raises:
            CloudApiError: FAILED_PRECONDITION, if a slice is not READY.
        """
        hosts: list[Host] = []
        for index, node_id in enumerate(self.spec.node_ids):
            hosts += hosts_of_node(self.client.node(self.place, node_id), node_id, index, "all")
        return hosts

    def guest_attributes(self, namespace: str) -> list[dict[str, str]]:
        """What its hosts have told through their metadata servers, one for each host."""
        told: list[dict[str, str]] = []
        for node_id in self.spec.node_ids:
            told += guest_attributes(self.client, self.place, node_id, namespace)
        return told

    # --- its life ---

    def create(self, *, timeout_s: float = 1800.0) -> None:
        """Makes it and waits until it is READY, or takes the request back.

        Args:
            timeout_s: How long it may take to become READY, in seconds.

        Raises:
            CloudApiError: If it is there already, or cannot be made.
            WaitTimeout: If it is not READY in time.
        """
        spec = self.spec
        shape = spec.node.accelerator_type or f"{spec.node.type} {spec.node.topology}"
        self._say(f"Creating TPU: {spec.name} ({spec.slices} x {shape} in {self.place.zone})")
        body = spec.queued_body(self.place) if spec.is_queued else spec.node.body()
        self._say(f"Request: {_shortened(body)}")
        if spec.is_queued:
            operation = self.client.create_queued(self.place, spec.name, body)
            with being_made(spec.name):
                self.client.wait(operation, timeout_s)
                self._wait_queued(timeout_s)
        else:
            create_node(
                self.client,
                self.place,
                spec.name,
                body,
                timeout_s=timeout_s,
                tell=self._tell("Create TPU"),
            )
        self._say("Create TPU operation complete.")

    def _wait_queued(self, timeout_s: float) -> None:
        with given_up_deleted(self.client, self.place, self.spec.name):
            wait_ready(
                self.client,
                self.place,
                self.spec.name,
                Deadlines(timeout_s, timeout_s, timeout_s),
                tell=lambda one: self._say(f"{self.spec.name} is {one.state}"),
            )

    def maybe_create(self, *, timeout_s: float = 1800.0) -> bool:
        """Makes it if there is none; tells whether it was made.

        Raises:
            CloudApiError: If it cannot be made.
            WaitTimeout: If it is not READY in time.
        """
        if self.exists():
            return False
        self._say("TPU is not found, create tpu...")
        try:
            self.create(timeout_s=timeout_s)
        except CloudApiError as error:
            if error.code is not Code.ALREADY_EXISTS:
                raise
            return False
        return True

    def delete(self, *, timeout_s: float = _DELETE_S) -> bool:
        """Deletes it, with all slices, and waits until it is gone; False if there was none.

        Raises:
            WaitTimeout: If it is not gone in time.
        """
        spec = self.spec
        self._say(f"Deleting TPU: {spec.name}")
        if not spec.is_queued:
            tell = self._tell("Delete TPU")
            return delete_node(self.client, self.place, spec.name, timeout_s=timeout_s, tell=tell)
        operation = self.client.delete_queued(self.place, spec.name, force=True)
        if operation is None:
            return False
        self.client.wait(operation, timeout_s)
        return True

    def update_startup_script(self, script: str, *, timeout_s: float = 300.0) -> None:
        """Gives its slices another startup script, which runs on their next start."""
        for node_id in self.spec.node_ids:
            update_startup_script(self.client, self.place, node_id, script, timeout_s=timeout_s)

    def _tell(self, what: str) -> Callable[[Json], None]:
        def tell(operation: Json) -> None:
            if not operation.get("done"):
                self._say(f"{what} operation still running...")

        return tell

    # --- commands and files ---

    def run(
        self,
        command: str,
        tell: Tell,
        *,
        batch_size: int | None = None,
        hosts: Sequence[Host] = (),
    ) -> list[Result]:
        """Runs a command on hosts.

        Args:
            command: For a shell.
            tell: Is given each line that a host prints.
            batch_size: On how many hosts at once; default: all.
            hosts: Which; default: all.

        Raises:
            CloudApiError: If a slice is not READY.
        """
        hosts = hosts or self._reachable_hosts()
        shell = self._shell
        return run_everywhere(
            hosts,
            lambda host, streams: shell.start(host, command, streams),
            batch_size or len(hosts),
            tell,
        )

    def copy_to(self, sources: Sequence[str], target: str, tell: Tell) -> list[Result]:
        """Copies files and directories of this machine to all hosts; relative to their home."""
        ends = tuple(RemotePath("", "", source) for source in sources)
        transfer = Transfer(ends, RemotePath(self.spec.name, "", target), recurse=True)
        hosts = self._reachable_hosts()
        shell = self._shell
        return run_everywhere(
            hosts, lambda host, streams: transfer.start(shell, host, streams), len(hosts), tell
        )

    def copy_from(self, source: str, target: str, tell: Tell, *, worker: int = 0) -> Result:
        """Copies a file or directory of one host to this machine.

        Raises:
            UsageError: If there is no such host.
        """
        hosts = self._reachable_hosts()
        if not 0 <= worker < len(hosts):
            raise UsageError(f"{self.spec.name} has {len(hosts)} hosts, so no worker {worker}")
        end = RemotePath("", "", target)
        transfer = Transfer((RemotePath(self.spec.name, "", source),), end, recurse=True)
        shell = self._shell
        return run_everywhere(
            [hosts[worker]], lambda host, streams: transfer.start(shell, host, streams), 1, tell
        )[0]

    def _reachable_hosts(self) -> list[Host]:
        hosts = self.hosts()
        if isinstance(self._shell, SshShell):
            key = public_key(self._shell.key_file)
            propagate(self.client, self.place, self.spec.node_ids, self._shell.user, key)
        return hosts


def _shortened(value: Any) -> Any:
    """A request as it is told: a startup script by its beginning."""
    if isinstance(value, Mapping):
        return {name: _shortened(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_shortened(one) for one in value]
    if isinstance(value, str) and len(value) > _LONGEST_TOLD:
        return f"{value[:_LONGEST_TOLD]}…"
    return value


def _view_of(nodes: Sequence[Json], expected: int) -> TpuView:
    """What nodes together are like."""
    states = [str(node.get("state", "STATE_UNSPECIFIED")) for node in nodes]
    healths = [str(node.get("health", "HEALTH_UNSPECIFIED")) for node in nodes]
    health = next((one for one in healths if one != "HEALTHY"), "HEALTHY" if healths else "")
    dead = next((one for one in states if one in _DEAD_NODES), None)
    if dead is not None:
        return TpuView("dead", dead, health, tuple(nodes))
    odd = next((one for one in states if one != "READY"), None)
    if odd is not None or len(nodes) < expected:
        return TpuView("coming", odd or "CREATING", health, tuple(nodes))
    return TpuView("ready", "READY", health, tuple(nodes))
