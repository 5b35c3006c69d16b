"""What phase the client's work is in, for whoever places a fault there.

There is a watch only while somebody waits for a phase, so that a request costs no more than a look
whether there is one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Set
from typing import Any, Final, TypeAlias, TypeVar, final

from regrow.errors import UsageError
from regrow.head.buffers import Array
from regrow.head.executables import Executable
from regrow.head.tables import Tables
from regrow.head.topology import Topology
from regrow.wire import shardings

_OF_REQUESTS: Final = ("compile", "transfer", "step", "collective", "reshard")
_OF_CLIENTS: Final = ("step", "snapshot", "load", "scale-up")
PHASES: Final = frozenset((*_OF_REQUESTS, *_OF_CLIENTS))
"""What can be waited for."""

_T = TypeVar("_T")
_Seen: TypeAlias = tuple[tuple[str, ...], Set[int] | None]
_NOTHING: Final[_Seen] = ((), frozenset())


@final
class Watch:
    """Sees requests and what clients say, and wakes who waits for it."""

    def __init__(self, topology: Topology, on_idle: Callable[[], None]) -> None:
        """Makes one; `on_idle` is called when nobody waits any longer."""
        self._topology = topology
        self._on_idle = on_idle
        self._phases: dict[asyncio.Future[None], tuple[str, int]] = {}
        self._steps: dict[asyncio.Future[None], int] = {}

    async def step(self, step: int) -> None:
        """Returns when a client says that it begins this step, or a later one."""
        await self._wait(self._steps, step)

    async def phase(self, phase: str, slice_index: int) -> None:
        """Returns when this phase next begins for this slice, or for all.

        Raises:
            UsageError: There is no such phase.
        """
        if phase not in PHASES:
            raise UsageError(f"there is no phase {phase!r}; there are {', '.join(sorted(PHASES))}")
        await self._wait(self._phases, (phase, slice_index))

    async def _wait(self, waiting: dict[asyncio.Future[None], _T], what: _T) -> None:
        future = asyncio.get_running_loop().create_future()
        waiting[future] = what
        try:
            await future
        finally:
            del waiting[future]
            if not self._phases and not self._steps:
                self._on_idle()

    def told(self, step: int | None, phase: str | None) -> None:
        """A client says that it is in this step, or phase."""
        for future, wanted in self._steps.items():
            if step is not None and wanted <= step:
                _wake(future)
        if phase in _OF_CLIENTS:
            self._begins(phase, None)

    def request(self, name: str, body: Any, tables: Tables) -> None:
        """A request is about to be carried out.

        Raises:
            StatusError: It names a sharding that is none.
        """
        if self._phases:
            phases, slices = self._seen(name, body, tables)
            for phase in phases:
                self._begins(phase, slices)

    def _begins(self, phase: str, slices: Set[int] | None) -> None:
        for future, (wanted, index) in self._phases.items():
            if wanted == phase and (slices is None or index in slices):
                _wake(future)

    def _seen(self, name: str, body: Any, tables: Tables) -> _Seen:
        """The phases that a request begins, and the slices that it concerns; None: all."""
        match name:
            case "compile_request":
                return ("compile",), None
            case "loaded_executable_execute_request":
                return self._execution(tables.programs.get(body.loaded_executable_handle))
            case "make_array_from_host_buffer_request":
                return ("transfer",), self._slices(shardings.parse(body.sharding).devices)
            case "make_arrays_from_host_buffer_shards_request":
                given = (shardings.parse(spec.array_spec.sharding) for spec in body.specs)
                return ("transfer",), self._slices(d for one in given for d in one.devices)
            case "copy_to_host_buffer_request":
                return ("transfer",), self._of_arrays(tables, (body.array_handle,))
            case "copy_arrays_request":
                sources = self._of_arrays(tables, body.array_handles)
                targets = self._slices(body.device_ids)
                return (("reshard",) if targets - sources else ()), sources | targets
            case "reshard_arrays_request":
                given = (shardings.parse(spec.sharding) for spec in body.array_specs)
                targets = self._slices(d for one in given for d in one.devices)
                return ("reshard",), targets | self._of_arrays(tables, body.array_handles)
            case _:
                return _NOTHING

    def _execution(self, program: Any) -> _Seen:
        if isinstance(program, Executable):
            slices = frozenset(program.placement.slices)
            return (("step", "collective") if len(slices) > 1 else ("step",)), slices
        if program is None:
            return _NOTHING
        devices = getattr(program, "devices", None)
        if devices is None:  # Colocated Python.
            return ("step",), frozenset(program.placement.slices)
        targets = (device for target in program.targets for device in target.devices)
        return ("reshard",), self._slices((*devices, *targets))

    def _of_arrays(self, tables: Tables, handles: Iterable[int]) -> set[int]:
        arrays = (tables.arrays.get(handle) for handle in handles)
        return self._slices(d for a in arrays if isinstance(a, Array) for d in a.sharding.devices)

    def _slices(self, devices: Iterable[int]) -> set[int]:
        return {self._topology.slice_of(device) for device in devices}


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
