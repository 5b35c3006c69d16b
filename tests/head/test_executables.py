"""How an execution reaches the hosts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from head_world import F32, World, compiled, run, tiled

from regrow.channel import commands as c
from regrow.errors import Code, SliceLostError, StatusError
from regrow.head.executables import Executable, memory_stats
from regrow.wire import schema, shardings

OP = schema.xla.OpSharding


def make(world: World, devices: tuple[int, ...], program: bytes = b"", **facts: Any) -> Executable:
    buffers = world.runtime.buffers
    placement = buffers.placement(devices)
    return Executable(buffers.number(), compiled(**facts), b"options", placement, 1, program)


def put(world: World, devices: tuple[int, ...]) -> Any:
    sharding = (
        tiled(devices, (len(devices),))
        if len(devices) > 1
        else shardings.single_device(devices[0], None)
    )
    data = np.zeros(len(devices), np.float32).tobytes()
    return world.runtime.transfers.put(data, F32, (len(devices),), None, sharding)


def test_a_program_on_one_host() -> None:
    async def main(world: World) -> None:
        executable = make(world, (1,))
        arg = put(world, (1,))
        outs, status = world.runtime.dispatcher.execute(executable, [arg], False)
        assert status is None
        assert [out.placement.devices for out in outs] == [(1,)]
        await world.settle()
        outputs = ((F32, (4,)),)
        assert world.sent(0, c.Load) == [
            c.Load(executable.number, "jit_f", b"blob", b"", b"options", (1,), 1, outputs, 0)
        ]
        assert world.sent(0, c.Execute) == [
            c.Execute(1, executable.number, (arg.aid,), (outs[0].aid,), 0)
        ]
        assert not world.sent(1, c.Load, c.Execute)
        world.runtime.dispatcher.execute(executable, [arg], True)
        await world.settle()
        assert len(world.sent(0, c.Load)) == 1
        again = world.sent(0, c.Execute)[1]
        assert again.launch == 2
        assert again.status

    run(main)


def test_a_program_across_hosts_is_launched_in_one_order_on_all() -> None:
    async def main(world: World) -> None:
        one, other = make(world, (0, 2)), make(world, (2, 0))
        first, second = put(world, (0, 2)), put(world, (2, 0))
        for _ in range(3):
            world.runtime.dispatcher.execute(one, [first], False)
            world.runtime.dispatcher.execute(other, [second], True)
        await world.settle()
        here, there = (world.sent(host, c.Execute) for host in (0, 1))
        assert here == there
        assert [execute.launch for execute in here] == [1, 2, 3, 4, 5, 6]
        assert [load.epoch for load in world.sent(1, c.Load)] == [1, 1]

    run(main)


def test_it_is_loaded_again_for_another_epoch_and_on_a_reborn_host() -> None:
    async def main(world: World) -> None:
        executable = make(world, (0, 2))
        world.runtime.dispatcher.execute(executable, [put(world, (0, 2))], False)
        await world.settle()
        world.lose(1)
        with pytest.raises(SliceLostError):
            world.runtime.dispatcher.execute(executable, [], False)
        world.up(1)
        world.runtime.dispatcher.execute(executable, [put(world, (0, 2))], False)
        await world.settle()
        epoch = world.runtime.epochs.covering((0, 1))
        assert [load.epoch for load in world.sent(0, c.Load)] == [1, epoch]
        assert [load.epoch for load in world.sent(1, c.Load)] == [epoch]

    run(main)


def test_a_failed_epoch_costs_a_program_on_one_host_nothing() -> None:
    async def main(world: World) -> None:
        executable = make(world, (0, 1))
        arg = put(world, (0, 1))
        world.runtime.dispatcher.execute(executable, [arg], False)
        world.lose(1)
        world.runtime.dispatcher.execute(executable, [arg], False)
        await world.settle()
        assert [load.epoch for load in world.sent(0, c.Load)] == [0]

    run(main)


def test_preload_does_nothing_where_a_host_is_missing() -> None:
    async def main(world: World) -> None:
        executable = make(world, (0, 2))
        world.lose(1)
        world.runtime.dispatcher.preload(executable)
        await world.settle()
        assert not world.sent(0, c.Load)
        world.up(1)
        world.runtime.dispatcher.preload(executable)
        world.runtime.dispatcher.preload(executable)
        await world.settle()
        assert len(world.sent(0, c.Load)) == len(world.sent(1, c.Load)) == 1

    run(main)


def test_what_is_for_the_time_after_a_loss_is_not_loaded_before() -> None:
    async def main(world: World) -> None:
        world.runtime.epochs.covering(range(3))
        executable = make(world, (0, 2))
        world.runtime.dispatcher.preload(executable)
        await world.settle()
        assert not world.sent(0, c.Load)
        world.lose(2)
        world.runtime.epochs.covering((0, 1))
        world.runtime.dispatcher.preload(executable)
        await world.settle()
        assert len(world.sent(0, c.Load)) == len(world.sent(1, c.Load)) == 1

    run(main, slices=3)


def test_unload() -> None:
    async def main(world: World) -> None:
        executable = make(world, (0, 2))
        world.runtime.dispatcher.preload(executable)
        await world.settle()
        world.lose(1)
        executable.unload()
        executable.unload()
        world.up(1)
        await world.settle()
        assert world.sent(0, c.Unload) == [c.Unload((executable.number,))]
        assert not world.sent(1, c.Unload)

    run(main)


def test_arguments_must_be_where_the_program_runs() -> None:
    async def main(world: World) -> None:
        executable = make(world, (0, 1))
        for wrong in ((1, 0), (0,), (2, 3)):
            with pytest.raises(StatusError) as caught:
                world.runtime.dispatcher.execute(executable, [put(world, wrong)], False)
            assert caught.value.code is Code.INVALID_ARGUMENT
            assert f"argument 0 of jit_f is on devices {list(wrong)}" in caught.value.message
        await world.settle()
        assert not world.sent(0, c.Execute)

    run(main)


def test_a_program_that_hosts_compile_themselves_goes_without_the_blob() -> None:
    async def main(world: World) -> None:
        executable = make(world, (0,), program=b"module with callbacks")
        world.runtime.dispatcher.preload(executable)
        await world.settle()
        (load,) = world.sent(0, c.Load)
        assert (load.blob, load.program) == (b"", b"module with callbacks")

    run(main)


def test_shardings_of_the_outputs() -> None:
    async def main(world: World) -> None:
        split = OP(type=3, tile_assignment_dimensions=[2], tile_assignment_devices=[0, 1])
        outputs = [(F32, [4]), (F32, [])]
        given = [split.SerializeToString(), OP(type=0).SerializeToString()]
        kinds = [["pinned_host", "device"]]
        facts: dict[str, Any] = {"outputs": outputs, "memory_kinds": kinds}
        one = make(world, (3,), output_shardings=given, **facts)
        assert [(s.devices, s.memory_kind) for _, _, s in one.outputs] == [
            ((3,), "pinned_host"),
            ((3,), "device"),
        ]
        two = make(world, (3, 0), output_shardings=given, **facts)
        assert [s.indices(shape) for _, shape, s in two.outputs] == [
            ((slice(0, 2),), (slice(2, 4),)),
            ((), ()),
        ]
        assert two.outputs[0][2].devices == (3, 0)
        unknown = make(world, (3, 0), outputs=outputs, memory_kinds=[])
        assert [s.memory_kind for _, _, s in unknown.outputs] == ["device", "device"]

    run(main)


def test_memory_statistics() -> None:
    message = schema.xla.CompiledMemoryStatsProto()
    memory_stats(compiled(), message)
    assert message.output_size_in_bytes == 16
    memory_stats(compiled(memory=None), message)
