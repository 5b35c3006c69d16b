"""The requests of a client that are about programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

from google.protobuf.message import DecodeError

from regrow.channel.digests import is_request
from regrow.channel.rgcb import callbacks_of, partitioning_of
from regrow.errors import Code, StatusError
from regrow.head.buffers import Array, Piece
from regrow.head.callbacks import CallbackUse
from regrow.head.colocated import Colocated
from regrow.head.compile import Compiled
from regrow.head.digests import Digests
from regrow.head.executables import Executable, memory_stats
from regrow.head.links import malformed, pairs, unknown
from regrow.head.persistence import Persistence, is_persistence
from regrow.head.profile import MARK, Profile
from regrow.head.reshard import Reshard
from regrow.head.runtime import Runtime
from regrow.head.tables import Later, Tables
from regrow.wire import shardings
from regrow.wire.dtypes import PRED
from regrow.wire.schema import ifrt, proxy

_XLA: Final = "xla::ifrt::XlaProgram"
_PLUGIN: Final = "xla::ifrt::PluginProgram"
_CUSTOM_CALL: Final = "xla::ifrt::CustomCallProgram"
_NO_PROGRAM: Final = StatusError(Code.UNIMPLEMENTED, "not an XLA program")


@final
class ProgramRequests:
    """Handlers named as the requests; each returns a response or a `Later`."""

    def __init__(self, tables: Tables, runtime: Runtime) -> None:
        self._tables = tables
        self._runtime = runtime

    # --- compiling ---

    def compile_request(self, body: Any) -> Any:
        """A program is compiled; slices that are not there do not matter for that."""
        kind = body.program.type_name
        if kind == _PLUGIN:
            return self._compile_plugin(body)
        if kind == _CUSTOM_CALL:
            return self._compile_colocated(body)
        if kind != _XLA:
            what = f"a program of type {kind}"
            raise StatusError(Code.UNIMPLEMENTED, f"{what} is not supported by this server")
        return self._compile_xla(body)

    def _compile_xla(self, body: Any) -> Later:
        program = bytes(body.program.data)
        replicas, devices, options = _compile_options(body.compile_options.data)
        placement = self._runtime.buffers.placement(devices)
        callbacks, partitioning = callbacks_of(program), partitioning_of(program)
        used = (callbacks, partitioning)
        if any(one is not None and one.nonce != self._tables.nonce for one in used):
            raise StatusError.user(
                Code.FAILED_PRECONDITION, "the program has host callbacks of another session"
            )
        count = callbacks.number if callbacks is not None else 0
        later = Later()

        def compiled(error: StatusError | None, value: Compiled | None) -> None:
            if error is not None or value is None or self._tables.closed:
                later.settle(error, None)
                return
            try:
                executable = Executable(
                    self._runtime.buffers.number(),
                    value,
                    options,
                    placement,
                    replicas,
                    program if count else b"",
                    None if callbacks is None else CallbackUse(self._runtime.callbacks, callbacks),
                )
            except StatusError as refused:
                later.settle(refused, None)
                return
            self._runtime.dispatcher.preload(executable)
            later.settle(None, self._compiled(executable, devices, value["fingerprint"]))

        self._runtime.compiler.compile(
            program, options, placement.spans, count, compiled, partitioning is None
        )
        return later

    def _compile_plugin(self, body: Any) -> Any:
        if MARK in body.program.data:
            return self._compile_profile(body)
        if is_persistence(body.program.data):
            return self._compile_persistence(body)
        if is_request(body.program.data):
            digests = Digests(bytes(body.program.data), self._runtime.buffers)
            return self._compiled(digests, digests.devices, None)
        reshard = Reshard(bytes(body.program.data))
        return self._compiled(reshard, reshard.devices, None)

    def _compile_profile(self, body: Any) -> Any:
        if not self._runtime.config.allow_colocated_python:
            raise StatusError(
                Code.UNIMPLEMENTED,
                "traces are written by the hosts, and the owner of this cluster lets clients do "
                "nothing of their own there",
            )
        links = self._runtime.buffers.links
        profile = Profile(bytes(body.program.data), links)
        device = self._runtime.topology.devices_of_host(min(links, default=0))[0]
        return self._compiled(profile, (device,), None)

    def _compile_persistence(self, body: Any) -> Any:
        if not self._runtime.config.allow_colocated_python:
            raise StatusError(
                Code.UNIMPLEMENTED,
                "checkpoints are written by the hosts, and the owner of this cluster lets clients do "
                "nothing of their own there",
            )
        runtime = self._runtime
        program = Persistence(bytes(body.program.data), runtime.buffers)
        return self._compiled(program, program.devices, None)

    def _compile_colocated(self, body: Any) -> Any:
        if not self._runtime.config.allow_colocated_python:
            raise StatusError(
                Code.UNIMPLEMENTED,
                "the owner of this cluster has switched colocated Python off",
            )
        program = Colocated(bytes(body.program.data), self._runtime.buffers)
        self._tables.stateful.add(program.name)
        return self._compiled(program, program.placement.devices, None)

    def _compiled(self, program: Any, devices: Sequence[int], fingerprint: bytes | None) -> Any:
        handle = self._tables.handle()
        self._tables.programs[handle] = program
        response = proxy.IfrtResponse()
        made = response.compile_response
        made.loaded_executable_handle = handle
        made.name = program.name
        made.num_devices = len(devices)
        made.device_ids.extend(devices)
        made.addressable_device_ids.extend(devices)
        if fingerprint:
            made.fingerprint_value = fingerprint
        made.ready_future_handle = self._tables.handle()
        return response

    def _program(self, handle: int) -> Any:
        program = self._tables.programs.get(handle)
        if program is None:
            raise unknown(f"program handle {handle}")
        return program

    def _executable(self, handle: int) -> Executable:
        program = self._program(handle)
        if not isinstance(program, Executable):
            raise _NO_PROGRAM
        return program

    # --- what is known of a program ---

    def loaded_executable_metadata_request(self, body: Any) -> Any:
        """Shardings, layouts, memory kinds, donations and sizes."""
        program = self._program(body.loaded_executable_handle)
        response = proxy.IfrtResponse()
        meta = response.loaded_executable_metadata_response
        if isinstance(program, Executable):
            _describe(program.compiled, meta)
            return response
        for field in (
            meta.parameter_layouts_error,
            meta.output_layouts_error,
            meta.output_memory_kinds.status,
            meta.compiled_memory_stats_error,
        ):
            field.code = int(Code.UNIMPLEMENTED)
            field.message = _NO_PROGRAM.message
        donated = meta.donated_input_indices
        donated.SetInParent()
        if isinstance(program, Reshard) and program.donate:
            donated.donated_input_indices.extend(range(len(program.targets)))
        return response

    def loaded_executable_cost_analysis_request(self, body: Any) -> Any:
        """XLA's cost analysis."""
        response = proxy.IfrtResponse()
        attributes = response.loaded_executable_cost_analysis_response.attributes

        def write(value: Any) -> Any:
            attributes.SetInParent()
            for name, number in value.items():
                attributes.attributes[name].float_value = number
            return response

        return self._asked(body, "cost", write)

    def loaded_executable_human_readable_program_text_request(self, body: Any) -> Any:
        """The optimised HLO."""
        response = proxy.IfrtResponse()

        def write(value: Any) -> Any:
            text = response.loaded_executable_human_readable_program_text_response
            text.human_readable_program_text = value
            return response

        return self._asked(body, "text", write)

    def _asked(self, body: Any, what: str, write: Any) -> Later:
        executable = self._executable(body.loaded_executable_handle)
        later = Later()

        def done(error: StatusError | None, value: Any) -> None:
            later.settle(error, None if error is not None else write(value))

        self._runtime.compiler.describe(
            what, executable.compiled, executable.options, len(executable.placement.devices), done
        )
        return later

    # --- running ---

    def loaded_executable_execute_request(self, body: Any) -> Any:
        """An execution is started; what it lacks shows when its results are waited for.

        The first execution of a program is waited for by the client's dispatching thread, which must
        not see the loss of a slice there: so errors go into the results, and the answer is OK.
        """
        program = self._program(body.loaded_executable_handle)
        if isinstance(program, Reshard):
            return self._run_reshard(program, body)
        if isinstance(program, Profile):
            return self._run_profile(program, body)
        if isinstance(program, Persistence):
            arrays = [self._tables.array(handle) for handle in body.args_handles]
            found, done = program.run(arrays)
            return self._executed(body, program.outputs, found, done)
        status: list[Piece] | StatusError
        try:
            outs, status = self._run(program, body)
        except StatusError as error:
            status = error.fresh()
            outs = [status] * len(program.outputs)
        return self._executed(body, program.outputs, outs, status)

    def _run(self, program: Any, body: Any) -> tuple[list[Any], list[Piece]]:
        tables = self._tables
        arrays = [tables.array(handle) for handle in body.args_handles]
        if isinstance(program, Digests):
            made = program.run(arrays)
            if program.copies and self._runtime.spare_snapshots is not None:
                self._runtime.spare_snapshots.keep(*made)
            return made, []
        args = [array.whole() for array in arrays]
        wants_status = body.execute_options.fill_status
        if isinstance(program, Colocated):
            outs, status = program.execute(args, wants_status)
        else:
            outs, status = self._runtime.dispatcher.execute(program, args, wants_status)
        kept = body.execute_options.non_donatable_input_indices
        for index in program.donated:
            if index not in kept and index < len(arrays):
                arrays[index].delete()
        made = [
            Array(kind, shape, sharding, whole=out)
            for out, (kind, shape, sharding) in zip(outs, program.outputs, strict=True)
        ]
        pieces = (
            [] if status is None else [(status, s) for s in range(len(status.placement.devices))]
        )
        return made, pieces

    def _executed(
        self, body: Any, outputs: Any, outs: list[Any], status: list[Piece] | StatusError | Later
    ) -> Any:
        response = proxy.IfrtResponse()
        done = response.loaded_executable_execute_response
        done.SetInParent()
        tables = self._tables
        if body.execute_options.fill_status:
            done.status_handle = body.result_status_handle or tables.handle()
            tables.statuses[done.status_handle] = status
        if body.result_array_handle:
            for handle, out in pairs(body.result_array_handle, outs, "handles and results"):
                tables.arrays[handle] = out
            return response
        for out, (kind, shape, sharding) in zip(outs, outputs, strict=True):
            handle = tables.handle()
            tables.arrays[handle] = out
            told = done.outputs.add()
            told.dtype.kind = kind
            told.shape.dims.extend(shape)
            told.sharding.ParseFromString(sharding.serialized)
            told.array_handle = handle
        return response

    def _run_reshard(self, program: Reshard, body: Any) -> Any:
        outs: list[Any] = []
        outputs = []
        for handle, target in pairs(body.args_handles, program.targets, "arguments and targets"):
            array = self._tables.array(handle)
            outputs.append((array.kind, array.shape, target))
            try:
                outs.append(self._runtime.moves.move(array, target))
            except StatusError as error:
                outs.append(error.fresh())
            if program.donate:
                array.delete()
        status: Any = next((out for out in outs if isinstance(out, StatusError)), [])
        return self._executed(body, outputs, outs, status)

    def _run_profile(self, program: Profile, body: Any) -> Any:
        done = program.toggle()
        if not program.with_output:
            return self._executed(body, [], [], done)
        # pathwaysutils wants one array, and does not look at it.
        host = min(self._runtime.buffers.links, default=0)
        device = self._runtime.topology.devices_of_host(host)[0]
        sharding = shardings.single_device(device, None)
        output = (PRED, (1,), sharding)
        out: Array | StatusError
        try:
            buffer = self._runtime.transfers.put(b"\0", *output[:2], None, sharding)
            out = Array(*output, whole=buffer)
        except StatusError as error:
            out = error.fresh()
        return self._executed(body, [output], [out], done)

    def loaded_executable_fetch_execute_result_request(self, body: Any) -> Any:
        """Waits for the end of an execution."""
        status = self._tables.statuses.pop(body.result_status_handle, None)
        if status is None:
            raise unknown(f"status handle {body.result_status_handle}")
        if isinstance(status, StatusError):
            raise status
        later = Later()

        def done(error: StatusError | None, _: Any) -> None:
            response = proxy.IfrtResponse()
            response.loaded_executable_fetch_execute_result_response.SetInParent()
            later.settle(error, response)

        if isinstance(status, Later):
            status.subscribe(done)
        else:
            self._runtime.transfers.ready(status, done)
        return later

    # --- the end ---

    def loaded_executable_delete_request(self, body: Any) -> Any:
        """A program is deleted; its handle stays until it is destructed."""
        self._program(body.loaded_executable_handle).unload()
        response = proxy.IfrtResponse()
        response.loaded_executable_delete_response.future_handle = self._tables.handle()
        return response

    def loaded_executable_is_deleted_request(self, body: Any) -> Any:
        """Whether a program was deleted."""
        response = proxy.IfrtResponse()
        deleted = body.loaded_executable_handle not in self._tables.programs
        response.loaded_executable_is_deleted_response.is_deleted = deleted
        return response

    def loaded_executable_destruct_request(self, body: Any) -> Any:
        """The client forgets a program."""
        program = self._tables.programs.pop(body.loaded_executable_handle, None)
        if program is not None:
            program.unload()
        response = proxy.IfrtResponse()
        response.loaded_executable_destruct_response.SetInParent()
        return response

    def get_default_device_assignment_request(self, body: Any) -> Any:
        """Devices in their order: replicas of consecutive partitions."""
        response = proxy.IfrtResponse()
        assignment = response.get_default_device_assignment_response.device_assignment
        replicas, partitions = body.num_replicas, body.num_partitions
        devices = self._runtime.topology.devices
        if min(replicas, partitions) < 1 or replicas * partitions > devices:
            raise StatusError.user(
                Code.INVALID_ARGUMENT,
                f"{replicas} replicas of {partitions} partitions do not fit on the {devices} "
                "devices of the cluster",
            )
        assignment.replica_count, assignment.computation_count = replicas, partitions
        for partition in range(partitions):
            ids = [replica * partitions + partition for replica in range(replicas)]
            assignment.computation_devices.add().replica_device_ids.extend(ids)
        return response


