"""Requests that are valid in form and random in content, so that every handler is reached."""

from __future__ import annotations

import json
import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from head_world import one, replicated, tiled

from regrow.channel.digests import CopySpec, DigestRequest
from regrow.head.tables import SERVER_HANDLES_FROM
from regrow.wire import shardings
from regrow.wire.schema import ifrt, proxy
from regrow.wire.shardings import Sharding

SHARDINGS: list[Sharding] = [
    one(0),
    one(1, "pinned_host"),
    one(2),
    one(9),
    one(-1),
    replicated((0, 1)),
    replicated((0, 2), "unpinned_host"),
    replicated((1, 3), "no such memory"),
    tiled((0, 1), (2,)),
    tiled((0, 2), (2,)),
    tiled((0, 1, 2, 3), (2, 2)),
    tiled((3, 1, 0, 2), (1, 4)),
    tiled((0, 77), (2,)),
    shardings.even((0, 1), None, (4, 4), (2, 4), False),
    shardings.even((0, 2), None, (4,), (4,), True),
]
PUTS: list[tuple[tuple[int, ...], Sharding]] = [
    ((4,), SHARDINGS[0]),
    ((4,), SHARDINGS[9]),
    ((4, 4), SHARDINGS[10]),
    ((), SHARDINGS[2]),
]
DIMS = [0, 1, 2, 2, 4, 4, 4, 8, -1, 1 << 62]
INTS = [0, 1, 2, 3, 4, 5, -1, 7, 1000, (1 << 31) - 1, -(1 << 31)]
KINDS = [11, 11, 11, 4, 1, 12, 16, 17, 21, 99, 0, 32, 777]
PROGRAMS = [b"", b"plain", b"refuse", b"donate", b"two", b"regrow:0123456789abcdef:1:1;"]
XLA = "xla::ifrt::XlaProgram"
OWN = "an error of the client's own making"


def compile_options(rows: list[list[int]], replicas: int | None = None) -> bytes:
    """XlaCompileOptionsProto with that device assignment, one row a partition."""
    wrapped = ifrt.XlaCompileOptionsProto()
    build = wrapped.compile_options.executable_build_options
    build.num_replicas = replicas or len(rows[0])
    build.num_partitions = len(rows)
    build.device_assignment.replica_count = build.num_replicas
    build.device_assignment.computation_count = len(rows)
    for row in rows:
        build.device_assignment.computation_devices.add().replica_device_ids.extend(row)
    data: bytes = wrapped.SerializeToString()
    return data


OPTIONS = [
    b"",
    b"junk",
    compile_options([[0]]),
    compile_options([[2]]),
    compile_options([[0], [1]]),
    compile_options([[0], [2]]),
    compile_options([[1, 3]]),
    compile_options([[0], [99]]),
    compile_options([[0]], (1 << 31) - 1),
]


def reshard(source: Any, target: Any, *, donate: bool) -> bytes:
    """The plugin program by which pathwaysutils moves arrays."""
    request = {"donateInput": donate, "inSharding": source, "outSharding": target}
    return b"\x00prefix" + json.dumps({"reshardRequest": request}).encode()


_PLACE = {"devices": {"device_ids": [0, 1]}, "memory_kind": "device", "xla_hlo_sharding": ""}
PLUGINS = [
    reshard([_PLACE], [_PLACE], donate=True),
    reshard([_PLACE], [_PLACE, _PLACE], donate=False),
    reshard([{"devices": {"device_ids": "ab"}}], [_PLACE], donate=False),
    reshard([{}], 7, donate=True),
    reshard([], ["x"], donate=True),
    b"{" * 5000,
    b"",
    b"{}",
    b'{"reshardRequest": [1]}',
    DigestRequest((0, 1), 1).text().encode(),
    DigestRequest((0, 99), 1).text().encode(),
    DigestRequest((0, 1), 1, (CopySpec(11, (4,), b""),)).text().encode(),
    DigestRequest((0, 1), 1, (CopySpec(17, (4,), b"x"),)).text().encode(),
    b'{"regrowDigestRequest": []}',
]

_REQUESTS = [field.name for field in proxy.IfrtRequest.DESCRIPTOR.oneofs_by_name["request"].fields]


def noise(rng: random.Random) -> Any:
    """A request of a random kind."""
    request = proxy.IfrtRequest()
    name = rng.choice(_REQUESTS)
    body = getattr(request, name)
    body.SetInParent()
    _fill(rng, body, 0)
    if name == "compile_request":
        _fill_compile(rng, body)
    if name == "make_error_arrays_request":
        body.error.message = OWN
    return request


