"""The requests of a client that are about arrays."""

from __future__ import annotations

import math
from typing import Any, final

from regrow.errors import Code, StatusError
from regrow.head.buffers import Array, Piece
from regrow.head.links import malformed, pairs, unknown
from regrow.head.runtime import Runtime
from regrow.head.tables import Later, Tables
from regrow.head.transfers import Memory
from regrow.wire import shardings
from regrow.wire.dtypes import TOKEN, layout_bits
from regrow.wire.schema import proxy
from regrow.wire.shardings import Sharding
from regrow.wire.status import from_proto

_ALWAYS_COPY = 1
_DONATE = 3


@final
class ArrayRequests:
    """Handlers named as the requests; each returns a response, a `Later`, or None to wait."""

    def __init__(self, tables: Tables, runtime: Runtime) -> None:
        self._tables = tables
        self._runtime = runtime
        self._transfers = runtime.transfers
        self._moves = runtime.moves

    # --- from the client ---

    def make_array_from_host_buffer_request(self, body: Any) -> Any:
        """A host buffer becomes an array."""
        handle, kind, dims = body.host_buffer_handle, body.dtype.kind, body.shape.dims
        memory = _take(self._tables.host_buffers, handle, kind, dims)
        if memory is None:
            return None
        strides = tuple(body.byte_strides.strides) if body.HasField("byte_strides") else None
        array = self._placed(memory, kind, dims, strides, shardings.parse(body.sharding))
        handle = body.array_handle or self._tables.handle()
        self._tables.arrays[handle] = array
        response = proxy.IfrtResponse()
        response.make_array_from_host_buffer_response.array_handle = handle
        return response

    def make_arrays_from_host_buffer_shards_request(self, body: Any) -> Any:
        """Arrays whose shards come as host buffers, each for one or more shards."""
        wanted = [
            (buffer.host_buffer_handle, buffer.dtype.kind, buffer.shape.dims)
            for spec in body.specs
            for buffer in spec.host_buffers
        ]
        if any(not self._there(*buffer) for buffer in wanted):
            return None
        # All of them at once: whatever fails below, none of them is asked for again.
        there = self._tables.host_buffers
        taken = {handle: there.pop(handle) for handle, *_ in wanted if handle in there}
        handles = body.array_handles or [self._tables.handle() for _ in body.specs]
        response = proxy.IfrtResponse()
        made = response.make_arrays_from_host_buffer_shards_response
        for handle, spec in pairs(handles, body.specs, "handles and specs of arrays"):
            self._tables.arrays[handle] = self._from_shards(spec, taken)
            made.array_handles.append(handle)
        return response

    def _from_shards(self, spec: Any, host_buffers: dict[int, Any]) -> Array:
        sharding = shardings.parse(spec.array_spec.sharding)
        pieces: list[Piece | None] = [None] * len(sharding.devices)
        places = spec.addressable_shard_indices
        for indices, buffer in pairs(places, spec.host_buffers, "places and host buffers"):
            kind, dims = buffer.dtype.kind, tuple(buffer.shape.dims)
            memory = _take(host_buffers, buffer.host_buffer_handle, kind, dims)
            if memory is None:
                raise malformed(f"host buffer {buffer.host_buffer_handle} is used twice")
            strides = (
                tuple(buffer.byte_strides.strides) if buffer.HasField("byte_strides") else None
            )
            for shard in indices.indices:
                if not 0 <= shard < len(pieces):
                    raise malformed(f"shard {shard} of an array of {len(pieces)} shards")
                one = self._placed(memory, kind, dims, strides, sharding.single(shard))
                pieces[shard] = one.piece(0)
        if None in pieces:
            raise StatusError.user(
                Code.INVALID_ARGUMENT, f"shard {pieces.index(None)} of an array got no host buffer"
            )
        return Array(
            spec.array_spec.dtype.kind,
            tuple(spec.array_spec.shape.dims),
            sharding,
            pieces=[piece for piece in pieces if piece is not None],
        )

    def _there(self, handle: int, kind: int, dims: Any) -> bool:
        return handle in self._tables.host_buffers or _is_empty(kind, dims)

    def _placed(
        self,
        memory: Memory,
        kind: int,
        dims: Any,
        strides: tuple[int, ...] | None,
        sharding: Sharding,
    ) -> Array:
        shape = tuple(dims)
        if kind == TOKEN or 0 in shape:
            buffer = self._transfers.empty(kind, shape, sharding)
        else:
            buffer = self._transfers.put(memory, kind, shape, strides, sharding)
        return Array(kind, shape, sharding, whole=buffer)

    def make_error_arrays_request(self, body: Any) -> Any:
        """Arrays that raise the client's own error."""
        error = from_proto(body.error) or StatusError(Code.UNKNOWN, "an error without a code")
        for handle in body.array_handles:
            self._tables.arrays[handle] = error
        response = proxy.IfrtResponse()
        response.make_error_arrays_response.array_handles.extend(body.array_handles)
        return response

    # --- apart and together ---

    def assemble_array_from_single_device_arrays_request(self, body: Any) -> Any:
        """Arrays of single shards become one."""
        arrays = [self._tables.array(handle) for handle in body.single_device_array_handles]
        sharding = shardings.parse(body.sharding)
        pieces = [piece for array in arrays for piece in array.pieces()]
        if len(pieces) != len(sharding.devices):
            raise StatusError.user(
                Code.INVALID_ARGUMENT,
                f"{len(pieces)} shards do not make an array on {len(sharding.devices)} devices",
            )
        if TOKEN not in (array.kind for array in arrays):
            _check_sizes([size for array in arrays for size in _sizes(array)], sharding, body.shape)
        kind = body.dtype.kind if body.HasField("dtype") else arrays[0].kind
        self._tables.arrays[body.result_handle] = Array(
            kind, tuple(body.shape.dims), sharding, pieces=pieces
        )
        response = proxy.IfrtResponse()
        response.assemble_array_from_single_device_arrays_response.array_handle = body.result_handle
        return response

    def disassemble_into_single_device_arrays_request(self, body: Any) -> Any:
        """An array becomes one array for each shard; those on living slices outlive a loss."""
        array = self._tables.array(body.array_handle)
        shapes = array.sharding.shard_shapes(array.shape)
        pieces = array.pieces()
        if len(body.result_handles) != len(pieces):
            raise StatusError.user(
                Code.INVALID_ARGUMENT,
                f"{len(body.result_handles)} handles for {len(pieces)} shards",
            )
        for shard, handle in enumerate(body.result_handles):
            self._tables.arrays[handle] = Array(
                array.kind, shapes[shard], array.sharding.single(shard), pieces=(pieces[shard],)
            )
        response = proxy.IfrtResponse()
        response.disassemble_into_single_device_arrays_response.array_handles.extend(
            body.result_handles
        )
        return response

    def fully_replicated_shard_request(self, body: Any) -> Any:
        """One shard of a replicated array: the first that is not lost."""
        array = self._tables.array(body.array_handle)
        pieces = array.pieces()
        shard = next((number for number, piece in enumerate(pieces) if _lives(piece)), 0)
        self._tables.arrays[body.result_handle] = Array(
            array.kind, array.shape, array.sharding.single(shard), pieces=(pieces[shard],)
        )
        response = proxy.IfrtResponse()
        response.fully_replicated_shard_response.array_handle = body.result_handle
        return response

    def remap_arrays_request(self, body: Any) -> Any:
        """Shards of several arrays are dealt out to new arrays."""
        arrays = [self._tables.array(handle) for handle in body.array_handles]
        specs = [(spec, shardings.parse(spec.sharding)) for spec in body.plan.output_specs]
        dealt: list[list[Piece | None]] = [[None] * len(sh.devices) for _, sh in specs]
        try:
            _deal_by_interval(body.plan, arrays, dealt)
            _deal_by_device(body.plan, arrays, dealt, [sharding for _, sharding in specs])
        except (IndexError, KeyError, ValueError):
            raise malformed("the remap plan names a shard that is not there") from None
        results = pairs(body.result_handles, specs, "results and their specs")
        for (handle, (spec, sharding)), pieces in zip(results, dealt, strict=True):
            if None in pieces:
                raise malformed("the remap plan leaves a shard of an output empty")
            self._tables.arrays[handle] = Array(
                spec.dtype.kind,
                tuple(spec.shape.dims),
                sharding,
                pieces=[piece for piece in pieces if piece is not None],
            )
        response = proxy.IfrtResponse()
        response.remap_arrays_response.array_handles.extend(body.result_handles)
        return response

    def bitcast_arrays_request(self, body: Any) -> Any:
        """The same memory under another shape or sharding of the same element type."""
        arrays = list(pairs(body.array_handles, body.array_specs, "arrays and their specs"))
        for (handle, spec), result in pairs(arrays, body.result_handles, "arrays and results"):
            array = self._tables.array(handle)
            if spec.dtype.kind != array.kind:
                raise StatusError(
                    Code.UNIMPLEMENTED, "a bitcast to another element type is not supported"
                )
            sharding = shardings.parse(spec.sharding)
            _check_sizes(_sizes(array), sharding, spec.shape)
            self._tables.arrays[result] = Array(
                array.kind, tuple(spec.shape.dims), sharding, pieces=array.pieces()
            )
        response = proxy.IfrtResponse()
        response.bitcast_arrays_response.array_handles.extend(body.result_handles)
        return response

    # --- to other places ---

    def copy_arrays_request(self, body: Any) -> Any:
        """Arrays are copied to other devices or another memory kind, shard by shard."""
        devices = tuple(body.device_ids) or None
        memory_kind = body.memory_kind if body.HasField("memory_kind") else None

        def target(array: Array) -> Sharding:
            return array.sharding.rebased(devices, memory_kind)

        always = body.copy_semantics == _ALWAYS_COPY
        self._move_each(body, lambda _, array: target(array), always)
        response = proxy.IfrtResponse()
        response.copy_arrays_response.array_handles.extend(body.result_handles)
        return response

    def reshard_arrays_request(self, body: Any) -> Any:
        """Arrays are cut anew."""
        targets = [shardings.parse(spec.sharding) for spec in body.array_specs]
        if len(targets) != len(body.array_handles):
            raise malformed(f"{len(body.array_handles)} arrays and {len(targets)} targets")
        self._move_each(body, lambda number, _: targets[number], False)
        response = proxy.IfrtResponse()
        response.reshard_arrays_response.array_handles.extend(body.result_handles)
        return response

    def _move_each(self, body: Any, target: Any, always: bool) -> None:
        moves = pairs(body.array_handles, body.result_handles, "arrays and results")
        for number, (handle, result) in enumerate(moves):
            try:
                array = self._tables.array(handle)
                moved = self._moves.move(array, target(number, array), copy=always)
                self._tables.arrays[result] = moved
                if body.copy_semantics == _DONATE:
                    array.delete()
            except StatusError as error:
                self._tables.arrays[result] = error.fresh()

    # --- to the client ---

    def copy_to_host_buffer_request(self, body: Any) -> Any:
        """A single-device array becomes a host buffer that the client looks up."""
        array = self._tables.array(body.array_handle)
        array.check()
        pieces = array.pieces()
        if len(pieces) != 1 and not array.sharding.fully_replicated:
            raise StatusError(
                Code.UNIMPLEMENTED, f"an array of {len(pieces)} shards cannot be copied as one"
            )
        strides = tuple(body.byte_strides.strides) if body.HasField("byte_strides") else None
        later = Later()

        def done(error: StatusError | None, value: Any) -> None:
            if error is None and not self._tables.closed:
                self._tables.host_buffers[body.host_buffer_handle] = value
            response = proxy.IfrtResponse()
            response.copy_to_host_buffer_response.SetInParent()
            later.settle(error, response)

        self._transfers.get(pieces[0], array.kind, array.shape, strides, done)
        return later

    def check_value_ready_request(self, body: Any) -> Any:
        """Waits until arrays hold values."""
        pieces: list[Piece] = []
        for handle in body.value_handles:
            pieces.extend(self._tables.array(handle).pieces())
        later = Later()

        def done(error: StatusError | None, _: Any) -> None:
            response = proxy.IfrtResponse()
            response.check_value_ready_response.SetInParent()
            later.settle(error, response)

        self._transfers.ready(pieces, done)
        return later

    # --- the end ---

    def delete_array_request(self, body: Any) -> Any:
        """Arrays are deleted; handles that hold none are as good as deleted."""
        for handle in body.array_handle:
            array = self._tables.arrays.get(handle)
            if isinstance(array, Array):
                array.delete()
        response = proxy.IfrtResponse()
        response.delete_array_response.deletion_future_handle = self._tables.handle()
        return response

    def destruct_array_request(self, body: Any) -> Any:
        """The client forgets handles."""
        for handle in body.array_handle:
            self._tables.arrays.pop(handle, None)
            self._tables.statuses.pop(handle, None)
        response = proxy.IfrtResponse()
        response.destruct_array_response.SetInParent()
        return response

    def is_array_deleted_request(self, body: Any) -> Any:
        """Whether an array was deleted or given away."""
        array = self._tables.arrays.get(body.array_handle)
        if array is None:
            raise unknown(f"array handle {body.array_handle}")
        response = proxy.IfrtResponse()
        deleted = isinstance(array, Array) and array.deleted
        response.is_array_deleted_response.deleted = deleted
        return response

    def check_future_request(self, _: Any) -> Any:
        """Compilations and deletions are done when they have been answered."""
        response = proxy.IfrtResponse()
        response.check_future_response.SetInParent()
        return response

    def get_default_layout_request(self, body: Any) -> Any:
        """The layout of an array on a device: row-major, sub-byte elements packed."""
        order = ",".join(str(axis) for axis in range(len(body.dims) - 1, -1, -1))
        bits = layout_bits(body.dtype.kind)
        text = "{" + order + (f":E({bits})" if bits else "") + "}"
        response = proxy.IfrtResponse()
        response.get_default_layout_response.serialized_pjrt_layout = text.encode()
        return response


