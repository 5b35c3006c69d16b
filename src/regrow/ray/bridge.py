"""The process between a head and its Ray cluster: asks Ray for slices, and tells of their ends.

A driver of Ray lives and dies by its Ray cluster; the head is to live longer, so it has this process for
it. They talk through a socket pair, in the frames of `regrow.launchers.template`:

    {op: "start", id, slice, host, incarnation, hosts, told}   ->  {id, pid} or {id, error}
    {op: "free", slice, incarnation}                               its place is given back
    {op: "spares", number, hosts, worker}                          so many are to be kept
    {op: "signal", slice, host, incarnation, signal, group}        a host that is far away is signalled
    {ended: [slice, host, incarnation], cause}                     from the bridge
    {waits: [slice, incarnation], text}                            from it, once: Ray has no place yet
    {ready: true} or {error: text}                                 the first frame from it

A slice is a placement group, so that it gets all its hosts or none. It has a new one in each incarnation:
what Ray would make of a group that lost a node is not waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import sys
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias, final

import regrow
from regrow.errors import LaunchError, RegrowError
from regrow.launchers.template import pack, unpack
from regrow.processes import die_with_parent, set_name
from regrow.ray.causes import one_line
from regrow.ray.cluster import KeyStore
from regrow.ray.host_actor import node_address
from regrow.ray.jobs import EXCLUDES
from regrow.ray.places import describe, lacking, selectors, shortage, slice_names
from regrow.ray.spares import Group, Spares

Key: TypeAlias = tuple[int, int]
_ACTOR_S: Final = 60.0
_TELL_AFTER_S: Final = 1.0
# A spare is only made where there is room; a slice that is lost meanwhile waits for no longer.
_SPARE_S: Final = 2.0


@final
class Bridge:
    """Asks Ray for places, and starts actors there."""

    def __init__(self, channel: socket.socket, settings: Mapping[str, Any]) -> None:
        self._channel = channel
        self._resources: dict[str, float] = settings["resources"]
        self._strategy: str = settings["strategy"]
        self._patience_s: float = settings["patience_s"]
        self._address = node_address()
        self._spares = Spares()
        self._making = asyncio.Lock()
        self._groups: dict[Key, asyncio.Task[Group]] = {}
        self._tpu_slices: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serves until the head is gone."""
        loop = asyncio.get_running_loop()
        self._channel.setblocking(False)
        self._send({"ready": True})
        buffer = bytearray()
        while chunk := await loop.sock_recv(self._channel, 1 << 16):
            buffer += chunk
            for request in unpack(buffer):
                task = loop.create_task(self._do(request))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _do(self, request: dict[str, Any]) -> Coroutine[Any, Any, None]:
        match request["op"]:
            case "start":
                return self._start(request)
            case "spares":
                hosts, worker = request["hosts"], request["worker"]
                return self._spares.keep(request["number"], lambda: self._make_spare(hosts, worker))
            case "signal":
                return self._signal(request)
            case _:
                return self._free(request)

    def _send(self, message: dict[str, Any]) -> None:
        # The head reads all the time; what it does not read at once is little.
        self._channel.setblocking(True)
        try:
            self._channel.sendall(pack(message))
        finally:
            self._channel.setblocking(False)

    async def _start(self, request: dict[str, Any]) -> None:
        key: Key = (request["slice"], request["incarnation"])
        host = request["host"]
        try:
            actor, pid = await self._start_host(key, host, request)
        except (RegrowError, OSError) as error:
            self._send({"id": request["id"], "error": str(error)})
            return
        except Exception as error:  # noqa: BLE001 - Ray raises many kinds
            text = one_line(f"{type(error).__name__}: {error}")
            self._send({"id": request["id"], "error": text})
            return
        self._send({"id": request["id"], "pid": pid})
        cause = await _end_of(actor)
        self._send({"ended": [key[0], host, key[1]], "cause": cause})

    async def _start_host(self, key: Key, host: int, request: dict[str, Any]) -> tuple[Any, int]:
        group = await self._group(key, request["hosts"])
        actor = group.hosts.get(host)
        if actor is None:
            actor = group.hosts[host] = _actor(group.placement, host, self._resources)
        try:
            async with asyncio.timeout(_ACTOR_S):
                answer = await actor.start.remote(request["told"] | {"head": self._address})
        except TimeoutError:
            raise LaunchError(f"waited {_ACTOR_S:g} s for Ray to start its actor") from None
        if "error" in answer:
            raise LaunchError(answer["error"])
        return actor, int(answer["pid"])

    async def _group(self, key: Key, hosts: int) -> Group:
        """The place of a slice; its hosts ask for it at the same time."""
        task = self._groups.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._make_group(key, hosts))
            self._groups[key] = task
        return await asyncio.shield(task)

    async def _make_group(self, key: Key, hosts: int) -> Group:
        try:
            async with self._making:
                spare = await self._spares.take()
            name = f"regrow-slice-{key[0]}-{key[1]}"
            return spare or await self._place(name, hosts, self._patience_s, key)
        except LaunchError:
            self._groups.pop(key, None)
            raise

    async def _make_spare(self, hosts: int, worker: Mapping[str, Any]) -> Group:
        """A place whose hosts import what they need, and wait."""
        async with self._making:
            if not self._groups or not all(task.done() for task in self._groups.values()):
                raise LaunchError("slices that are asked for come first")
            group = await self._place("regrow-spare", hosts, _SPARE_S)
        try:
            await self._prepare(group, hosts, worker)
        except BaseException:
            group.free()
            raise
        return group

    async def _prepare(self, group: Group, hosts: int, worker: Mapping[str, Any]) -> None:
        for host in range(hosts):
            group.hosts[host] = _actor(group.placement, host, self._resources)
        async with asyncio.timeout(_ACTOR_S):
            errors = await asyncio.gather(
                *(actor.prepare.remote(worker) for actor in group.hosts.values())
            )
        if error := next(filter(None, errors), ""):
            raise LaunchError(error)

    async def _place(
        self, name: str, hosts: int, patience_s: float, key: Key | None = None
    ) -> Group:
        import ray
        from ray.util import placement_group

        nodes = await asyncio.to_thread(ray.nodes)
        missing = lacking(nodes, self._resources, hosts, self._strategy)
        if missing:
            raise LaunchError(missing)
        tpu_slice = self._slice_name(nodes, hosts)
        placement = placement_group(
            [dict(self._resources)] * hosts,
            strategy=self._strategy,
            # No two of a Ray cluster have the same, whichever head they are of.
            name=f"{name}-{secrets.token_hex(4)}",
            bundle_label_selector=selectors(nodes, tpu_slice, hosts) if tpu_slice else None,
        )
        group = Group(placement, tpu_slice, self._tpu_slices)
        try:
            async with asyncio.timeout(patience_s):
                await self._ready(placement, hosts, key)
        except BaseException as error:
            group.free()
            if not isinstance(error, TimeoutError):
                raise
            wanted, has = describe(self._resources, hosts), await self._shortage()
            raise LaunchError(f"waited {patience_s:g} s for {wanted}; {has}") from None
        return group

    async def _ready(self, placement: Any, hosts: int, key: Key | None) -> None:
        """Waits until Ray has a place; tells what it lacks if that takes long."""
        ready = asyncio.ensure_future(placement.ready())
        try:
            await asyncio.wait([ready], timeout=_TELL_AFTER_S)
            if key is not None and not ready.done():
                text = f"waits for {describe(self._resources, hosts)}; {await self._shortage()}"
                self._send({"waits": key, "text": text})
            await ready
        finally:
            ready.cancel()

    async def _shortage(self) -> str:
        import ray

        total = await asyncio.to_thread(ray.cluster_resources)
        return shortage(self._resources, total, await asyncio.to_thread(ray.available_resources))

    def _slice_name(self, nodes: Sequence[Mapping[str, Any]], hosts: int) -> str:
        """A TPU slice that no slice of ours is on; empty if nodes have no such labels."""
        names = slice_names(nodes, self._resources, hosts)
        return next((name for name in names if name not in self._tpu_slices), "")

    async def _signal(self, request: dict[str, Any]) -> None:
        task = self._groups.get((request["slice"], request["incarnation"]))
        actor = None if task is None else (await task).hosts.get(request["host"])
        if actor is not None:
            # What became of it is told by its end.
            actor.signal.remote(request["signal"], request["group"])

    async def _free(self, request: dict[str, Any]) -> None:
        task = self._groups.pop((request["slice"], request["incarnation"]), None)
        if task is None:
            return
        with contextlib.suppress(RegrowError):
            (await task).free()