def _compile_options(data: bytes) -> tuple[int, tuple[int, ...], bytes]:
    """Replicas, devices in the order of the assignment, and the options without the assignment."""
    try:
        wrapped = ifrt.XlaCompileOptionsProto.FromString(data)
    except DecodeError:
        raise StatusError(Code.INVALID_ARGUMENT, "compile options that are none") from None
    options = wrapped.compile_options
    build = options.executable_build_options
    assignment = build.device_assignment
    rows = [computation.replica_device_ids for computation in assignment.computation_devices]
    lengths = {len(row) for row in rows}
    if lengths != {assignment.replica_count} or 0 in lengths:
        raise malformed("a program without a whole device assignment")
    devices = tuple(device for column in zip(*rows, strict=True) for device in column)
    build.ClearField("device_assignment")
    # Newer clients ask for shardings that older ones, also of this server, cannot read.
    build.debug_options.xla_enable_hlo_sharding_v3 = False
    return int(build.num_replicas) or 1, devices, options.SerializeToString(deterministic=True)


def _describe(compiled: Compiled, meta: Any) -> None:
    for given, field in (
        (compiled["parameter_shardings"], meta.parameter_shardings),
        (compiled["output_shardings"], meta.output_shardings),
    ):
        if given is not None:
            field.SetInParent()
            for sharding in given:
                field.shardings.add().ParseFromString(sharding)
    for given, field, error in (
        (compiled["parameter_layouts"], meta.parameter_layouts_list, "parameter_layouts_error"),
        (compiled["output_layouts"], meta.output_layouts_list, "output_layouts_error"),
    ):
        if given is None:
            getattr(meta, error).code = int(Code.UNIMPLEMENTED)
            getattr(meta, error).message = "this program has no layouts"
            continue
        field.SetInParent()
        for minor_to_major in given:
            field.layouts.add().minor_to_major.extend(minor_to_major)
    kinds = meta.output_memory_kinds
    kinds.SetInParent()
    for group in compiled["memory_kinds"]:
        kinds.memory_kind_lists.add().memory_kinds.extend(group)
    meta.donated_input_indices.SetInParent()
    meta.donated_input_indices.donated_input_indices.extend(compiled["donated"])
    memory_stats(compiled, meta.compiled_memory_stats)
    meta.size_of_generated_code_in_bytes = compiled["code_bytes"]
