"""Which phase of a client's work a request begins, and which slices it concerns."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any, Final, TypeAlias

from regrow.head.buffers import Array
from regrow.head.colocated import Colocated
from regrow.head.executables import Executable
from regrow.head.reshard import Reshard
from regrow.head.tables import Tables
from regrow.head.topology import Topology
from regrow.wire import shardings

OF_REQUESTS: Final = ("compile", "transfer", "step", "collective", "reshard")
"""The phases that requests begin."""

Begun: TypeAlias = tuple[tuple[str, ...], Set[int] | None]
"""Phases that begin, and the slices that they concern; None: all."""

_NOTHING: Final[Begun] = ((), frozenset())


def begun_by(name: str, body: Any, tables: Tables, topology: Topology) -> Begun:
    """What a request begins.

    Raises:
        StatusError: It names a sharding that is none.
    """

    def slices(devices: Iterable[int]) -> set[int]:
        return {topology.slice_of(device) for device in devices}

    def of_arrays(handles: Iterable[int]) -> set[int]:
        arrays = (tables.arrays.get(handle) for handle in handles)
        return slices(d for a in arrays if isinstance(a, Array) for d in a.sharding.devices)

    def of_shardings(given: Iterable[Any]) -> set[int]:
        return slices(device for one in given for device in shardings.parse(one).devices)

    match name:
        case "compile_request":
            return ("compile",), None
        case "loaded_executable_execute_request":
            return _execution(tables.programs.get(body.loaded_executable_handle), topology)
        case "make_array_from_host_buffer_request":
            return ("transfer",), of_shardings((body.sharding,))
        case "make_arrays_from_host_buffer_shards_request":
            return ("transfer",), of_shardings(spec.array_spec.sharding for spec in body.specs)
        case "copy_to_host_buffer_request":
            return ("transfer",), of_arrays((body.array_handle,))
        case "copy_arrays_request":
            sources, targets = of_arrays(body.array_handles), slices(body.device_ids)
            return (("reshard",) if targets - sources else ()), sources | targets
        case "reshard_arrays_request":
            targets = of_shardings(spec.sharding for spec in body.array_specs)
            return ("reshard",), targets | of_arrays(body.array_handles)
        case _:
            return _NOTHING


def _execution(program: Any, topology: Topology) -> Begun:
    if isinstance(program, Executable):
        slices = frozenset(program.placement.slices)
        return (("step", "collective") if len(slices) > 1 else ("step",)), slices
    if isinstance(program, Colocated):
        return ("step",), frozenset(program.placement.slices)
    if isinstance(program, Reshard):
        targets = (device for target in program.targets for device in target.devices)
        return ("reshard",), {topology.slice_of(device) for device in (*program.devices, *targets)}
    return _NOTHING
