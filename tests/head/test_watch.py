"""Who waits for a phase of a client's work is woken when it begins, and costs nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from head_client import Client
from head_world import World, compiled, one, run, tiled
from session_noise import compile_options, compiling, reshard

from regrow.channel.digests import DigestRequest
from regrow.errors import UsageError
from regrow.wire.schema import proxy

SIZES = {"slices": 3, "devices": 2}


@contextlib.asynccontextmanager
async def watching(world: World, **phases: int) -> AsyncIterator[dict[str, asyncio.Task[None]]]:
    """Waits for these phases, each for a slice."""
    watch = world.runtime.observer.watch
    tasks = {name: asyncio.create_task(watch.phase(name, at)) for name, at in phases.items()}
    await asyncio.sleep(0)
    yield tasks
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert not watch.phases


async def begun(tasks: dict[str, asyncio.Task[None]]) -> set[str]:
    for _ in range(3):
        await asyncio.sleep(0)
    return {name for name, task in tasks.items() if task.done()}


def test_transfers_concern_the_slices_of_their_array() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        async with watching(world, transfer=1, step=0) as tasks:
            client.put(1, [0.0], one(0))
            assert await begun(tasks) == set()
            client.put(2, [0.0, 1.0], tiled([4, 2], (2,)))
            assert await begun(tasks) == {"transfer"}
        async with watching(world, transfer=0) as tasks:
            assert await client.get(1) == [0.0]
            assert await begun(tasks) == {"transfer"}

    run(main, **SIZES)


def test_programs_are_compiled_and_executed() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        world.compile = lambda command: compiled()
        async with watching(world, compile=0) as tasks:
            handles = []
            for devices in ([0, 1], [1, 2]):
                client.give(compiling(b"plain", compile_options([[one] for one in devices])))
                response = await client.answer()
                handles.append(response.compile_response.loaded_executable_handle)
            assert await begun(tasks) == {"compile"}
        client.put(1, [0.0, 1.0], tiled([0, 1], (2,)))
        client.put(2, [0.0, 1.0], tiled([1, 2], (2,)))
        async with watching(world, step=0, collective=0) as tasks:
            client.give(executing(handles[0], 1))
            assert await begun(tasks) == {"step"}
            client.give(executing(handles[1], 2))
            assert await begun(tasks) == {"step", "collective"}

    run(main, **SIZES)


def executing(handle: int, argument: int) -> Any:
    request = proxy.IfrtRequest()
    body = request.loaded_executable_execute_request
    body.loaded_executable_handle = handle
    body.args_handles.append(argument)
    body.result_array_handle.append(9)
    return request


def test_arrays_that_change_slices_are_resharded() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        client.put(1, [0.0, 1.0], tiled([0, 1], (2,)))

        def copy(*devices: int) -> None:
            client.send(
                "copy_arrays_request", array_handles=[1], result_handles=[3], device_ids=devices
            )

        async with watching(world, reshard=1) as tasks:
            copy(1, 0)
            assert await begun(tasks) == set()
            copy(2, 3)
            assert await begun(tasks) == {"reshard"}
        async with watching(world, reshard=0) as tasks:
            client.send(
                "reshard_arrays_request",
                array_handles=[1],
                result_handles=[4],
                array_specs=[((2,), tiled([4, 5], (2,)))],
            )
            assert await begun(tasks) == {"reshard"}
        places = [{"devices": {"device_ids": d}, "xla_hlo_sharding": ""} for d in ([0, 1], [4, 5])]
        request = compiling(reshard(places[:1], places[1:], donate=False), b"")
        request.compile_request.program.type_name = "xla::ifrt::PluginProgram"
        client.give(request)
        handle = (await client.answer()).compile_response.loaded_executable_handle
        async with watching(world, reshard=2) as tasks:
            client.give(executing(handle, 1))
            assert await begun(tasks) == {"reshard"}

    run(main, **SIZES)


def test_hashing_for_a_snapshot_begins_nothing() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        client.put(1, [0.0, 1.0], tiled([0, 1], (2,)))
        request = compiling(DigestRequest((0, 1), 1).text().encode(), b"")
        request.compile_request.program.type_name = "xla::ifrt::PluginProgram"
        client.give(request)
        handle = (await client.answer()).compile_response.loaded_executable_handle
        async with watching(world, load=0, step=0, reshard=0) as tasks:
            client.give(executing(handle, 1))
            assert not (await client.answer()).response_metadata.status.code
            assert await begun(tasks) == set()

    run(main, **SIZES)


def test_what_a_client_says_concerns_all_slices() -> None:
    async def main(world: World) -> None:
        async with watching(world, load=2, snapshot=1) as tasks:
            watch = world.runtime.observer.watch
            steps = {
                "7": asyncio.create_task(watch.step(7)),
                "8": asyncio.create_task(watch.step(8)),
            }
            assert await begun(steps) == set()
            watch.told(6, "step")
            watch.told(None, "load")
            watch.told(None, "compile")
            assert await begun(tasks | steps) == {"load"}
            watch.told(7, "step")
            assert await begun(steps) == {"7"}
            watch.told(12, "step")
            assert await begun(steps) == {"7", "8"}

    run(main, **SIZES)


def test_a_request_about_nothing_is_refused_as_before() -> None:
    async def main(world: World) -> None:
        client = Client(world)
        requests: tuple[tuple[str, dict[str, Any]], ...] = (
            ("copy_to_host_buffer_request", {"array_handle": 77}),
            ("loaded_executable_execute_request", {"loaded_executable_handle": 77}),
            ("copy_arrays_request", {"array_handles": [77], "result_handles": [78]}),
        )
        refused = {}
        async with watching(world, transfer=0, step=0, reshard=0):
            for name, fields in requests:
                watched = await client.ask(name, **fields)
                refused[name] = watched.response_metadata.status
        for name, fields in requests:
            plain = await client.ask(name, **fields)
            assert refused[name] == plain.response_metadata.status

    run(main, **SIZES)


def test_what_is_no_phase() -> None:
    async def main(world: World) -> None:
        watch = world.runtime.observer.watch
        with pytest.raises(UsageError, match="there is no phase 'lunch'; there are collective, "):
            await watch.phase("lunch", 0)

    run(main)
