"""One client: answers once and in time, whatever it sends."""

from __future__ import annotations

import contextlib
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from head_world import F32, World, compiled, one, replicated, run
from hypothesis import example, given, settings
from hypothesis import strategies as st
from session_noise import OPTIONS, OWN, PUTS, compiling, noise, put, valid

from regrow.errors import SLICE_DOWN_WORDS, Code, StatusError
from regrow.head import session as session_module
from regrow.head.session import Session
from regrow.wire.schema import proxy

BUFFERS = range(7)


def send(session: Session, request: Any) -> None:
    session.request(request.SerializeToString())


def store(session: Session, handle: int, data: bytes) -> None:
    session.store_begin(handle, len(data))[:] = data
    session.store_end(handle)


def tables_of(session: Session) -> list[Any]:
    tables = session._tables
    return [tables.arrays, tables.programs, tables.host_buffers, tables.statuses]


async def round_trip(world: World) -> None:
    """Another client is served."""
    session, responses = world.session()
    send(session, put(1, 1, 1, (4,), one(0)))
    store(session, 1, np.arange(4, dtype=np.float32).tobytes())
    request = proxy.IfrtRequest()
    request.request_metadata.op_id = 2
    request.copy_to_host_buffer_request.array_handle = 1
    request.copy_to_host_buffer_request.host_buffer_handle = 7
    send(session, request)
    await world.settle()
    assert [r.response_metadata.op_id for r in responses] == [1, 2]
    assert not any(r.response_metadata.status.code for r in responses)
    view = session.lookup(7)
    assert view is not None
    assert np.frombuffer(view, np.float32).tolist() == [0, 1, 2, 3]
    del view
    session.closed()


# --- order ----------------------------------------------------------------------------------------


def test_a_request_waits_for_its_buffer_and_what_follows_waits_too() -> None:
    async def main(world: World) -> None:
        session, responses = world.session()
        send(session, put(1, 1, 1, (4,), one(0)))
        request = proxy.IfrtRequest()
        request.request_metadata.op_id = 2
        request.check_value_ready_request.value_handles.append(1)
        send(session, request)
        send(session, put(3, 2, 2, (4,), one(0)))
        await world.settle()
        assert not responses
        store(session, 2, bytes(16))
        await world.settle()
        assert not responses
        store(session, 1, bytes(16))
        await world.settle()
        assert sorted(r.response_metadata.op_id for r in responses) == [1, 2, 3]
        assert not any(r.response_metadata.status.code for r in responses)
        session.closed()
        await world.check_nothing_left()

    run(main)


def test_a_buffer_that_comes_first_waits_for_its_request() -> None:
    async def main(world: World) -> None:
        session, responses = world.session()
        store(session, 1, bytes(16))
        send(session, put(1, 1, 1, (4,), one(0)))
        session._release()
        assert len(responses) == 1
        assert not session._tables.host_buffers
        session.closed()

    run(main)


def test_a_buffer_that_is_aborted_or_too_large_fails_its_request_only() -> None:
    async def main(world: World) -> None:
        session, responses = world.session()
        send(session, put(1, 1, 1, (4,), one(0)))
        send(session, put(2, 2, 2, (4,), one(0)))
        session.store_begin(1, 16)
        session.store_abort(1)
        assert [r.response_metadata.op_id for r in responses] == [1]
        assert (
            "host buffer 1 was not sent completely" in responses[0].response_metadata.status.message
        )
        with pytest.raises(StatusError) as caught:
            session.store_begin(2, 1 << 60)
        assert caught.value.code is Code.RESOURCE_EXHAUSTED
        assert [r.response_metadata.op_id for r in responses] == [1, 2]
        assert responses[1].response_metadata.status.code == Code.RESOURCE_EXHAUSTED
        # Their arrays hold the same errors.
        for op_id, handle in ((3, 1), (4, 2)):
            request = proxy.IfrtRequest()
            request.request_metadata.op_id = op_id
            request.check_value_ready_request.value_handles.append(handle)
            send(session, request)
        assert [r.response_metadata.status.code for r in responses[2:]] == [
            r.response_metadata.status.code for r in responses[:2]
        ]
        del caught
        session.closed()
        await world.check_nothing_left()

    run(main)


def test_the_client_hears_which_tracebacks_nobody_needs() -> None:
    async def main(world: World) -> None:
        session, responses = world.session()
        for op_id in range(1, 9):
            request = proxy.IfrtRequest()
            request.request_metadata.op_id = op_id
            request.request_metadata.user_context_id = 100 + op_id
            if op_id % 4:
                # What the client may hold for long, and what is refused, tells nothing.
                request.check_future_request.future_handle = 1
            else:
                request.check_value_ready_request.SetInParent()
            send(session, request)
        told = [r.response_metadata for r in responses]
        numbers = [meta.seq_num for meta in told if meta.seq_num < 2**63 - 1]
        assert numbers == [0, 1]
        ids = [list(meta.destroyed_user_context_ids) for meta in told]
        assert ids == [[], [], [], [101, 102, 103, 104], [], [], [], [105, 106, 107, 108]]
        session.closed()

    run(main)