async def _end_of(actor: Any) -> str:
    from ray.exceptions import RayError as RaysError

    try:
        return str(await actor.wait.remote())
    except RaysError as error:
        first = str(error).strip().splitlines() or ["no reason given"]
        return f"its actor has died: {one_line(first[-1])}"


def _actor(placement: Any, bundle: int, resources: Mapping[str, float]) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from regrow.ray.host_actor import HostActor

    own = {name: one for name, one in resources.items() if name not in ("CPU", "GPU", "memory")}
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=placement,
        placement_group_bundle_index=bundle,
        placement_group_capture_child_tasks=False,
    )
    kind = ray.remote(HostActor).options(
        num_cpus=resources.get("CPU", 0),
        num_gpus=resources.get("GPU", 0),
        resources=own,
        max_restarts=0,
        max_concurrency=8,
        scheduling_strategy=strategy,
    )
    return kind.remote()


def connect(address: str, *, other_machines: bool) -> None:
    """Becomes a driver of a Ray cluster.

    Args:
        address: Of its head.
        other_machines: Whether nodes may be others than this one: they get our modules sent.

    Raises:
        LaunchError: If that fails.
    """
    import ray

    try:
        # Ray itself would try for 40 s where no head is.
        KeyStore(address).get("")
    except RegrowError as error:
        raise LaunchError(str(error)) from None
    # Where Ray's workers find our modules.
    paths = os.pathsep.join(path for path in sys.path if path and Path(path).is_dir())
    modules: dict[str, Any] = {"env_vars": {"PYTHONPATH": paths}}
    if other_machines:
        package = str(Path(regrow.__file__).parent)
        modules = {"py_modules": [package], "excludes": list(EXCLUDES)}
    try:
        ray.init(
            address=address,
            namespace="regrow",
            log_to_driver=False,
            logging_level="warning",
            runtime_env=modules,
        )
    except Exception as error:  # noqa: BLE001 - Ray raises many kinds
        text = one_line(str(error))
        raise LaunchError(f"cannot join the Ray cluster at {address}: {text}") from None


def main(arguments: Sequence[str]) -> None:
    """Runs the bridge.

    Args:
        arguments: The socket's descriptor, the head's process id, the settings as JSON.
    """
    fd, head, text = arguments
    die_with_parent(int(head))
    set_name("regrow-ray")
    channel = socket.socket(fileno=int(fd))
    settings = json.loads(text)
    try:
        connect(settings["address"], other_machines=settings["other_machines"])
    except LaunchError as error:
        channel.sendall(pack({"error": str(error)}))
        return
    asyncio.run(Bridge(channel, settings).run())


if __name__ == "__main__":
    main(sys.argv[1:])
