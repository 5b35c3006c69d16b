"""The requests about arrays, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from head_client import Client
from head_world import F32, World, one, replicated, run, tiled
from session_noise import put

from regrow.channel import commands as c
from regrow.errors import Code
from regrow.wire import shardings
from regrow.wire.schema import proxy
from regrow.wire.shardings import Sharding

DONATE = 3


def test_assemble_and_disassemble() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        client.put(1, [[1, 2]], one(3))
        client.put(2, [[3, 4]], one(0))
        await client.ask(
            "assemble_array_from_single_device_arrays_request",
            single_device_array_handles=[1, 2],
            result_handle=3,
            shape=(2, 2),
            sharding=tiled((3, 0), (2, 1)),
        )
        assert await client.shards(3) == [[[1, 2]], [[3, 4]]]
        client.session.closed()
        await world.check_nothing_left()

    run(main)


def test_shards_that_do_not_fit_are_refused() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        client.put(1, [[1, 2]], one(3))
        name = "assemble_array_from_single_device_arrays_request"
        two = {"result_handle": 3, "sharding": tiled((3, 0), (2, 1))}
        code, text = await client.refusal(
            name, single_device_array_handles=[1], shape=(2, 2), **two
        )
        assert code is Code.INVALID_ARGUMENT
        assert "1 shards do not make an array on 2 devices" in text
        code, text = await client.refusal(
            name, single_device_array_handles=[1, 1], shape=(4, 4), **two
        )
        assert code is Code.INVALID_ARGUMENT
        assert await client.get(3) == (code, text)
        name = "disassemble_into_single_device_arrays_request"
        code, text = await client.refusal(name, array_handle=1, result_handles=[4, 5])
        assert text == "2 handles for 1 shards"
        assert await client.get(5) == (code, text)
        client.session.closed()

    run(main)


def test_shards_on_living_slices_outlive_a_loss() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        client.put(1, [[1, 2], [3, 4]], tiled((0, 2), (2, 1)))
        client.put(2, [7, 8], replicated((2, 1)))
        await world.settle()
        lost = world.lose(1)
        data_loss = (Code.DATA_LOSS, lost.message)
        assert await client.refusal("check_value_ready_request", value_handles=[1]) == data_loss
        assert await client.shards(1) == [[[1, 2]], data_loss]
        await client.ask("fully_replicated_shard_request", array_handle=2, result_handle=3)
        assert await client.get(3) == [7, 8]
        world.up(1)
        assert await client.shards(1) == [[[1, 2]], data_loss]
        client.put(4, [[5, 6], [7, 8]], tiled((0, 2), (2, 1)))
        assert await client.shards(4) == [[[5, 6]], [[7, 8]]]
        client.session.closed()
        await world.check_nothing_left()

    run(main)


def test_copies_of_lost_and_living_arrays_in_one_request() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        client.put(1, [1, 2], one(0))
        client.put(2, [3, 4], one(2))
        await world.settle()
        lost = world.lose(1)
        response = await client.ask(
            "copy_arrays_request", array_handles=[1, 2], result_handles=[3, 4], device_ids=[1]
        )
        assert not response.response_metadata.status.code
        assert await client.get(3) == [1, 2]
        assert await client.get(4) == (Code.DATA_LOSS, lost.message)
        response = await client.ask(
            "copy_arrays_request", array_handles=[1], result_handles=[5], device_ids=[3]
        )
        assert await client.get(5) == (Code.DATA_LOSS, lost.message)
        client.session.closed()

    run(main)


@pytest.mark.parametrize("request_name", ["copy_arrays_request", "reshard_arrays_request"])
def test_donated_arrays_are_gone(request_name: str) -> None:
    async def main(world: World) -> None:
        client = Client(world)
        client.put(1, [1, 2], one(0))
        target: dict[str, Any] = {"array_specs": [((2,), one(2))]}
        if request_name == "copy_arrays_request":
            target = {"device_ids": [2]}
        await client.ask(
            request_name,
            array_handles=[1],
            result_handles=[2],
            copy_semantics=DONATE,
            **target,
        )
        assert await client.get(2) == [1, 2]
        assert (await client.get(1))[1] == "Array has been deleted."
        response = await client.ask("is_array_deleted_request", array_handle=1)
        assert response.is_array_deleted_response.deleted
        response = await client.ask("is_array_deleted_request", array_handle=2)
        assert not response.is_array_deleted_response.deleted

    run(main)


def test_copy_to_another_memory_and_back() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        client.put(1, [1, 2], one(1))
        await client.ask(
            "copy_arrays_request",
            array_handles=[1],
            result_handles=[2],
            memory_kind="pinned_host",
            copy_semantics=1,
        )
        assert client.session._tables.array(2).sharding == one(1, "pinned_host")
        await client.ask(
            "copy_arrays_request", array_handles=[2], result_handles=[3], memory_kind=""
        )
        assert client.session._tables.array(3).sharding == one(1)
        assert await client.get(3) == [1, 2]
        client.session.closed()

    run(main)


def remap_by_interval(mappings: Sequence[tuple[int, int, tuple[int, ...], tuple[int, ...]]]) -> Any:
    request = proxy.IfrtRequest()
    for source, target, origin, place in mappings:
        mapping = request.remap_arrays_request.plan.mappings.add(in_array=source, out_array=target)
        for prefix, numbers in (("from", origin), ("to", place)):
            for name, number in zip(("start", "end", "step"), numbers, strict=True):
                getattr(mapping, f"{prefix}_{name}").append(number)
    return request


def outputs(request: Any, *specs: tuple[tuple[int, ...], Sharding]) -> Any:
    for shape, sharding in specs:
        spec = request.remap_arrays_request.plan.output_specs.add()
        spec.dtype.kind = F32
        spec.shape.dims.extend(shape)
        spec.sharding.ParseFromString(sharding.serialized)
    return request


def test_remap_by_intervals() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        client.put(1, [1, 2, 3, 4], tiled((0, 1, 2, 3), (4,)))
        request = remap_by_interval([(0, 0, (0, 4, 2), (0, 2, 1)), (0, 1, (1, 4, 2), (0, 2, 1))])
        outputs(request, ((2,), tiled((0, 2), (2,))), ((2,), tiled((1, 3), (2,))))
        request.remap_arrays_request.array_handles.append(1)
        request.remap_arrays_request.result_handles.extend((2, 3))
        client.give(request)
        assert not (await client.answer()).response_metadata.status.code
        assert await client.shards(2) == [[1], [3]]
        assert await client.shards(3) == [[2], [4]]

    run(main)


def test_remap_by_devices() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        client.put(1, [1, 2], tiled((0, 2), (2,)))
        client.put(2, [3, 4], tiled((1, 3), (2,)))
        request = proxy.IfrtRequest()
        body = request.remap_arrays_request
        entry = body.plan.input_devices_for_output.add(out_array=0)
        for number, devices in ((0, (2, 0)), (1, (3,))):
            given = entry.input_devices.add(in_array=number)
            given.device_list.device_ids.extend(devices)
        outputs(request, ((3,), tiled((0, 3, 2), (3,))))
        body.array_handles.extend((1, 2))
        body.result_handles.append(3)
        client.give(request)
        assert not (await client.answer()).response_metadata.status.code
        assert await client.shards(3) == [[1], [4], [2]]

    run(main)


@pytest.mark.parametrize(
    "mapping",
    [
        (0, 0, (0, 1, 1), (0, 1, 1)),
        (0, 0, (0, 9, 1), (0, 9, 1)),
        (0, 0, (5, 6, 1), (0, 1, 1)),
        (0, 7, (0, 2, 1), (0, 2, 1)),
        (7, 0, (0, 2, 1), (0, 2, 1)),
        (0, 0, (0, 1 << 62, 0), (0, 1, 1)),
        (0, 0, (0, 1 << 62, 1), (0, 1 << 62, 1)),
        (0, 0, (0, -(1 << 62), -1), (0, -(1 << 62), -1)),
    ],
)
def test_remap_plans_that_do_not_fit(mapping: Any) -> None:
    async def main(world: World) -> None:
        client = Client(world)
        client.put(1, [1, 2], tiled((0, 2), (2,)))
        request = outputs(remap_by_interval([mapping]), ((2,), tiled((0, 2), (2,))))
        request.remap_arrays_request.array_handles.append(1)
        request.remap_arrays_request.result_handles.append(2)
        client.give(request)
        status = (await client.answer()).response_metadata.status
        assert status.code == Code.INVALID_ARGUMENT
        assert "remap plan" in status.message
        assert await client.get(2) == (Code.INVALID_ARGUMENT, status.message)

    run(main)


def test_bitcast() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        client.put(1, [1, 2, 3, 4], one(0))
        await client.ask(
            "bitcast_arrays_request",
            array_handles=[1],
            result_handles=[2],
            array_specs=[((2, 2), one(0))],
        )
        assert await client.get(2) == [[1, 2], [3, 4]]
        code, text = await client.refusal(
            "bitcast_arrays_request",
            array_handles=[1],
            result_handles=[3],
            array_specs=[((2, 3), one(0))],
        )
        assert code is Code.INVALID_ARGUMENT
        assert await client.get(3) == (code, text)

    run(main)


def test_error_arrays() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        request = proxy.IfrtRequest()
        request.make_error_arrays_request.array_handles.extend((1, 2))
        request.make_error_arrays_request.error.code = int(Code.ABORTED)
        request.make_error_arrays_request.error.message = "the client's own"
        client.give(request)
        for handle in (1, 2):
            assert await client.get(handle) == (Code.ABORTED, "the client's own")
        request.make_error_arrays_request.error.code = 4711
        client.give(request)
        assert await client.get(1) == (Code.UNKNOWN, "the client's own")

    run(main)


def many(client: Client, specs: Sequence[tuple[Any, Sharding, Sequence[tuple[Any, Any]]]]) -> Any:
    """A request for arrays whose shards come as host buffers."""
    request = proxy.IfrtRequest()
    body = request.make_arrays_from_host_buffer_shards_request
    for shape, sharding, shards in specs:
        spec = body.specs.add()
        spec.array_spec.dtype.kind = F32
        spec.array_spec.shape.dims.extend(shape)
        spec.array_spec.sharding.ParseFromString(sharding.serialized)
        for places, value in shards:
            spec.addressable_shard_indices.add().indices.extend(places)
            told = spec.host_buffers.add()
            told.dtype.kind = F32
            handle = 800
            if value is not None:
                array = np.asarray(value, np.float32)
                handle = 801 + len(client.session._tables.host_buffers)
                client.session.store_begin(handle, array.nbytes)[:] = array.tobytes()
                client.session.store_end(handle)
                told.shape.dims.extend(array.shape)
            told.host_buffer_handle = handle
    return request


def test_arrays_of_host_buffers() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        request = many(
            client,
            [
                ((4,), tiled((0, 2), (2,)), [((0,), [1, 2]), ((1,), [3, 4])]),
                ((2,), replicated((0, 1, 3)), [((0, 1, 2), [5, 6])]),
            ],
        )
        request.make_arrays_from_host_buffer_shards_request.array_handles.extend((1, 2))
        client.give(request)
        assert not (await client.answer()).response_metadata.status.code
        assert await client.shards(1) == [[1, 2], [3, 4]]
        assert await client.shards(2) == [[5, 6]] * 3
        assert not client.session._tables.host_buffers

    run(main)


def test_host_buffers_for_a_lost_slice_are_not_kept() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        lost = world.lose(0)
        shards = [((0,), [1, 2]), ((1,), [3, 4])]
        request = many(client, [((4,), tiled((0, 2), (2,)), shards)])
        request.make_arrays_from_host_buffer_shards_request.array_handles.append(1)
        client.give(request)
        status = (await client.answer()).response_metadata.status
        assert (status.code, status.message) == (Code.DATA_LOSS, lost.message)
        assert not client.session._tables.host_buffers

    run(main)


@pytest.mark.parametrize(
    ("places", "text"),
    [
        ([(0,), (2,)], "shard 2 of an array of 2 shards"),
        ([(0,), (-1,)], "shard -1 of an array of 2 shards"),
        ([(0,), (0,)], "shard 1 of an array got no host buffer"),
    ],
)
def test_host_buffers_for_no_shard(places: Any, text: str) -> None:
    async def main(world: World) -> None:
        client = Client(world)
        shards = [(place, [1, 2]) for place in places]
        request = many(client, [((4,), tiled((0, 2), (2,)), shards)])
        request.make_arrays_from_host_buffer_shards_request.array_handles.append(1)
        client.give(request)
        status = (await client.answer()).response_metadata.status
        assert status.code == Code.INVALID_ARGUMENT
        assert text in status.message
        client.session.closed()
        await world.check_nothing_left()

    run(main)


def test_one_host_buffer_for_two_shards_by_mistake() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        request = many(client, [((4,), tiled((0, 2), (2,)), [((0,), [1, 2]), ((1,), [1, 2])])])
        body = request.make_arrays_from_host_buffer_shards_request
        body.array_handles.append(1)
        body.specs[0].host_buffers[1].host_buffer_handle = (
            body.specs[0].host_buffers[0].host_buffer_handle
        )
        client.give(request)
        status = (await client.answer()).response_metadata.status
        assert status.code == Code.INVALID_ARGUMENT
        assert "is used twice" in status.message

    run(main)


def test_default_layouts() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        for kind, dims, text in (
            (F32, (2, 3, 4), "{2,1,0}"),
            (21, (2,), "{0:E(4)}"),
            (F32, (), "{}"),
        ):
            request = proxy.IfrtRequest()
            request.get_default_layout_request.dtype.kind = kind
            request.get_default_layout_request.dims.extend(dims)
            client.give(request)
            told = (await client.answer()).get_default_layout_response.serialized_pjrt_layout
            assert told.decode() == text

    run(main)


def test_handles_that_the_server_makes() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        seen = set()
        for _ in range(3):
            client.session.store_begin(500, 8)
            client.session.store_end(500)
            client.give(put(0, 0, 500, (2,), one(0)))
            answer = await client.answer()
            seen.add(answer.make_array_from_host_buffer_response.array_handle)
        assert len(seen) == 3
        assert min(seen) >= 1 << 63

    run(main)


def test_tokens_and_empty_arrays_need_no_buffer() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        client.give(put(0, 1, 999, (0, 4), tiled((0, 1), (1, 2))))
        request = put(0, 2, 998, (), one(2))
        request.make_array_from_host_buffer_request.dtype.kind = 17
        client.give(request)
        assert not (
            await client.ask("check_value_ready_request", value_handles=[1, 2])
        ).response_metadata.status.code
        puts = world.sent(0, c.Put)
        assert [[shard[2] for shard in sent.shards] for sent in puts] == [[(0, 2), (0, 2)]]

    run(main)


def test_deleting_and_forgetting_what_is_not_there() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        for name in ("delete_array_request", "destruct_array_request"):
            response = await client.ask(name, array_handle=[1, 2, 99])
            assert not response.response_metadata.status.code
        code, text = await client.refusal("is_array_deleted_request", array_handle=1)
        assert code is Code.INVALID_ARGUMENT
        assert "array handle 1 is not known" in text

    run(main)


def test_an_array_of_many_shards_is_not_copied_as_one() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        client.put(1, [1, 2], tiled((0, 1), (2,)))
        code, text = await client.refusal(
            "copy_to_host_buffer_request", array_handle=1, host_buffer_handle=5
        )
        assert code is Code.UNIMPLEMENTED
        assert "2 shards" in text
        client.put(2, [1, 2], replicated((0, 1)))
        assert await client.get(2) == [1, 2]

    run(main)


def test_an_opaque_sharding_can_be_copied_shard_by_shard() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        opaque = shardings.even((0, 2), None, (4,), (2,), False)
        client.put(1, [1, 2], one(0))
        client.put(2, [3, 4], one(2))
        await client.ask(
            "assemble_array_from_single_device_arrays_request",
            single_device_array_handles=[1, 2],
            result_handle=3,
            shape=(4,),
            sharding=opaque,
        )
        await client.ask(
            "copy_arrays_request", array_handles=[3], result_handles=[4], device_ids=[3, 1]
        )
        assert await client.shards(4) == [[1, 2], [3, 4]]

    run(main)