def test_answers_that_nobody_waits_for_come_soon_and_before_later_ones() -> None:
    async def main(world: World) -> None:
        session, responses = world.session()
        for op_id in range(1, 4):
            request = proxy.IfrtRequest()
            request.request_metadata.op_id = op_id
            request.delete_array_request.array_handle.append(1)
            send(session, request)
        assert not responses
        request = proxy.IfrtRequest()
        request.request_metadata.op_id = 9
        request.init_request.SetInParent()
        send(session, request)
        assert [r.response_metadata.op_id for r in responses] == [1, 2, 3, 9]
        request.request_metadata.op_id = 10
        request.delete_array_request.array_handle.append(1)
        send(session, request)
        deadline = time.monotonic() + 10
        while len(responses) < 5 and time.monotonic() < deadline:
            await world.settle()
        assert responses[-1].response_metadata.op_id == 10
        session.closed()

    run(main)


# --- lookups -------------------------------------------------------------------------------------


def test_lookup_and_delete() -> None:
    async def main(world: World) -> None:
        session, _ = world.session()
        assert session.lookup(1) is None
        store(session, 1, b"small")
        store(session, 2, bytes(100_000))
        assert session.lookup(1) == b"small"
        view = session.lookup(2)
        assert view is not None
        assert len(view) == 100_000
        del view
        session.store_begin(3, 5)
        session.store_abort(3)
        assert session.lookup(3) is None
        for handle in (1, 2, 3, 4):
            session.delete(handle)
        assert session.lookup(1) is None
        await world.check_nothing_left()
        session.closed()

    run(main)


# --- the end --------------------------------------------------------------------------------------


def test_answers_after_the_end_of_the_session_leave_nothing_behind() -> None:
    async def main(world: World) -> None:
        session, responses = world.session()
        store(session, 1, bytes(400_000))
        send(session, put(1, 1, 1, (100_000,), one(0)))
        await world.settle()
        request = proxy.IfrtRequest()
        request.copy_to_host_buffer_request.array_handle = 1
        request.copy_to_host_buffer_request.host_buffer_handle = 5
        send(session, request)
        send(session, compiling(b"plain", OPTIONS[2]))
        send(session, put(4, 2, 2, (4,), one(0)))
        before = len(responses)
        session.closed()
        await world.settle()
        assert len(responses) == before
        assert not any(tables_of(session))
        await world.check_nothing_left()
        for host in world.hosts.values():
            assert not host.loads

    run(main)


def test_what_a_client_had_is_freed_when_it_goes_also_after_errors() -> None:
    async def main(world: World) -> None:
        session, _ = world.session()
        for handle in range(1, 5):
            store(session, handle, bytes(400_000))
            send(session, put(handle, handle, handle, (100_000,), replicated((0, 2))))
        await world.settle()
        world.lose(1)
        for number in range(20):
            request = proxy.IfrtRequest()
            request.request_metadata.op_id = 10 + number
            body = request.copy_arrays_request
            body.array_handles.extend(range(1, 5))
            body.result_handles.extend(range(10, 14))
            body.device_ids.extend((1, 2))
            send(session, request)
        # The client forgets its arrays, and keeps the errors.
        request = proxy.IfrtRequest()
        request.destruct_array_request.array_handle.extend(range(1, 5))
        send(session, request)
        await world.check_nothing_left()
        assert len(session._tables.arrays) == 4
        session.closed()

    run(main)


# --- noise ----------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=5))
def test_bytes_that_are_no_request(messages: list[bytes]) -> None:
    async def main(world: World) -> None:
        session, responses = world.session()
        answered = 0
        for data in messages:
            try:
                session.request(data)
                answered += 1
            except StatusError as error:
                assert error.code is Code.INVALID_ARGUMENT  # noqa: PT017
                assert f"{len(data)} bytes" in error.message  # noqa: PT017
        await world.settle()
        assert len(responses) == answered
        session.closed()
        await round_trip(world)

    run(main)


def answer_compile(command: Any) -> Any:
    program = getattr(command, "program", b"")
    if program == b"refuse":
        return StatusError(Code.INVALID_ARGUMENT, "refused")
    if program == b"donate":
        return compiled(donated=[0, 3])
    if program == b"two":
        return compiled(outputs=[(F32, [4]), (F32, [])], memory_kinds=[["device", "pinned_host"]])
    if hasattr(command, "what"):
        return {"flops": 3.0} if command.what == "cost" else "HloModule"
    return compiled()


