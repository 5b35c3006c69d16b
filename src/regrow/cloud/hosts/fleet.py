"""The hosts of all nodes: has them follow what the control plane says of each node."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, final

from regrow.cloud.config import CloudConfig
from regrow.cloud.hosts.addresses import METADATA_PORT, AddressBlock
from regrow.cloud.hosts.metadata import environ_of, tree_of
from regrow.cloud.hosts.slice_hosts import SliceHosts
from regrow.cloud.hosts.spec import GUEST_FILE, HOSTS_DIR, LOGS_DIR, SERVER_FILE, HostSpec
from regrow.cloud.machine import Change, Event, HostsFailed, HostsLost, HostsUp
from regrow.cloud.names import base
from regrow.cloud.resources import Node, NodeState, Power

_LOGS_KEPT: Final = 500


@final
class LocalFleet:
    """Hosts that are processes of this machine."""

    def __init__(
        self,
        state_dir: Path,
        block: AddressBlock,
        config: Callable[[], CloudConfig],
        report: Callable[[Sequence[Event]], None],
        find: Callable[[str], Node | None],
    ) -> None:
        """Knows no node yet.

        Args:
            state_dir: Where the hosts' directories are made.
            block: The hosts' addresses.
            config: The world, as it is now.
            report: Is told what hosts do.
            find: A node by its name.
        """
        for name in (HOSTS_DIR, LOGS_DIR):
            (state_dir / name).mkdir(mode=0o700, exist_ok=True)
        self._state_dir = state_dir
        self._block = block
        self._config = config
        self._report = report
        self._find = find
        self._slices: dict[str, SliceHosts] = {}
        self._told: dict[str, tuple[Power, int, int]] = {}
        self._specs: dict[str, list[HostSpec]] = {}
        self._events: list[Event] = []

    # --- following the control plane ---

    def apply(self, changes: Sequence[Change]) -> None:
        """Has the hosts of nodes that have changed do what the nodes say."""
        for change in changes:
            if isinstance(change.record, Node):
                self._follow(change.record)
            else:
                for table in (self._slices, self._told, self._specs):
                    table.pop(change.name, None)

    def recover(self, nodes: Iterable[Node], *, lost: bool) -> None:
        """Finds the hosts that an earlier server has left.

        Args:
            nodes: All nodes.
            lost: Whether none of their processes can be there.
        """
        nodes = list(nodes)
        _forget_old_logs(self._state_dir / LOGS_DIR, {str(node.uid) for node in nodes})
        for node in nodes:
            if node.power is not Power.ON:
                self._follow(node)
                continue
            specs = self._specs_of(node)
            hosts = self._hosts_of(node)
            wrong = "the machine has been down" if lost else hosts.adopt(specs)
            self._told[node.name] = (node.power, node.incarnation, node.boot)
            self._specs[node.name] = specs
            if lost:
                self._tell(HostsLost(node.uid, node.incarnation, node.boot))
            elif wrong is None:
                self._tell(HostsUp(node.uid, node.incarnation, node.boot))
            elif node.up:
                self._tell(HostsFailed(node.uid, node.incarnation, node.boot, wrong))
            else:
                hosts.start(specs)

    def _hosts_of(self, node: Node) -> SliceHosts:
        hosts = self._slices.get(node.name)
        if hosts is None:
            directory = self._state_dir / HOSTS_DIR / str(node.uid)
            hosts = self._slices[node.name] = SliceHosts(node.uid, directory, self._tell)
        return hosts

    def _follow(self, node: Node) -> None:
        hosts = self._hosts_of(node)
        wanted = (node.power, node.incarnation, node.boot)
        is_new = self._told.get(node.name) != wanted
        self._told[node.name] = wanted
        boot = (node.incarnation, node.boot)
        if node.power is Power.ON:
            specs = self._specs_of(node)
            if is_new:
                hosts.start(specs)
            elif specs != self._specs.get(node.name):
                hosts.tell(specs)
            self._specs[node.name] = specs
        elif is_new and not node.down:
            # Hosts that have failed, or are replaced, get no time to take leave.
            polite_s = None if node.state is NodeState.REPAIRING else self._config().stop_s
            hosts.stop(boot, node.power, polite_s=polite_s)

    def _specs_of(self, node: Node) -> list[HostSpec]:
        config = self._config()
        directory = self._state_dir / HOSTS_DIR / str(node.uid) / str(node.incarnation)
        logs = self._state_dir / LOGS_DIR / f"{node.uid}-{base(node.name)}"
        first = self._first_of_slice_0(node)
        specs = []
        for worker in range(node.accelerator.hosts):
            address = self._block.address(node.first_host + worker)
            specs.append(
                HostSpec(
                    directory=str(directory / str(worker)),
                    logs=str(logs / f"worker-{worker}"),
                    server_file=str(self._state_dir / SERVER_FILE),
                    address=address,
                    port=METADATA_PORT,
                    incarnation=node.incarnation,
                    boot=node.boot,
                    run_script=node.run_script,
                    stop_s=config.stop_s,
                    orphan_s=config.orphan_s,
                    environ=environ_of(node, worker, address, METADATA_PORT),
                    metadata=tree_of(node, worker, self._block.address, first),
                )
            )
        return specs

    def _first_of_slice_0(self, node: Node) -> int:
        if node.slices == 1 or node.slice_index == 0:
            return node.first_host
        prefix = node.name.removesuffix(str(node.slice_index))
        first = self._find(f"{prefix}0")
        return node.first_host if first is None else first.first_host

    # --- what hosts tell ---

    def _tell(self, event: Event) -> None:
        """Collects what happens in one turn of the loop."""
        if not self._events:
            asyncio.get_running_loop().call_soon(self._flush)
        self._events.append(event)

    def _flush(self) -> None:
        events, self._events = self._events, []
        self._report(events)

    def guest_attributes(self, node: Node, worker: int) -> dict[str, dict[str, str]]:
        """What a host has written through its metadata server."""
        directory = self._state_dir / HOSTS_DIR / str(node.uid) / str(node.incarnation)
        try:
            text = (directory / str(worker) / GUEST_FILE).read_text(encoding="utf-8")
            attributes: dict[str, dict[str, str]] = json.loads(text)
        except (OSError, ValueError):
            return {}
        return attributes

    async def close(self) -> None:
        """Ends every process; the disks stay."""
        polite_s = self._config().stop_s
        await asyncio.gather(*(hosts.close(polite_s) for hosts in self._slices.values()))


def _forget_old_logs(logs: Path, live: set[str]) -> None:
    """Keeps what the scripts of live nodes and of the last others have printed."""
    gone = [entry for entry in logs.glob("*") if entry.name.partition("-")[0] not in live]
    # Their names begin with the nodes' numbers, and these with the time.
    for entry in sorted(gone)[:-_LOGS_KEPT]:
        shutil.rmtree(entry, ignore_errors=True)
