"""What the head sees of a client's work, by its requests."""

from __future__ import annotations

from time import monotonic
from typing import Any

from head_client import Client
from head_world import F32, World, compiled, one, run, tiled
from session_noise import compile_options, compiling

from regrow.channel.digests import CopySpec, DigestRequest
from regrow.channel.stamps import stamp_of
from regrow.observe import Report
from regrow.wire.schema import proxy, xla

DEVICES = [0, 1, 2]
# What JAX sends where nobody has set it.
A_THREAD = -1964051309863927391


class Trainer:
    """A client whose program runs on all slices, or on some."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.reports: list[Report] = []
        self.run = world.runtime.observer.run
        self.run._on_report = self.reports.append
        self.client = Client(world)
        self.run.clients(1, monotonic())
        world.compile = lambda command: compiled(name="jit_step", outputs=[(11, (4096,))] * 2)
        self.handle = 0

    async def compile(self, devices: list[int]) -> None:
        self.client.give(compiling(b"step", compile_options([[one] for one in devices])))
        response = await self.client.answer()
        self.handle = response.compile_response.loaded_executable_handle
        self.client.put(1, [0.0] * len(devices), tiled(devices, (len(devices),)))

    def execute(self, step: int | None = None) -> None:
        request = proxy.IfrtRequest()
        body = request.loaded_executable_execute_request
        body.loaded_executable_handle = self.handle
        body.args_handles.append(1)
        body.result_array_handle.extend((8, 9))
        body.execute_options.execution_stream_id = A_THREAD if step is None else stamp_of(step)
        self.client.give(request)

    async def step(self, step: int | None = None) -> Any:
        self.execute(step)
        return await self.client.ask("check_value_ready_request", value_handles=[8])


def test_a_training_that_loses_a_slice_and_gets_it_back() -> None:
    async def main(world: World) -> None:
        trainer = Trainer(world)
        await trainer.compile(DEVICES)
        for step in range(4):
            await trainer.step(step)
        assert trainer.run.steps.number == 4
        assert trainer.run.steps.main is not None
        assert trainer.run.steps.main.name == "jit_step"
        assert not trainer.run.open
        assert trainer.run.quiet_since is not None

        trainer.execute(4)
        trainer.client.send("check_value_ready_request", value_handles=[8])
        assert [activity.kind for activity in trainer.run.open] == ["wait"]
        world.lose(1)
        assert (await trainer.client.answer()).response_metadata.status.code
        assert trainer.run.event is not None
        # What is dispatched in vain is a step that is lost.
        assert (await trainer.step(5)).response_metadata.status.code
        assert trainer.run.event is not None
        await trainer.compile([0, 2])
        await trainer.step(3)
        [report] = trainer.reports
        assert (report.kind, report.slices, report.ended) == ("loss", (1,), "recovered")
        assert report.parts["compile"] > 0
        assert report.parts["first step"] > 0
        assert str(report.lost) == "steps 3 to 5"
        assert (trainer.run.steps.taken, trainer.run.steps.lost) == (7, 3)

        world.up(1)
        await trainer.step()
        assert len(trainer.reports) == 1
        await trainer.compile(DEVICES)
        await trainer.step()
        assert [one.kind for one in trainer.reports] == ["loss", "scale-up"]
        assert trainer.reports[-1].slices == (1,)

    run(main, slices=3, devices=1)


def test_a_snapshot_is_known_when_it_was_waited_for() -> None:
    async def main(world: World) -> None:
        trainer = Trainer(world)
        await trainer.compile(DEVICES)
        for _ in range(4):
            await trainer.step()

        async def save() -> None:
            trainer.client.send(
                "copy_arrays_request",
                array_handles=[8],
                result_handles=[20],
                memory_kind="pinned_host",
            )
            await trainer.step()
            await trainer.client.ask("check_value_ready_request", value_handles=[20])

        await save()
        assert trainer.run.steps._saved == 4
        world.lose(1)
        await trainer.compile([0, 2])
        trainer.client.put(2, [0.0, 0.0], tiled([0, 2], (2,), "pinned_host"))
        # The snapshot is laid out anew first, which is no other snapshot.
        trainer.client.send(
            "copy_arrays_request", array_handles=[2], result_handles=[4], memory_kind="pinned_host"
        )
        await trainer.client.ask("check_value_ready_request", value_handles=[4])
        assert trainer.run.steps._saved == 4
        trainer.client.send(
            "copy_arrays_request", array_handles=[4], result_handles=[3], memory_kind="device"
        )
        await trainer.step()
        [report] = trainer.reports
        assert report.lost is not None
        assert (str(report.lost), report.lost.counted) == ("step 5", True)
        assert report.parts["load"] > 0

    run(main, slices=3, devices=1)


def test_a_snapshot_is_known_by_the_hashes_that_are_made_with_its_copies() -> None:
    async def main(world: World) -> None:
        trainer = Trainer(world)
        await trainer.compile(DEVICES)
        for _ in range(4):
            await trainer.step()
        thirds = xla.OpSharding(
            type=3, tile_assignment_dimensions=[3], tile_assignment_devices=range(3)
        )
        copy = CopySpec(F32, (3,), thirds.SerializeToString())
        request = compiling(DigestRequest(tuple(DEVICES), 1, (copy,)).text().encode(), b"")
        request.compile_request.program.type_name = "xla::ifrt::PluginProgram"
        trainer.client.give(request)
        handle = (await trainer.client.answer()).compile_response.loaded_executable_handle
        copying = proxy.IfrtRequest()
        copying.loaded_executable_execute_request.loaded_executable_handle = handle
        copying.loaded_executable_execute_request.args_handles.append(1)
        copying.loaded_executable_execute_request.result_array_handle.extend((30, 31))
        trainer.client.give(copying)
        assert not (await trainer.client.answer()).response_metadata.status.code
        await trainer.step()
        assert trainer.run.steps._saved is None
        await trainer.client.ask("check_value_ready_request", value_handles=[30])
        assert trainer.run.steps._saved == 4

    run(main, slices=3, devices=1)


def test_health_checks_rebuild_nothing() -> None:
    async def main(world: World) -> None:
        trainer = Trainer(world)
        await trainer.compile(DEVICES)
        for _ in range(4):
            await trainer.step()
        world.lose(1)
        world.compile = lambda command: compiled(name="jit_check")
        trainer.client.put(2, [0.0] * 16, one(0))
        trainer.client.give(compiling(b"check", compile_options([[0]])))
        await trainer.client.answer()
        assert trainer.run.event is not None
        assert trainer.run.event.rebuilt_since is None
        trainer.client.put(3, [0.0] * 2048, one(0))
        assert trainer.run.event.rebuilt_since is not None

    run(main, slices=3, devices=1)