class Client:
    """A client that does anything, and what must hold for it nevertheless."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.session, self.responses = world.session()
        self.sent: list[Any] = []

    def ask(self, request: Any) -> None:
        request.request_metadata.op_id = len(self.sent) + 1
        self.sent.append(request)
        send(self.session, request)

    async def begin(self) -> None:
        """Some arrays and programs, so that there is something to be wrong about."""
        for handle, (shape, sharding) in enumerate(PUTS * 2, 1):
            store(self.session, 1, bytes(4 * math.prod(shape)))
            self.ask(put(0, handle, 1, shape, sharding))
        for options in OPTIONS[2:5]:
            for program in (b"plain", b"donate"):
                self.ask(compiling(program, options))
        await self.world.settle()

    async def act(self, seed: int, *, losses: bool) -> None:
        rng = random.Random(seed)
        what = rng.randrange(12)
        handle = rng.choice(BUFFERS)
        size = rng.choice([0, 1, 4, 16, 16, 64, 64, 70_000, 1 << 60])
        session = self.session
        if what < 5:
            self.ask(valid(rng) if rng.random() < 0.7 else noise(rng))
            if session._inbox and rng.random() < 0.9:  # Mostly the buffer comes.
                for number, size in _buffers_of(session._inbox[0]).items():
                    store(session, number, bytes(size))
        elif what < 8:
            try:
                session.store_begin(handle, size)
            except StatusError as error:
                assert error.code is Code.RESOURCE_EXHAUSTED  # noqa: PT017
            else:
                if rng.random() < 0.9:
                    session.store_end(handle)
        elif what == 8:
            session.store_abort(handle)
        elif what == 9:
            session.lookup(handle)
            session.delete(handle)
        elif losses and rng.random() < 0.3:
            index = rng.randrange(2)
            self.world.lose(index)
            if rng.random() < 0.7:
                self.world.up(index)
        else:
            await self.world.settle(turns=rng.randrange(10))

    async def finish(self) -> None:
        """All buffers that are missing fail; then every request must have been answered."""
        session = self.session
        for _ in range(10 * len(self.sent) + 10):
            if not session._inbox:
                break
            for handle in _buffers_of(session._inbox[0]):
                session.store_abort(handle)
        await self.world.settle()
        session._release()
        answered = Counter(r.response_metadata.op_id for r in self.responses)
        wanted = Counter(request.request_metadata.op_id for request in self.sent)
        assert answered == wanted

    def errors(self) -> list[Any]:
        """The errors of the server's making, each with the kind of its request."""
        metas = [response.response_metadata for response in self.responses]
        by_id = {request.request_metadata.op_id: request for request in self.sent}
        return [
            (meta.status, by_id[meta.op_id].WhichOneof("request"))
            for meta in metas
            if meta.status.code and meta.status.message != OWN
        ]


def _buffers_of(request: Any) -> dict[int, int]:
    """The host buffers that a request waits for, and a size that may be right."""
    many = request.make_arrays_from_host_buffer_shards_request
    bodies = [buffer for spec in many.specs for buffer in spec.host_buffers]
    bodies.append(request.make_array_from_host_buffer_request)
    return {
        body.host_buffer_handle: min(4 * abs(math.prod(body.shape.dims)), 70_000) for body in bodies
    }


# Each seed is one act: so hypothesis finds the acts that matter.
ACTS = st.lists(st.integers(0, 1 << 40), min_size=30, max_size=80, unique=True)


@contextlib.contextmanager
def no_surprises() -> Iterator[None]:
    """What a handler did not foresee is raised instead of logged."""

    def again(*_: Any) -> None:
        error = sys.exc_info()[1]
        assert error is not None
        raise error

    with mock.patch.object(session_module.log, "exception", again):
        yield


@settings(max_examples=40, deadline=None)
@given(ACTS)
@example([*range(28), 34_223_607_922, 1 << 40])  # A program is deleted, and then executed.
def test_a_client_that_does_anything(seeds: list[int]) -> None:
    async def main(world: World) -> None:
        world.compile = answer_compile
        client = Client(world)
        await client.begin()
        with no_surprises():
            for seed in seeds:
                await client.act(seed, losses=False)
            await client.finish()
        for status, name in client.errors():
            message = f"{Code(status.code).name}: {status.message}"
            assert not any(word in message for word in SLICE_DOWN_WORDS), (name, message)
        client.session.closed()
        assert not any(tables_of(client.session))
        await round_trip(world)
        await world.check_nothing_left()
        assert not any(host.loads for host in world.hosts.values())

    run(main)


@settings(max_examples=30, deadline=None)
@given(ACTS)
def test_a_client_that_does_anything_while_slices_die(seeds: list[int]) -> None:
    async def main(world: World) -> None:
        world.compile = answer_compile
        client = Client(world)
        await client.begin()
        with no_surprises():
            for seed in seeds:
                await client.act(seed, losses=True)
            await client.finish()
        for status, name in client.errors():
            code, message = Code(status.code), status.message
            assert code not in (Code.INTERNAL, Code.NOT_FOUND, Code.DEADLINE_EXCEEDED), name
            assert (code is Code.DATA_LOSS) <= message.startswith("slice "), (name, message)
        client.session.closed()
        for index in range(2):
            if index not in world.hosts:
                world.up(index)
        await round_trip(world)
        await world.check_nothing_left()

    run(main)
