"""Where clients come in."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from head_world import World, run
from hypothesis import given
from hypothesis import strategies as st

from regrow.channel import rgcb
from regrow.config import TcpConfig
from regrow.errors import Code, StatusError
from regrow.head.gateway import PROTOCOL_MAX, PROTOCOL_MIN
from regrow.wire.schema import proxy

NONCE = b"0123456789abcdef"


@given(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**31), 2**31 - 1), st.integers(0, 9))
def test_the_protocol_that_is_spoken(low: int, high: int, serdes: int) -> None:
    async def main(world: World) -> None:
        spoken = [v for v in range(PROTOCOL_MIN, PROTOCOL_MAX + 1) if low <= v <= high]
        if spoken:
            assert world.gateway.negotiate(low, high, serdes) == (max(spoken), serdes)
            return
        with pytest.raises(StatusError) as caught:
            world.gateway.negotiate(low, high, serdes)
        assert caught.value.code is Code.FAILED_PRECONDITION
        assert f"speaks {PROTOCOL_MIN} to {PROTOCOL_MAX}" in caught.value.message
        assert f"versions {low} to {high}" in caught.value.message

    run(main)


@pytest.mark.parametrize("protocol", [0, PROTOCOL_MIN - 1, PROTOCOL_MAX + 1, -1])
def test_a_session_of_another_protocol(protocol: int) -> None:
    async def main(world: World) -> None:
        answers: list[bytes] = []
        session = world.gateway.open(protocol, 0, {}, "unix", False, "grpc-c++", answers.append)
        assert refusal(session, answers).code == Code.FAILED_PRECONDITION
        assert not world.gateway.clients

    run(main)


def open_tcp(world: World, answers: list[bytes], **init_data: Any) -> Any:
    data = {key.replace("_", "."): value for key, value in init_data.items()}
    return world.gateway.open(25, 6, data, "127.0.0.1:9", True, "grpc-c++", answers.append)


def refusal(session: Any, answers: list[bytes]) -> Any:
    """The status that a refused session answers to its first request."""
    request = proxy.IfrtRequest()
    request.request_metadata.op_id = 7
    request.init_request.SetInParent()
    session.request(request.SerializeToString())
    (answer,) = map(proxy.IfrtResponse.FromString, answers)
    assert answer.response_metadata.op_id == 7
    assert answer.WhichOneof("response") is None
    return answer.response_metadata.status


@pytest.mark.parametrize(
    ("given_token", "code"),
    [
        (None, Code.UNAUTHENTICATED),
        (b"", Code.UNAUTHENTICATED),
        (b"wrong", Code.UNAUTHENTICATED),
        (b"sesame\0", Code.UNAUTHENTICATED),
        (b"\xff\xfe", Code.UNAUTHENTICATED),
        (5, Code.UNAUTHENTICATED),
        ([1, 2], Code.UNAUTHENTICATED),
        (b"sesame", None),
    ],
)
def test_tokens_over_tcp(given_token: Any, code: Code | None) -> None:
    async def main(world: World) -> None:
        data = {} if given_token is None else {"regrow_token": given_token}
        answers: list[bytes] = []
        session = open_tcp(world, answers, **data)
        if code is None:
            assert world.gateway.clients == 1
            return
        status = refusal(session, answers)
        assert status.code == code
        assert "token" in status.message
        assert "sesame" not in status.message
        assert not world.gateway.clients
        assert world.gateway.session(session.session_id) is None
        with pytest.raises(StatusError, match="token"):
            session.store_begin(1, 4)
        with pytest.raises(StatusError, match="token"):
            session.request(b"\xff")
        assert session.lookup(1) is None

    run(main, tcp=TcpConfig("127.0.0.1", 0, "sesame"))


def test_no_token_is_wanted_where_that_was_said_or_over_the_unix_socket() -> None:
    async def main(world: World) -> None:
        open_tcp(world, [])
        open_tcp(world, [], regrow_token=b"any")

    run(main, tcp=TcpConfig("127.0.0.1", 0), allow_no_token=True)

    async def unix(world: World) -> None:
        world.session()

    run(unix, tcp=TcpConfig("127.0.0.1", 0, "sesame"))


def test_the_life_of_sessions() -> None:
    async def main(world: World) -> None:
        one, _ = world.session()
        other, _ = world.session()
        assert world.clients == [1, 2]
        assert one.session_id != other.session_id
        assert world.gateway.session(one.session_id) is one
        one.closed()
        assert world.gateway.session(one.session_id) is None
        assert world.gateway.session(other.session_id) is other
        assert world.clients == [1, 2, 1]
        third, _ = world.session()
        assert third.session_id not in (one.session_id, other.session_id)
        other.closed()
        third.closed()
        assert world.gateway.clients == 0

    run(main)


def test_a_session_that_is_refused_is_none() -> None:
    async def main(world: World) -> None:
        first, _ = world.session(**{rgcb.NONCE_KEY: NONCE})
        with pytest.raises(StatusError) as caught:
            world.session(**{rgcb.NONCE_KEY: NONCE})
        assert caught.value.code is Code.ALREADY_EXISTS
        assert world.gateway.clients == 1
        first.closed()
        again, _ = world.session(**{rgcb.NONCE_KEY: NONCE})
        assert world.gateway.clients == 1
        again.closed()

    run(main)


@pytest.mark.parametrize("nonce", [b"", b"0123", NONCE.upper(), b"\xff" * 16, 17, b"x" * 16])
def test_a_nonce_that_is_none_opens_no_callbacks(nonce: Any) -> None:
    async def main(world: World) -> None:
        session, _ = world.session(**{rgcb.NONCE_KEY: nonce})
        assert not world.runtime.callbacks._pools
        session.closed()

    run(main)


def test_callback_connections_belong_to_a_session() -> None:
    async def main(world: World) -> None:
        session, _ = world.session(**{rgcb.NONCE_KEY: NONCE})
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        world.gateway.callback_connection(theirs, NONCE.decode())
        hello = await loop.sock_recv(ours, 100)
        assert hello.endswith(rgcb.request(rgcb.HELLO))
        session.closed()
        assert await loop.sock_recv(ours, 100) == b""
        ours.close()
        ours, theirs = socket.socketpair()
        world.gateway.callback_connection(theirs, NONCE.decode())
        assert theirs.fileno() == -1
        ours.close()

    run(main)


async def knock(world: World, sock: socket.socket, token: bytes) -> str:
    ours, theirs = sock, None
    if sock.family == socket.AF_UNIX:
        ours, theirs = socket.socketpair()
    else:
        ours = socket.create_connection(sock.getsockname())
        theirs, _ = sock.accept()
    ours.setblocking(False)
    theirs.setblocking(False)
    loop = asyncio.get_running_loop()
    world.gateway.callback_connection(theirs, rgcb.KNOCK)
    await loop.sock_sendall(ours, rgcb.LENGTH.pack(len(token)) + token)
    answer = b""
    while len(answer) < 8 or len(answer) < 8 + rgcb.LENGTH.unpack(answer[:8])[0]:
        answer += await loop.sock_recv(ours, 1000)
    ours.close()
    await asyncio.sleep(0.01)
    return answer[8:].decode()


def test_a_client_that_knocks_hears_why_it_would_be_refused() -> None:
    async def main(world: World) -> None:
        with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
            assert "wants a token" in await knock(world, tcp, b"")
            assert "not that of this cluster" in await knock(world, tcp, b"wrong")
            assert await knock(world, tcp, b"sesame") == ""
            assert await knock(world, unix, b"") == ""
        assert not world.gateway.clients

    run(main, tcp=TcpConfig("127.0.0.1", 0, "sesame"))


def test_what_a_client_is_told_of_the_devices() -> None:
    async def main(world: World) -> None:
        session, responses = world.session()
        request = proxy.IfrtRequest()
        request.request_metadata.op_id = 5
        request.init_request.SetInParent()
        # Also of slices that are not up yet.
        session.request(request.SerializeToString())
        (response,) = responses
        assert response.response_metadata.op_id == 5
        init = response.init_response
        assert init.session_id == session.session_id
        devices = init.all_devices
        assert [device.id for device in devices] == list(range(8))
        slices = [device.attributes.attributes["slice_index"].int64_value for device in devices]
        assert slices == [0, 0, 0, 0, 1, 1, 1, 1]
        assert sorted(init.addressable_device_ids) == list(range(8))
        memories = {memory.id: memory for memory in init.memories}
        for device in devices:
            kinds = [memories[i].memory_space_kind for i in device.memory_ids]
            assert kinds == ["device", "pinned_host", "unpinned_host"]
            assert memories[device.default_memory_id].memory_space_kind == "device"
            assert all(list(memories[i].device_ids) == [device.id] for i in device.memory_ids)

    run(main, hosts=2, devices=4, up=False)