def _take(host_buffers: dict[int, Any], handle: int, kind: int, dims: Any) -> Memory | None:
    memory: Memory | StatusError | None = host_buffers.pop(handle, None)
    if isinstance(memory, StatusError):
        raise memory.fresh()
    if memory is None and _is_empty(kind, dims):
        return b""
    return memory


def _is_empty(kind: int, dims: Any) -> bool:
    return kind == TOKEN or 0 in tuple(dims)


def _sizes(array: Array) -> list[int]:
    return [math.prod(shape) for shape in array.sharding.shard_shapes(array.shape)]


def _check_sizes(sizes: list[int], sharding: Sharding, shape: Any) -> None:
    """Checks that shards of so many elements make an array of that sharding and shape."""
    dims = tuple(shape.dims)
    if sizes != [math.prod(shard) for shard in sharding.shard_shapes(dims)]:
        raise malformed(f"shards of {sizes} elements are no array of {list(dims)}")


def _lives(piece: Piece) -> bool:
    try:
        piece[0].check_shard(piece[1])
    except StatusError:
        return False
    return True


def _deal_by_interval(plan: Any, arrays: list[Array], dealt: list[list[Piece | None]]) -> None:
    """Remap plans of older clients: shard numbers by intervals with steps."""
    for mapping in plan.mappings:
        source, target = arrays[mapping.in_array].pieces(), dealt[mapping.out_array]
        intervals = zip(
            mapping.from_start,
            mapping.from_end,
            mapping.from_step,
            mapping.to_start,
            mapping.to_end,
            mapping.to_step,
            strict=True,
        )
        for start, end, step, to_start, to_end, to_step in intervals:
            places = zip(range(start, end, step), range(to_start, to_end, to_step), strict=False)
            for one, other in places:
                target[other] = source[one]


def _deal_by_device(
    plan: Any, arrays: list[Array], dealt: list[list[Piece | None]], targets: list[Sharding]
) -> None:
    """Remap plans of newer clients: shards by their device."""
    for entry in plan.input_devices_for_output:
        places = {device: i for i, device in enumerate(targets[entry.out_array].devices)}
        for given in entry.input_devices:
            array = arrays[given.in_array]
            source = dict(zip(array.sharding.devices, array.pieces(), strict=True))
            for device in given.device_list.device_ids:
                dealt[entry.out_array][places[device]] = source[device]