def _fill_compile(rng: random.Random, body: Any) -> None:
    kind = rng.choice([XLA, XLA, XLA, "PluginProgram", "CustomCallProgram", ""])
    body.program.type_name = kind if kind in (XLA, "") else f"xla::ifrt::{kind}"
    body.program.data = rng.choice(PLUGINS if kind == "PluginProgram" else PROGRAMS)
    if kind == "CustomCallProgram":
        program = ifrt.CustomCallProgramProto(name="f", serialized_program_text=b"pickled")
        _fill(rng, program, 1)
        body.program.data = program.SerializeToString()
    body.compile_options.data = rng.choice(OPTIONS)


def _fill(rng: random.Random, message: Any, depth: int) -> None:
    name = message.DESCRIPTOR.full_name
    if name == "xla.ifrt.ShardingProto":
        if rng.random() < 0.97:
            message.ParseFromString(rng.choice(SHARDINGS).serialized)
        return
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.1 or (depth > 4 and field.message_type):
            continue
        if field.containing_oneof and len(field.containing_oneof.fields) > 1 and rng.random() < 0.5:
            continue
        _fill_field(rng, message, field, depth)


def _fill_field(rng: random.Random, message: Any, field: Any, depth: int) -> None:
    repeated = field.is_repeated if hasattr(field, "is_repeated") else field.label == 3
    if field.message_type and field.message_type.GetOptions().map_entry:
        return
    if not repeated:
        if field.message_type:
            getattr(message, field.name).SetInParent()
            _fill(rng, getattr(message, field.name), depth + 1)
        else:
            setattr(message, field.name, _scalar(rng, field))
        return
    values = getattr(message, field.name)
    for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 4])):
        if field.message_type:
            _fill(rng, values.add(), depth + 1)
        else:
            values.append(_scalar(rng, field))


def _scalar(rng: random.Random, field: Any) -> Any:
    if field.type == Field.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type in (Field.TYPE_STRING, Field.TYPE_BYTES):
        text = rng.choice(["", "device", "pinned_host", "x", "DATA_LOSS: slice 0"])
        return text if field.type == Field.TYPE_STRING else text.encode()
    if field.type in (Field.TYPE_DOUBLE, Field.TYPE_FLOAT):
        return rng.choice([0.0, -1.5, 1e30])
    if field.type == Field.TYPE_ENUM:
        if field.name == "kind":
            return rng.choice(KINDS)
        return rng.choice([value.number for value in field.enum_type.values])
    return _number(rng, field)


def _number(rng: random.Random, field: Any) -> int:
    name = field.name
    if "executable_handle" in name:
        return SERVER_HANDLES_FROM + rng.randrange(12)
    if "handle" in name:
        return rng.choice(
            [*range(1, 7), *range(1, 7), 0, 99, SERVER_HANDLES_FROM + rng.randrange(12)]
        )
    if name == "dims":
        return rng.choice(DIMS)
    if "device_id" in name:
        return rng.choice([0, 1, 2, 3, 0, 1, 2, 3, 4, -1])
    value = rng.choice(INTS)
    unsigned = field.type in (Field.TYPE_UINT32, Field.TYPE_UINT64, Field.TYPE_FIXED64)
    return abs(value) if unsigned else value


def put(op_id: int, handle: int, buffer: int, shape: tuple[int, ...], sharding: Sharding) -> Any:
    """A request to make an f32 array of a host buffer."""
    request = proxy.IfrtRequest()
    request.request_metadata.op_id = op_id
    body = request.make_array_from_host_buffer_request
    body.dtype.kind = 11
    body.shape.dims.extend(shape)
    body.sharding.ParseFromString(sharding.serialized)
    body.host_buffer_handle = buffer
    body.array_handle = handle
    return request


def compiling(program: bytes, options: bytes) -> Any:
    """A request to compile a program of XLA's."""
    request = proxy.IfrtRequest()
    body = request.compile_request
    body.program.type_name, body.program.data = XLA, program
    body.compile_options.data = options
    return request


def valid(rng: random.Random) -> Any:
    """A request that succeeds if the state allows it."""
    handles = [rng.randrange(1, 9) for _ in range(4)]
    if rng.random() < 0.3:
        return put(0, handles[0], rng.randrange(1, 5), *rng.choice(PUTS))
    request = proxy.IfrtRequest()
    _VALID[rng.randrange(len(_VALID))](rng, request, handles)
    return request


def _to_host(rng: random.Random, request: Any, handles: list[int]) -> None:
    body = request.copy_to_host_buffer_request
    body.array_handle, body.host_buffer_handle = handles[0], rng.randrange(1, 5)


