"""Colocated Python: functions of the user's own that run on the hosts, next to their arrays.

Such a program is the user's code, pickled by the user's process: the one thing that a worker unpickles.
The head refuses it where the owner of the cluster has switched it off.

A host runs the functions one after the other, on a thread of their own, with the shards that it has.
JAX inside them sees a CPU backend whose devices are those of the whole cluster by their logical ids,
with one JAX process a host; only this host's can be used.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, final

import jax
import numpy as np
from jax._src import xla_bridge
from jaxlib import _pathways  # type: ignore[attr-defined]

from regrow.channel.commands import Execute, SetColocated
from regrow.errors import Code, StatusError
from regrow.wire.dtypes import STRING, TOKEN, kind_of
from regrow.worker.platform import PLATFORM, Domain
from regrow.worker.store import Part, PartError, Store
from regrow.worker.strings import Strings

_WIDE: Final = frozenset(map(np.dtype, ("int64", "uint64", "float64", "complex128")))
_HERE: Final = str(Path(__file__))


@final
class Colocated:
    """One such program; loaded when it is first run, for that may run the user's code, too."""

    def __init__(self, command: SetColocated) -> None:
        self.outs = [(kind, tuple(dims), tuple(devices)) for kind, dims, devices in command.outs]
        self.hosts = command.hosts
        self._text = command.text
        self._loaded: tuple[Any, ...] | None = None

    def run(self, domain: Domain, parts: Sequence[Part]) -> list[Any]:
        """Runs the function; the leaves of its result.

        Raises:
            PartError: An argument has an error instead of a value.
        """
        if self._loaded is None:
            # cloudpickle may lack on a host, which matters to nobody else.
            from jax.experimental.colocated_python import serialization

            self._loaded = serialization._deserialize(self._text)
        function, treedef, specs, _, out_specs, _ = self._loaded
        leaves = [_argument(domain, part, spec) for part, spec in zip(parts, specs, strict=True)]
        args, kwargs = jax.tree.unflatten(treedef, leaves)
        # JAX here works with wide numbers; the user's, by default, does not.
        wide = any(
            np.dtype(spec.dtype) in _WIDE for spec in (*specs, *out_specs) if _is_plain(spec)
        )
        with jax.enable_x64(wide):  # type: ignore[no-untyped-call, attr-defined, unused-ignore]
            return jax.tree.leaves(function(*args, **kwargs))

    def unload(self) -> None:
        """Lets go of the function."""
        self._loaded = None


def _is_plain(spec: Any) -> bool:
    return isinstance(spec.dtype, np.dtype)


def _argument(domain: Domain, part: Part, spec: Any) -> Any:
    try:
        local = [
            _shard(domain, shard, device, spec)
            for shard, device in zip(part.singles(), part.devices, strict=True)
        ]
    except Exception as error:  # noqa: BLE001 - XLA raises many kinds
        raise PartError.of(error, part.epoch) from None
    return jax.make_array_from_single_device_arrays(spec.shape, spec.sharding, local)


def _shard(domain: Domain, shard: Any, device: int, spec: Any) -> Any:
    if not isinstance(shard, Strings):
        return domain.adopt(shard, device)
    text = shard.to_numpy(spec.sharding.shard_shape(spec.shape))
    return jax.device_put(text, domain.devices[device])


@final
class ColocatedRunner:
    """The thread that the functions of a host run on, and the JAX backend that they see."""

    def __init__(self, store: Store, home: Domain) -> None:
        self._store = store
        self._home = home
        self._domain: Domain | None = None
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, command: Execute, program: Colocated) -> None:
        """Plans a run; its results are pending parts from now on."""
        local = self._home.local
        outs = [[device for device in devices if device in local] for _, _, devices in program.outs]
        results = [Part.expected(self._home, devices) for devices in outs]
        status = Part.expected(self._home, ())
        for aid, part in zip(command.outs, results, strict=True):
            self._store.set(aid, part)
        if command.status:
            self._store.set(command.status, status)
        parts = [self._store.get(aid) for aid in command.args]
        self._do(lambda: self._run(program, parts, [*results, status]))

    def unload(self, program: Colocated) -> None:
        """Lets go of a program, in its turn: that, too, may run the user's code."""
        self._do(program.unload)

    def _do(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="colocated", daemon=True)
            self._thread.start()
        self._queue.put(work)

    def _work(self) -> None:
        while True:
            self._queue.get()()

    def _run(self, program: Colocated, parts: Sequence[Part], results: list[Part]) -> None:
        try:
            leaves = program.run(self._backend(program.hosts), parts)
            values = [self._result(*one) for one in _paired(leaves, program.outs)]
            values.append(Part(self._home, (), []))
        except BaseException as error:  # noqa: BLE001 - it may be the user's `sys.exit`
            failed = Part.failed(self._home, _told(error))
            values = [failed] * len(results)
        for result, value in zip(results, values, strict=True):
            result.resolve(value)

    def _backend(self, hosts: Sequence[Sequence[int]]) -> Domain:
        if self._domain is None:
            host_of = {device: host for host, devices in enumerate(hosts) for device in devices}
            client = _pathways._create_cpu_client(set(self._home.local), host_of)
            devices = {device.id: device for device in client.devices()}
            with xla_bridge._backend_lock:
                xla_bridge._backends[PLATFORM] = xla_bridge._default_backend = client
            self._domain = Domain(client, devices, sorted(self._home.local))
        return self._domain

    def _result(self, leaf: Any, kind: int, devices: Sequence[int]) -> Part:
        found = {shard.device.id: shard.data for shard in leaf.addressable_shards}
        local = [device for device in devices if device in self._home.local]
        if not set(local) <= set(found):
            raise ValueError(f"a result is on devices {sorted(found)}, and was to be on {local}")
        if kind == STRING:
            shards: list[Any] = [Strings.of(np.asarray(found[device])) for device in local]
        else:
            # Waits for the values, so that an error of theirs is told as the function's.
            shards = [self._home.adopt(found[device], device) for device in local]
        return Part(self._home, local, shards)


def _paired(leaves: list[Any], outs: Sequence[Any]) -> list[tuple[Any, int, Sequence[int]]]:
    if len(leaves) != len(outs):
        raise ValueError(
            f"the function returned {len(leaves)} arrays, and was to return {len(outs)}"
        )
    pairs = []
    for leaf, (kind, shape, devices) in zip(leaves, outs, strict=True):
        if not isinstance(leaf, jax.Array):
            raise TypeError(f"the function returned a {type(leaf).__name__}, which is no jax.Array")
        is_kind = TOKEN if kind == STRING else kind_of(np.dtype(leaf.dtype))
        if leaf.shape != shape or (kind != STRING and is_kind != kind):
            raise ValueError(
                f"the function returned an array of shape {leaf.shape} and type {leaf.dtype}, which "
                f"is not what was specified: shape {shape}"
            )
        pairs.append((leaf, kind, devices))
    return pairs


def _told(error: BaseException) -> PartError:
    """An error of the user's function with the way to it, less the frames of this file."""
    if isinstance(error, PartError):
        return error
    lines = traceback.format_exception_only(error)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != _HERE]
    if frames:
        lines += ["in a colocated Python function:\n", *traceback.format_list(frames)]
    user = StatusError.user(Code.UNKNOWN, "".join(lines).rstrip())
    return PartError(user.code, user.message)
