"""The program that has all hosts traced: what it starts, stops, and refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from head_client import Client
from head_world import World, run
from session_noise import compiling

from regrow.channel.commands import StartTrace, StopTrace
from regrow.errors import Code
from regrow.wire.schema import proxy

PLAIN = {"traceLocation": "/traces", "maxNumHosts": 1}
NAMED = {
    "traceLocation": "/traces",
    "xprofTraceOptions": {"traceSessionName": "2026_11_30", "hostTraceLevel": 3},
}


class Tracer:
    """A client that has hosts traced."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.client = Client(world)
        self.handle = 0

    async def compile(self, request: Any) -> Any:
        text = json.dumps({"profileRequest": request})
        message = compiling(f"PluginProgram:{text}".encode(), b"")
        message.compile_request.program.type_name = "xla::ifrt::PluginProgram"
        self.client.give(message)
        response = await self.client.answer()
        self.handle = response.compile_response.loaded_executable_handle
        return response.response_metadata.status


async def toggled(tracer: Tracer) -> tuple[Any, int]:
    """The status of an execution when it is waited for, and the number of its results."""
    client = tracer.client
    request = proxy.IfrtRequest()
    body = request.loaded_executable_execute_request
    body.loaded_executable_handle = tracer.handle
    body.execute_options.fill_status = True
    body.result_status_handle = 50
    client.give(request)
    # The client asks for the end before it has an answer.
    number = client.requests
    waited = await client.ask(
        "loaded_executable_fetch_execute_result_request", result_status_handle=50
    )
    [answer] = [r for r in client.responses if r.response_metadata.op_id == number]
    outputs = answer.loaded_executable_execute_response.outputs
    return waited.response_metadata.status, len(outputs)


@pytest.mark.parametrize(("request_", "outputs"), [(PLAIN, 0), (NAMED, 1)])
def test_every_host_starts_and_stops(request_: Any, outputs: int) -> None:
    async def main(world: World) -> None:
        tracer = Tracer(world)
        assert not (await tracer.compile(request_)).code
        for _ in range(2):
            status, count = await toggled(tracer)
            assert (status.code, count) == (0, outputs)
        for index, host in world.hosts.items():
            start, stop = host.traces
            assert isinstance(start, StartTrace)
            assert start.host_level == (3 if outputs else 2)
            assert isinstance(stop, StopTrace)
            assert (stop.directory, stop.name) == ("/traces", f"slice{index}-host0")
            assert stop.session == "2026_11_30" or not outputs

    run(main, slices=2, devices=1)


def test_a_lost_slice_is_left_out() -> None:
    async def main(world: World) -> None:
        tracer = Tracer(world)
        await tracer.compile(NAMED)
        await toggled(tracer)
        world.lose(0)
        world.up(0)
        status, _ = await toggled(tracer)
        assert not status.code
        assert world.hosts[0].traces == []
        assert len(world.hosts[1].traces) == 2

    run(main, slices=2, devices=1)


def test_a_host_that_cannot_write_says_so() -> None:
    async def main(world: World) -> None:
        tracer = Tracer(world)
        await tracer.compile(NAMED | {"traceLocation": "/full"})
        await toggled(tracer)
        status, _ = await toggled(tracer)
        assert Code(status.code) is Code.FAILED_PRECONDITION
        assert "no room" in status.message

    run(main, slices=2, devices=1)


def test_whoever_leaves_stops_what_was_started() -> None:
    async def main(world: World) -> None:
        tracer = Tracer(world)
        await tracer.compile(NAMED)
        await toggled(tracer)
        tracer.client.session.closed()
        await world.settle()
        assert [len(host.traces) for host in world.hosts.values()] == [2, 2]

    run(main, slices=2, devices=1)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ({}, "a request for a profile that is none"),
        ([], "a request for a profile that is none"),
        ({"traceLocation": "gs://bucket"}, "must be the absolute path of a directory"),
        ({"traceLocation": "traces"}, "must be the absolute path of a directory"),
        (
            {"traceLocation": "/t", "xprofTraceOptions": {"traceSessionName": "../up"}},
            "cannot be the name of a trace",
        ),
    ],
)
def test_what_is_refused(request_: Any, text: str) -> None:
    async def main(world: World) -> None:
        status = await Tracer(world).compile(request_)
        assert Code(status.code) is Code.INVALID_ARGUMENT
        assert text in status.message

    run(main, slices=1, devices=1)


def test_clients_that_may_do_nothing_on_hosts() -> None:
    async def main(world: World) -> None:
        status = await Tracer(world).compile(PLAIN)
        assert Code(status.code) is Code.UNIMPLEMENTED

    run(main, slices=1, devices=1, allow_colocated_python=False)