def _ready(rng: random.Random, request: Any, handles: list[int]) -> None:
    request.check_value_ready_request.value_handles.extend(handles[:2])


def _copy(rng: random.Random, request: Any, handles: list[int]) -> None:
    body = request.copy_arrays_request
    body.array_handles.append(handles[0])
    body.result_handles.append(handles[1])
    body.device_ids.extend(rng.choice([(0,), (2,), (1, 3), (3, 2, 1, 0)]))
    body.copy_semantics = rng.randrange(4)


def _reshard(rng: random.Random, request: Any, handles: list[int]) -> None:
    body = request.reshard_arrays_request
    body.array_handles.append(handles[0])
    body.result_handles.append(handles[1])
    body.array_specs.add().sharding.ParseFromString(rng.choice(SHARDINGS).serialized)
    body.copy_semantics = rng.randrange(4)


def _compile(rng: random.Random, request: Any, handles: list[int]) -> None:
    request.CopyFrom(compiling(rng.choice(PROGRAMS), rng.choice(OPTIONS)))


def _execute(rng: random.Random, request: Any, handles: list[int]) -> None:
    body = request.loaded_executable_execute_request
    fits = rng.random() < 0.5  # The first program and the first array are both on device 0.
    body.loaded_executable_handle = SERVER_HANDLES_FROM + (0 if fits else 2 * rng.randrange(6))
    body.args_handles.append(1 if fits else handles[0])
    if rng.random() < 0.7:
        body.result_array_handle.append(handles[1])
    body.execute_options.fill_status = rng.random() < 0.7
    body.result_status_handle = rng.choice([handles[2], 7])


def _result(rng: random.Random, request: Any, handles: list[int]) -> None:
    body = request.loaded_executable_fetch_execute_result_request
    body.result_status_handle = rng.choice([handles[0], 7])


def _apart(rng: random.Random, request: Any, handles: list[int]) -> None:
    body = request.disassemble_into_single_device_arrays_request
    body.array_handle = handles[0]
    body.result_handles.extend(handles[1 : 1 + rng.choice([1, 2])])


def _together(rng: random.Random, request: Any, handles: list[int]) -> None:
    body = request.assemble_array_from_single_device_arrays_request
    count = rng.choice([1, 2])
    body.single_device_array_handles.extend(handles[:count])
    body.result_handle = handles[3]
    body.shape.dims.append(4)
    body.sharding.ParseFromString(SHARDINGS[0 if count == 1 else 9].serialized)


def _shard(rng: random.Random, request: Any, handles: list[int]) -> None:
    body = request.fully_replicated_shard_request
    body.array_handle, body.result_handle = handles[:2]


def _bitcast(rng: random.Random, request: Any, handles: list[int]) -> None:
    body = request.bitcast_arrays_request
    body.array_handles.append(handles[0])
    body.result_handles.append(handles[1])
    spec = body.array_specs.add()
    spec.dtype.kind = 11
    shape, sharding = rng.choice(PUTS)
    spec.shape.dims.extend(shape)
    spec.sharding.ParseFromString(sharding.serialized)


def _remap(rng: random.Random, request: Any, handles: list[int]) -> None:
    body = request.remap_arrays_request
    body.array_handles.extend(handles[:2])
    body.result_handles.append(handles[2])
    spec = body.plan.output_specs.add()
    spec.dtype.kind = 11
    spec.shape.dims.append(4)
    spec.sharding.ParseFromString(SHARDINGS[rng.choice([0, 9])].serialized)
    for number in range(2):
        mapping = body.plan.mappings.add(in_array=number)
        for field in ("from_start", "to_start"):
            getattr(mapping, field).append(number if field[0] == "t" else 0)
        for field in ("from_end", "to_end"):
            getattr(mapping, field).append(number + 1)
        mapping.from_step.append(1)
        mapping.to_step.append(1)


def _forget(rng: random.Random, request: Any, handles: list[int]) -> None:
    getattr(request, rng.choice(["delete", "destruct"]) + "_array_request").array_handle.append(
        handles[0]
    )


def _tell(rng: random.Random, request: Any, handles: list[int]) -> None:
    name = rng.choice(["metadata", "cost_analysis", "human_readable_program_text", "delete"])
    body = getattr(request, f"loaded_executable_{name}_request")
    body.loaded_executable_handle = SERVER_HANDLES_FROM + 2 * rng.randrange(6)


_VALID = (
    _to_host,
    _ready,
    _copy,
    _reshard,
    _compile,
    _execute,
    _execute,
    _result,
    _apart,
    _together,
    _shard,
    _bitcast,
    _remap,
    _forget,
    _tell,
)
