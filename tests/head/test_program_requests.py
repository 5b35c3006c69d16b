"""The requests about programs, one by one."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from head_client import Client
from head_world import F32, World, compiled, one, replicated, run, tiled
from session_noise import compile_options, compiling, reshard

from regrow.channel import commands as c
from regrow.channel import rgcb
from regrow.channel.digests import HASH_BYTES, CopySpec, DigestRequest
from regrow.errors import Code, StatusError
from regrow.wire import schema
from regrow.wire.schema import ifrt, proxy

OP = schema.xla.OpSharding
SPLIT = OP(type=3, tile_assignment_dimensions=[2], tile_assignment_devices=[0, 1])


async def compile_now(
    client: Client, rows: list[list[int]], program: bytes = b"plain", **facts: Any
) -> int:
    """The handle of a program on these devices."""
    client.world.compile = lambda command: compiled(**facts)
    client.give(compiling(program, compile_options(rows)))
    response = await client.answer()
    assert not response.response_metadata.status.code, response
    return int(response.compile_response.loaded_executable_handle)


def executing(
    handle: int, args: list[int], results: list[int], status: int = 0, **more: Any
) -> Any:
    request = proxy.IfrtRequest()
    body = request.loaded_executable_execute_request
    body.loaded_executable_handle = handle
    body.args_handles.extend(args)
    body.result_array_handle.extend(results)
    body.execute_options.fill_status = bool(status)
    body.result_status_handle = status
    body.execute_options.non_donatable_input_indices.extend(more.get("kept", ()))
    return request


async def fetch(client: Client, status: int) -> tuple[Code, str]:
    name = "loaded_executable_fetch_execute_result_request"
    return await client.refusal(name, result_status_handle=status)


# --- compiling ------------------------------------------------------------------------------------


def test_a_compiled_program() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        seen = []
        world.compile = lambda command: seen.append(command) or compiled()
        client.give(compiling(b"program", compile_options([[2], [0]])))
        response = (await client.answer()).compile_response
        assert (response.name, response.num_devices) == ("jit_f", 2)
        assert list(response.device_ids) == list(response.addressable_device_ids) == [2, 0]
        assert response.fingerprint_value == b"f"
        assert response.ready_future_handle != response.loaded_executable_handle
        # The compiler hears nothing of devices: the same program on others is the same to it.
        (command,) = seen
        told = schema.xla.CompileOptionsProto.FromString(command.options)
        build = told.executable_build_options
        assert not build.HasField("device_assignment")
        assert (build.num_replicas, build.num_partitions) == (1, 2)
        assert not build.debug_options.xla_enable_hlo_sharding_v3
        assert command.spans
        client.give(compiling(b"program", compile_options([[1], [3]])))
        await client.answer()
        assert len(seen) == 1
        # Loaded ahead of the first execution.
        assert [load.devices for load in world.sent(1, c.Load)] == [(2, 0), (1, 3)]

    run(main)


def test_devices_in_the_order_of_the_assignment() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        client.give(compiling(b"program", compile_options([[0, 2], [1, 3]])))
        response = (await client.answer()).compile_response
        # Replicas of consecutive partitions.
        assert list(response.device_ids) == [0, 1, 2, 3]
        assert [load.replicas for load in world.sent(0, c.Load)] == [2]

    run(main)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (b"", "whole device assignment"),
        (b"junk", "compile options that are none"),
        (compile_options([[0]], (1 << 31) - 1), "whole device assignment"),
        (compile_options([[0, 1], [2]]), "whole device assignment"),
        (compile_options([[], []]), "whole device assignment"),
        (compile_options([[0], [4]]), "there is no device 4; the cluster has 4"),
        (compile_options([[-1]]), "there is no device -1"),
    ],
)
def test_options_that_are_none(options: bytes, text: str) -> None:
    async def main(world: World) -> None:
        client = Client(world)
        client.give(compiling(b"program", options))
        status = (await client.answer()).response_metadata.status
        assert status.code == Code.INVALID_ARGUMENT
        assert text in status.message
        assert not world.compiler.channel.of(c.Compile)

    run(main)


def test_the_compilers_refusal_is_the_answer() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        world.compile = lambda command: StatusError(Code.INVALID_ARGUMENT, "no such op")
        client.give(compiling(b"program", compile_options([[0]])))
        status = (await client.answer()).response_metadata.status
        assert (status.code, status.message) == (Code.INVALID_ARGUMENT, "no such op")

    run(main)


def test_results_in_a_form_that_is_not_supported() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        world.compile = lambda command: compiled(output_shardings=[b"\xff"])
        client.give(compiling(b"program", compile_options([[0], [1]])))
        status = (await client.answer()).response_metadata.status
        assert status.code == Code.INVALID_ARGUMENT
        assert not client.session._tables.programs

    run(main)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("xla::ifrt::PluginProgram", "plugin program"),
        ("xla::ifrt::HloProgram", "a program of type xla::ifrt::HloProgram"),
        ("", "a program of type"),
    ],
)
def test_programs_of_other_kinds(kind: str, text: str) -> None:
    async def main(world: World) -> None:
        client = Client(world)
        request = compiling(b"DATA_LOSS: {", compile_options([[0]]))
        request.compile_request.program.type_name = kind
        client.give(request)
        status = (await client.answer()).response_metadata.status
        assert status.code == Code.UNIMPLEMENTED
        assert text in status.message
        assert "DATA_LOSS" not in status.message

    run(main)


def test_host_callbacks_of_another_session() -> None:
    async def main(world: World) -> None:
        nonce = "0123456789abcdef"
        client = Client(world)
        program = rgcb.attribute(rgcb.ProgramCallbacks(nonce, 1, 2)).encode()
        client.give(compiling(program, compile_options([[0]])))
        status = (await client.answer()).response_metadata.status
        assert status.code == Code.FAILED_PRECONDITION
        assert "callbacks of another session" in status.message
        client.session.closed()
        client = Client(world, **{rgcb.NONCE_KEY: nonce.encode()})
        client.give(compiling(program, compile_options([[0]])))
        assert not (await client.answer()).response_metadata.status.code
        (command,) = world.compiler.channel.of(c.Compile)
        assert command.callbacks == 2
        (load,) = world.sent(0, c.Load)
        assert (load.program, load.blob) == (program, b"")
        client.session.closed()

    run(main)


def test_compiling_for_a_slice_that_is_not_there() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        lost = world.lose(1)
        handle = await compile_now(client, [[2]])
        client.give(executing(handle, [], [5]))
        assert not (await client.answer()).response_metadata.status.code
        assert await client.get(5) == (Code.DATA_LOSS, lost.message)
        world.up(1)
        client.put(1, [1, 2, 3, 4], one(2))
        client.give(executing(handle, [1], [6]))
        assert await client.get(6) == [0, 0, 0, 0]

    run(main)


# --- what is known --------------------------------------------------------------------------------


def test_metadata() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        handle = await compile_now(
            client,
            [[0], [1]],
            parameter_shardings=[SPLIT.SerializeToString()],
            output_shardings=[SPLIT.SerializeToString()],
            donated=[0],
            output_layouts=None,
        )
        name = "loaded_executable_metadata_request"
        response = await client.ask(name, loaded_executable_handle=handle)
        told = response.loaded_executable_metadata_response
        assert list(told.parameter_shardings.shardings) == [SPLIT]
        assert list(told.output_shardings.shardings) == [SPLIT]
        assert [list(layout.minor_to_major) for layout in told.parameter_layouts_list.layouts] == [
            [0]
        ]
        assert told.output_layouts_error.code == Code.UNIMPLEMENTED
        assert [
            list(kinds.memory_kinds) for kinds in told.output_memory_kinds.memory_kind_lists
        ] == [["device"]]
        assert list(told.donated_input_indices.donated_input_indices) == [0]
        assert told.compiled_memory_stats.output_size_in_bytes == 16
        assert told.size_of_generated_code_in_bytes == 10

    run(main)


def test_cost_and_text() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        handle = await compile_now(client, [[0]])
        world.compile = lambda c: {"flops": 3.5} if c.what == "cost" else "HloModule"
        name = "loaded_executable_cost_analysis_request"
        response = await client.ask(name, loaded_executable_handle=handle)
        attributes = response.loaded_executable_cost_analysis_response.attributes.attributes
        assert attributes["flops"].float_value == 3.5
        name = "loaded_executable_human_readable_program_text_request"
        response = await client.ask(name, loaded_executable_handle=handle)
        told = response.loaded_executable_human_readable_program_text_response
        assert told.human_readable_program_text == "HloModule"
        world.end_compiler()
        code, _ = await client.refusal(name, loaded_executable_handle=handle)
        assert code is Code.UNAVAILABLE

    run(main)


# --- running --------------------------------------------------------------------------------------


def test_an_execution() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        handle = await compile_now(client, [[0], [2]], output_shardings=[SPLIT.SerializeToString()])
        client.put(1, [1, 2, 3, 4], tiled((0, 2), (2,)))
        client.give(executing(handle, [1], [2], status=3))
        response = (await client.answer()).loaded_executable_execute_response
        assert response.status_handle == 3
        assert not response.outputs
        assert client.session._tables.array(2).sharding.devices == (0, 2)
        assert await fetch(client, 3) == (Code.OK, "")
        code, text = await fetch(client, 3)
        assert code is Code.INVALID_ARGUMENT
        assert "status handle 3 is not known" in text
        # A client that leaves the handles to the server is told of them, and of the results.
        client.give(executing(handle, [1], []))
        (out,) = (await client.answer()).loaded_executable_execute_response.outputs
        assert (out.dtype.kind, list(out.shape.dims)) == (F32, [4])
        assert out.array_handle in client.session._tables.arrays
        client.session.closed()
        await world.check_nothing_left()
        assert not any(host.loads for host in world.hosts.values())

    run(main)


def test_donated_arguments() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        handle = await compile_now(client, [[0]], donated=[0, 1, 7])
        for number in (1, 2):
            client.put(number, [1, 2, 3, 4], one(0))
        client.give(executing(handle, [1, 2], [3], kept=[1]))
        assert (await client.get(1))[1] == "Array has been deleted."
        assert await client.get(2) == [1, 2, 3, 4]
        client.give(executing(handle, [1, 2], [4], status=5))
        assert not (await client.answer()).response_metadata.status.code
        assert (await client.get(4))[1] == "Array has been deleted."
        assert (await fetch(client, 5))[1] == "Array has been deleted."

    run(main)


def test_what_an_execution_lacks_shows_in_its_results() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        outputs = [(F32, (4,)), (F32, (4,))]
        handle = await compile_now(client, [[2]], outputs=outputs)
        client.put(1, [1, 2, 3, 4], one(2))
        client.put(2, [1, 2, 3, 4], one(0))
        for args, text in (([9], "array handle 9 is not known"), ([2], "the program runs on [2]")):
            client.give(executing(handle, args, [3, 4], status=5))
            assert not (await client.answer()).response_metadata.status.code
            for result in (3, 4):
                code, message = await client.get(result)
                assert code is Code.INVALID_ARGUMENT
                assert text in message
            assert (await fetch(client, 5))[1] == message
        lost = world.lose(1)
        world.up(1)
        client.give(executing(handle, [1], [3, 4], status=5))
        assert not (await client.answer()).response_metadata.status.code
        assert await client.get(4) == (Code.DATA_LOSS, lost.message)
        assert await fetch(client, 5) == (Code.DATA_LOSS, lost.message)
        client.session.closed()
        await world.check_nothing_left()

    run(main)


def test_a_slice_that_is_lost_while_a_program_runs() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        handle = await compile_now(client, [[0], [2]])
        client.put(1, [1, 2, 3, 4], tiled((0, 2), (2,)))
        client.give(executing(handle, [1], [2], status=3))
        name = "loaded_executable_fetch_execute_result_request"
        client.send(name, result_status_handle=3)
        client.session._release()
        before = len(client.responses)
        lost = world.lose(1)
        (answer,) = client.responses[before:]
        assert answer.response_metadata.status.message == lost.message
        assert await client.refusal("check_value_ready_request", value_handles=[2]) == (
            Code.DATA_LOSS,
            lost.message,
        )
        client.session.closed()
        await world.check_nothing_left()

    run(main)


@pytest.mark.parametrize("results", [[2, 3], [2, 3, 4, 5]])
def test_handles_that_do_not_match_the_results(results: list[int]) -> None:
    async def main(world: World) -> None:
        client = Client(world)
        outputs = [(F32, (4,))] * 3
        handle = await compile_now(client, [[0]], outputs=outputs)
        client.put(1, [1, 2, 3, 4], one(0))
        client.give(executing(handle, [1], results, status=9))
        status = (await client.answer()).response_metadata.status
        assert status.code == Code.INVALID_ARGUMENT
        assert f"{len(results)} and 3 handles and results" in status.message
        assert await client.get(results[0]) == (Code.INVALID_ARGUMENT, status.message)
        client.session.closed()
        await world.check_nothing_left()

    run(main)


def test_unknown_programs() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        client.give(executing(77, [], [1], status=2))
        status = (await client.answer()).response_metadata.status
        assert status.code == Code.INVALID_ARGUMENT
        assert "program handle 77 is not known" in status.message
        assert (await client.get(1))[1] == status.message
        for name in ("metadata", "cost_analysis", "delete"):
            code, _ = await client.refusal(
                f"loaded_executable_{name}_request", loaded_executable_handle=77
            )
            assert code is Code.INVALID_ARGUMENT
        response = await client.ask(
            "loaded_executable_is_deleted_request", loaded_executable_handle=77
        )
        assert response.loaded_executable_is_deleted_response.is_deleted
        await client.ask("loaded_executable_destruct_request", loaded_executable_handle=77)

    run(main)


def test_the_end_of_a_program() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        handle = await compile_now(client, [[0]])
        assert world.hosts[0].loads
        await client.ask("loaded_executable_delete_request", loaded_executable_handle=handle)
        assert not world.hosts[0].loads
        await client.ask("loaded_executable_destruct_request", loaded_executable_handle=handle)
        response = await client.ask(
            "loaded_executable_is_deleted_request", loaded_executable_handle=handle
        )
        assert response.loaded_executable_is_deleted_response.is_deleted
        assert not client.session._tables.programs

    run(main)


# --- other programs -------------------------------------------------------------------------------


def place(devices: list[int], op: Any, memory_kind: str = "") -> dict[str, Any]:
    sharding = base64.b64encode(op.SerializeToString()).decode()
    return {
        "devices": {"device_ids": devices},
        "memory_kind": memory_kind,
        "xla_hlo_sharding": sharding,
    }


async def compile_reshard(client: Client, *, donate: bool) -> int:
    source = place([0, 1], SPLIT)
    data = reshard([source], [place([2, 3], SPLIT)], donate=donate)
    request = compiling(data, b"")
    request.compile_request.program.type_name = "xla::ifrt::PluginProgram"
    client.give(request)
    response = (await client.answer()).compile_response
    assert list(response.device_ids) == [0, 1]
    return int(response.loaded_executable_handle)


@pytest.mark.parametrize("donate", [False, True])
def test_the_reshard_program_of_pathwaysutils(donate: bool) -> None:
    async def main(world: World) -> None:
        client = Client(world)
        handle = await compile_reshard(client, donate=donate)
        name = "loaded_executable_metadata_request"
        told = await client.ask(name, loaded_executable_handle=handle)
        meta = told.loaded_executable_metadata_response
        assert list(meta.donated_input_indices.donated_input_indices) == [0] * donate
        assert meta.parameter_layouts_error.code == Code.UNIMPLEMENTED
        client.put(1, [1, 2, 3, 4], tiled((0, 1), (2,)))
        client.give(executing(handle, [1], [2], status=3))
        assert await client.shards(2) == [[1, 2], [3, 4]]
        assert await fetch(client, 3) == (Code.OK, "")
        assert client.session._tables.array(2).sharding.devices == (2, 3)
        assert client.session._tables.arrays[1].deleted is donate  # type: ignore[union-attr]
        code, _ = await client.refusal(
            "loaded_executable_cost_analysis_request", loaded_executable_handle=handle
        )
        assert code is Code.UNIMPLEMENTED
        client.session.closed()
        await world.check_nothing_left()

    run(main)


def test_what_a_reshard_lacks_shows_in_its_results() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        handle = await compile_reshard(client, donate=False)
        client.put(1, [1, 2, 3, 4], tiled((0, 1), (2,)))
        await world.settle()
        lost = world.lose(1)
        client.give(executing(handle, [1], [2], status=3))
        assert not (await client.answer()).response_metadata.status.code
        assert await client.get(2) == (Code.DATA_LOSS, lost.message)
        assert await fetch(client, 3) == (Code.DATA_LOSS, lost.message)
        world.lose(0)
        client.give(executing(handle, [1], [4]))
        assert not (await client.answer()).response_metadata.status.code
        assert (await client.get(4))[0] is Code.DATA_LOSS

    run(main)


def colocated(devices: list[int]) -> Any:
    program = ifrt.CustomCallProgramProto(name="f", serialized_program_text=b"pickled")
    program.devices.device_ids.extend(devices)
    spec = program.output_specs.add()
    spec.dtype.kind = F32
    spec.shape.dims.append(4)
    sharding = tiled(devices, (len(devices),)) if len(devices) > 1 else one(devices[0])
    spec.sharding.ParseFromString(sharding.serialized)
    request = compiling(program.SerializeToString(), b"")
    request.compile_request.program.type_name = "xla::ifrt::CustomCallProgram"
    return request


def test_colocated_python() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        client.give(colocated([0, 2]))
        response = (await client.answer()).compile_response
        assert list(response.device_ids) == [0, 2]
        client.put(1, [1, 2, 3, 4], tiled((0, 2), (2,)))
        client.give(executing(response.loaded_executable_handle, [1], [2], status=3))
        assert await fetch(client, 3) == (Code.OK, "")
        for host in (0, 1):
            (told,) = world.sent(host, c.SetColocated)
            assert told.text == b"pickled"
        client.session.closed()
        await world.check_nothing_left()

    run(main)


def test_colocated_python_that_is_switched_off() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        client.give(colocated([0]))
        status = (await client.answer()).response_metadata.status
        assert status.code == Code.UNIMPLEMENTED
        assert "switched colocated Python off" in status.message
        assert not world.sent(0, c.SetColocated)

    run(main, allow_colocated_python=False)


# --- devices --------------------------------------------------------------------------------------


def test_the_default_device_assignment() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        name = "get_default_device_assignment_request"
        response = await client.ask(name, num_replicas=2, num_partitions=2)
        told = response.get_default_device_assignment_response.device_assignment
        assert (told.replica_count, told.computation_count) == (2, 2)
        rows = [list(row.replica_device_ids) for row in told.computation_devices]
        assert rows == [[0, 2], [1, 3]]
        for replicas, partitions in ((5, 1), (0, 1), (1, 0), (2**31 - 1, 2**31 - 1)):
            code, text = await client.refusal(
                name, num_replicas=replicas, num_partitions=partitions
            )
            assert code is Code.INVALID_ARGUMENT
            assert "do not fit on the 4 devices" in text

    run(main)


# --- hashes ---------------------------------------------------------------------------------------


async def compile_digest(
    client: Client, devices: tuple[int, ...], arrays: int, *copies: CopySpec
) -> int:
    request = compiling(DigestRequest(devices, arrays, copies).text().encode(), b"")
    request.compile_request.program.type_name = "xla::ifrt::PluginProgram"
    client.give(request)
    response = (await client.answer()).compile_response
    assert tuple(response.device_ids) == devices
    return int(response.loaded_executable_handle)


FOURTHS = OP(type=3, tile_assignment_dimensions=[4], tile_assignment_devices=range(4))
FOUR = CopySpec(F32, (4,), FOURTHS.SerializeToString())


def test_each_host_hashes_its_own_shards() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        handle = await compile_digest(client, (2, 0, 1, 3), 2)
        for number in (1, 2):
            client.put(number, [1, 2, 3, 4], tiled((2, 0, 1, 3), (4,)))
        aids = [client.session._tables.array(number).whole().aid for number in (1, 2)]
        client.give(executing(handle, [1, 2], [5]))
        assert not (await client.answer()).response_metadata.status.code
        out = client.session._tables.array(5)
        assert out.shape == (4, 2, HASH_BYTES)
        sources = tuple((aid, place) for aid in aids for place in (0, 1))
        for host, devices in ((0, (0, 1)), (1, (2, 3))):
            (asked,) = world.sent(host, c.Digest)
            assert asked == c.Digest(out.whole().aid, sources, devices, (), "pinned_host")

    run(main)


def test_copies_are_made_with_the_hashes() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        handle = await compile_digest(client, (2, 0, 1, 3), 2, FOUR, FOUR)
        for number in (1, 2):
            client.put(number, [number, 2, 3, 4], tiled((2, 0, 1, 3), (4,)))
        client.give(executing(handle, [1, 2], [5, 6, 7]))
        assert not (await client.answer()).response_metadata.status.code
        assert await client.shards(7) == [[2], [2], [3], [4]]
        assert client.session._tables.array(6).sharding.memory_kind == "pinned_host"
        client.put(3, [1, 2, 3, 4], replicated((2, 0, 1, 3)))
        client.give(executing(handle, [1, 3], [8, 9, 10]))
        await client.answer()
        code, text = await client.get(10)
        assert code is Code.INVALID_ARGUMENT
        assert "an array of shape [4] is no copy of shape [4], or is cut otherwise" in text

    run(main)


def test_arrays_elsewhere_are_not_hashed_and_a_lost_slice_shows_in_the_result() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        handle = await compile_digest(client, (0, 2), 1)
        client.put(1, [1, 2], tiled((0, 1), (2,)))
        client.give(executing(handle, [1], [2]))
        assert not (await client.answer()).response_metadata.status.code
        code, text = await client.get(2)
        assert code is Code.INVALID_ARGUMENT
        assert "1 arrays on the devices [0, 2] are to be hashed, and others were given" in text
        client.put(3, [1, 2], tiled((0, 2), (2,)))
        await world.settle()
        lost = world.lose(1)
        client.give(executing(handle, [3], [4]))
        assert not (await client.answer()).response_metadata.status.code
        assert await client.get(4) == (Code.DATA_LOSS, lost.message)

    run(main)
