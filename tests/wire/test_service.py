"""The server on real sockets, with grpcio's client at the other end."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import queue
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest

from regrow.errors import ClusterStartError, Code, StatusError
from regrow.wire import frames, schema, service
from waiting import until

METHOD = "/xla.ifrt.proxy.GrpcIfrtService/"
SESSION_KEY = "ifrt-proxy-grpc-ifrt-session-metadata-bin"
STORE_KEY = "ifrt-proxy-grpc-host-buffer-store-metadata-bin"
WAIT_S = 20.0


class Client:
    """The calls that a JAX client makes."""

    def __init__(self, target: str, metadata: bytes) -> None:
        unlimited = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        self.channel = grpc.insecure_channel(target, options=unlimited)
        self._metadata = metadata
        self._requests: queue.Queue[bytes | None] = queue.Queue()
        self.session_id = 0
        self.responses: Any = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.put(None)
        self.channel.close()

    def open(self) -> None:
        self._requests.put(None)  # to whoever reads it still
        self._requests = queue.Queue()
        self.responses = self.channel.stream_stream(METHOD + "IfrtSession")(
            iter(self._requests.get, None), metadata=[(SESSION_KEY, self._metadata)]
        )
        self.responses.initial_metadata()

    def send(self, request: bytes) -> None:
        self._requests.put(request)

    def ask(self, request: bytes) -> bytes:
        self.send(request)
        return bytes(next(self.responses))

    def end(self) -> list[bytes]:
        self._requests.put(None)
        return list(self.responses)

    def unary(self, method: str, request: Any) -> bytes:
        call = self.channel.unary_unary(METHOD + method)
        return bytes(call(request.SerializeToString(), timeout=WAIT_S))

    def version(self) -> tuple[int, int]:
        request = schema.proxy.GrpcGetVersionRequest()
        request.min_version.protocol_version = 16
        request.max_version.protocol_version = 25
        request.max_version.ifrt_serdes_version_number = 6
        data = self.unary("GetVersion", request)
        version = schema.proxy.GrpcGetVersionResponse.FromString(data).version
        return version.protocol_version, version.ifrt_serdes_version_number

    def store_call(self, session: int, handle: int, size: int, parts: Iterator[bytes]) -> Any:
        metadata = schema.proxy.GrpcHostBufferStoreMetadata(
            session_id=session, handle=handle, buffer_size=size
        )
        return self.channel.stream_unary(METHOD + "HostBufferStore").future(
            (
                schema.proxy.GrpcHostBufferStoreRequest(data=part).SerializeToString()
                for part in parts
            ),
            metadata=[(STORE_KEY, metadata.SerializeToString())],
            timeout=60,
        )

    def store(self, session: int, handle: int, data: bytes, chunk: int = 1 << 20) -> None:
        parts = (data[at : at + chunk] for at in range(0, len(data), chunk))
        self.store_call(session, handle, len(data), parts).result()

    def lookup_call(self, session: int, handle: int) -> Any:
        request = schema.proxy.GrpcHostBufferLookupRequest(session_id=session, handle=handle)
        call = self.channel.unary_stream(METHOD + "HostBufferLookup")
        return call(request.SerializeToString(), timeout=60)

    def lookup(self, session: int, handle: int) -> bytes:
        parse = schema.proxy.GrpcHostBufferLookupResponse.FromString
        return b"".join(parse(part).data for part in self.lookup_call(session, handle))

    def delete(self, session: int, handle: int) -> None:
        self.unary(
            "HostBufferDelete",
            schema.proxy.GrpcHostBufferDeleteRequest(session_id=session, handle=handle),
        )


class Cluster:
    """A served gateway, on a loop in a thread of its own."""

    def __init__(self, gateway: Any, metadata: bytes, folder: Path) -> None:
        self.gateway = gateway
        self.metadata = metadata
        self.unix = folder / "client.sock"
        self.port = 0
        self.options: dict[str, Any] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: service.Server | None = None

    def start(self) -> None:
        self._thread.start()
        self._server = self.run(
            service.serve(self.gateway, unix_path=self.unix, tcp=("127.0.0.1", 0), **self.options)
        )
        assert self._server is not None
        assert self._server.port is not None
        self.port = self._server.port

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(WAIT_S)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        async def inside() -> Any:
            return function(*args)

        return self.run(inside())

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            self.run(server.close())

    def stop(self) -> None:
        try:
            self.close()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(WAIT_S)
            self._loop.close()

    def client(self, kind: str = "unix") -> Client:
        target = f"unix:{self.unix}" if kind == "unix" else f"127.0.0.1:{self.port}"
        return Client(target, self.metadata)


@pytest.fixture
def cluster(gateway: Any, new_session_metadata: Any, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(gateway, new_session_metadata(token=b"abc"), tmp_path)
    made.start()
    yield made
    made.stop()


both = pytest.mark.parametrize("kind", ["unix", "tcp"])


@both
def test_every_method(cluster: Cluster, kind: str) -> None:
    with cluster.client(kind) as client:
        assert client.version() == (25, 6)
        client.open()
        protocol, serdes, init_data, peer, tcp, user_agent = cluster.gateway.opened[0]
        assert (protocol, serdes, init_data, tcp) == (25, 6, {"token": b"abc"}, kind == "tcp")
        assert peer == f"process {os.getpid()}" if kind == "unix" else "127.0.0.1:" in peer
        assert user_agent.startswith("grpc-python/")
        for size in (0, 1, 100, 70_000, 5_000_000):
            request = os.urandom(size)
            assert client.ask(request) == request
        for handle, size in enumerate((0, 1, 17, 1 << 20, 10_000_001)):
            data = os.urandom(size)
            client.store(1, handle, data)
            assert cluster.gateway.sessions[1].buffers[handle] == data
            assert client.lookup(1, handle) == data
            client.delete(1, handle)
        assert not cluster.gateway.sessions[1].buffers
        client.send(b"last")
        assert client.end() == [b"last"]
        assert client.responses.code() == grpc.StatusCode.OK
        assert cluster.gateway.sessions[1].events[-1] == "closed"


def test_many_requests_in_flight(cluster: Cluster) -> None:
    with cluster.client() as client:
        client.open()
        sent = [b"%d" % number * (number % 50) for number in range(3000)]
        for request in sent:
            client.send(request)
        assert [next(client.responses) for _ in sent] == sent


@both
def test_a_hundred_lookups_at_once(cluster: Cluster, kind: str) -> None:
    with cluster.client(kind) as client, ThreadPoolExecutor(100) as pool:
        client.open()
        contents = [os.urandom(200_000 + number) for number in range(100)]
        for handle, content in enumerate(contents):
            client.store(1, handle, content)
        assert list(pool.map(lambda handle: client.lookup(1, handle), range(100))) == contents


def test_stores_at_once(cluster: Cluster) -> None:
    with cluster.client() as client, ThreadPoolExecutor(20) as pool:
        client.open()
        contents = [os.urandom(300_000 + number) for number in range(20)]
        list(pool.map(lambda handle: client.store(1, handle, contents[handle]), range(20)))
        buffers = cluster.gateway.sessions[1].buffers
        assert [bytes(buffers[handle]) for handle in range(20)] == contents


def _pieces(size: int) -> Iterator[bytes]:
    chunk = os.urandom(1 << 20)
    while size:
        step = min(size, len(chunk))
        yield chunk[:step]
        size -= step


@both
def test_more_than_a_stream_window(cluster: Cluster, kind: str) -> None:
    with cluster.client(kind) as client:
        client.open()
        size = 150_000_000
        client.store_call(1, 1, size, _pieces(size)).result()
        assert cluster.gateway.sessions[1].events[-1] == ("end", 1)


@pytest.mark.slow
def test_more_than_a_connection_window(cluster: Cluster) -> None:
    size = 2_300_000_000
    with cluster.client() as client:
        client.open()
        session = cluster.gateway.sessions[1]
        with mmap.mmap(-1, size) as memory:
            session.store_begin = lambda handle, size: memoryview(memory)
            client.store_call(1, 1, size, _pieces(size)).result(100)
        assert session.events == [("end", 1)]


def test_errors_arrive_as_they_are(cluster: Cluster) -> None:
    with cluster.client() as client:
        client.open()
        cluster.gateway.sessions[1].limit_bytes = 1 << 20
        for call, code, text in (
            (lambda: client.store(1, 1, bytes(3 << 20)), "RESOURCE_EXHAUSTED", "3145728 bytes are"),
            (lambda: client.store(9, 1, bytes(3 << 20)), "FAILED_PRECONDITION", "session 9"),
            (lambda: client.lookup(1, 7), "INVALID_ARGUMENT", "no host buffer 7"),
            (
                lambda: client.store_call(1, 1, 5, iter([b"abc"])).result(),
                "INVALID_ARGUMENT",
                "was to have 5 bytes, but 3 came",
            ),
            (
                lambda: client.channel.unary_unary(METHOD + "Nix")(b"", timeout=5),
                "UNIMPLEMENTED",
                "there is no method",
            ),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code().name == code
            assert text in caught.value.details()
        with pytest.raises(grpc.RpcError, match="100%"):
            client.store(1, 1, bytes(3 << 20))


def test_a_refused_session(cluster: Cluster) -> None:
    cluster.gateway.refusal = StatusError(Code.UNAUTHENTICATED, "the token is wrong — try again")
    with cluster.client() as client:
        client.open()
        with pytest.raises(grpc.RpcError) as caught:
            next(client.responses)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert caught.value.details() == "the token is wrong — try again"


@both
def test_cancelled_calls(cluster: Cluster, kind: str) -> None:
    with cluster.client(kind) as client:
        client.open()
        session = cluster.gateway.sessions[1]
        started = threading.Event()

        def slowly() -> Iterator[bytes]:
            yield bytes(100)
            started.wait(WAIT_S)
            yield bytes(100)

        store = client.store_call(1, 1, 200, slowly())
        until(lambda: session.events, "the store")
        store.cancel()
        until(lambda: session.events[-1] == ("abort", 1), "the store's end")
        started.set()
        client.store(1, 2, bytes(50_000_000))
        lookup = client.lookup_call(1, 2)
        next(lookup)
        client.delete(1, 2)
        lookup.cancel()
        until(lambda: session.events[-1] == ("delete", 2), "the delete")
        client.responses.cancel()
        until(lambda: session.events[-1] == "closed", "the session's end")
        client.open()
        assert client.ask(b"again") == b"again"


def test_two_sessions_on_a_connection_and_data_on_another(cluster: Cluster) -> None:
    with cluster.client() as control, cluster.client("tcp") as bulk:
        other = Client(f"unix:{cluster.unix}", cluster.metadata)
        other.channel.close()
        other.channel = control.channel
        control.open()
        other.open()
        assert control.ask(b"one") == b"one"
        assert other.ask(b"two") == b"two"
        bulk.store(1, 5, b"abc")
        bulk.store(2, 5, b"def")
        assert (bulk.lookup(1, 5), control.lookup(2, 5)) == (b"abc", b"def")
        other.end()
        with pytest.raises(grpc.RpcError, match="there is no session 2"):
            bulk.lookup(2, 5)
        assert control.ask(b"three") == b"three"


def test_the_end_of_a_session_ends_its_transfers_elsewhere(cluster: Cluster) -> None:
    with cluster.client() as control, cluster.client("tcp") as bulk:
        control.open()
        bulk.store(1, 1, bytes(50_000_000))
        lookup = bulk.lookup_call(1, 1)
        next(lookup)
        control.end()
        with pytest.raises(grpc.RpcError) as caught:
            list(lookup)
        assert caught.value.code() == grpc.StatusCode.CANCELLED


KILLED = """
import os
import time
import grpc
channel = grpc.insecure_channel({target!r})
call = channel.stream_stream({method!r})
def requests():
    yield b"hello"
    os.write(1, b"asked\\n")
    time.sleep(60)
responses = call(requests(), metadata=[({key!r}, {metadata!r})])
for response in responses:
    os.write(1, b"answered\\n")
"""


@both
def test_a_client_that_is_killed(cluster: Cluster, kind: str) -> None:
    code = KILLED.format(
        target=f"unix:{cluster.unix}" if kind == "unix" else f"127.0.0.1:{cluster.port}",
        method=METHOD + "IfrtSession",
        key=SESSION_KEY,
        metadata=cluster.metadata,
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert {process.stdout.readline() for _ in range(2)} == {b"asked\n", b"answered\n"}
            process.send_signal(signal.SIGKILL)
            process.wait(WAIT_S)
            session = cluster.gateway.sessions[1]
            until(lambda: session.events, "the session's end")
            time.sleep(0.05)
            assert session.events == ["closed"]
        finally:
            process.kill()


def test_the_server_closes(cluster: Cluster) -> None:
    with cluster.client() as client, cluster.client("tcp") as second:
        client.open()
        second.open()
        client.store(1, 1, bytes(50_000_000))
        lookup = client.lookup_call(1, 1)
        next(lookup)
        cluster.close()
        assert [session.events[-1] for session in cluster.gateway.sessions.values()] == [
            "closed",
            "closed",
        ]
        assert not cluster.unix.exists()
        with pytest.raises(grpc.RpcError) as caught:
            next(client.responses)
        assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        with pytest.raises(grpc.RpcError):
            client.version()


def test_the_server_closes_while_clients_go(cluster: Cluster) -> None:
    clients = [cluster.client(kind) for kind in ("unix", "tcp") * 4]
    for client in clients:
        client.open()
    closers = [threading.Thread(target=client.channel.close) for client in clients]
    for closer in closers:
        closer.start()
    cluster.close()
    for closer in closers:
        closer.join(WAIT_S)
    events = [session.events for session in cluster.gateway.sessions.values()]
    assert events == [["closed"]] * 8
    for client in clients:
        client.__exit__()


def test_a_client_that_says_goodbye(cluster: Cluster) -> None:
    with socket.create_connection(("127.0.0.1", cluster.port)) as sock:
        sock.sendall(frames.PREFACE + frames.settings({}) + frames.goaway(0, 0, "bye"))
        sock.sendall(frames.frame(frames.PING, 0, 0, b"12345678"))
        sock.settimeout(WAIT_S)
        received = b""
        while b"12345678" not in received:
            received += sock.recv(4096)
    with cluster.client() as client:
        assert client.version() == (25, 6)


def test_a_peer_of_another_protocol(cluster: Cluster, caplog: Any) -> None:
    with socket.create_connection(("127.0.0.1", cluster.port)) as sock:
        sock.settimeout(WAIT_S)
        sock.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while data := sock.recv(4096):
                received += data
        assert b"does not speak HTTP/2" in received
    assert "does not speak HTTP/2" in caplog.text


def test_a_fault_of_ours_costs_one_connection(cluster: Cluster, caplog: Any) -> None:
    with cluster.client() as client, cluster.client() as healthy:
        client.open()
        healthy.open()
        session = cluster.gateway.sessions[1]
        session.store_begin = lambda handle, size: memoryview(b"read-only")[:size]
        with pytest.raises(grpc.RpcError):
            client.store(1, 1, b"abc")
        until(lambda: "closed" in session.events, "the session's end")
        assert healthy.ask(b"still here") == b"still here"
    assert "has to be closed" in caplog.text


def test_a_callback_connection_is_handed_over(cluster: Cluster) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(cluster.unix))
        sock.sendall(b"RGCB\0\0\0")
        time.sleep(0.02)
        sock.sendall(b"\x000123456789abcdefrest")
        until(lambda: cluster.gateway.callbacks, "the connection")
        handed, nonce = cluster.gateway.callbacks[0]
        with handed:
            assert nonce == "0123456789abcdef"
            handed.settimeout(WAIT_S)
            assert handed.recv(100) == b"rest"


def test_a_silent_peer_is_let_go(gateway: Any, tmp_path: Path, caplog: Any) -> None:
    async def main() -> None:
        async with serving(gateway, unix_path=tmp_path / "s", tcp=None):
            reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
            writer.write(b"PRI")
            assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
            writer.close()

    with mock.patch.object(service, "_PREFACE_TIMEOUT_S", 0.05):
        asyncio.run(main())
    assert "said nothing for 0.05 s" in caplog.text


@contextlib.asynccontextmanager
async def serving(gateway: Any, **options: Any) -> AsyncIterator[service.Server]:
    server = await service.serve(gateway, **options)
    try:
        yield server
    finally:
        await server.close()


def test_the_socket_is_for_its_owner_only(cluster: Cluster) -> None:
    assert stat.S_IMODE(cluster.unix.stat().st_mode) == 0o600


def test_addresses_in_use(gateway: Any, tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "s"
        async with serving(gateway, unix_path=path, tcp=("127.0.0.1", 0)) as server:
            with pytest.raises(ClusterStartError, match="another process serves it"):
                await service.serve(gateway, unix_path=path, tcp=None)
            with pytest.raises(ClusterStartError, match=f"TCP port {server.port} of 127.0.0.1 is"):
                await service.serve(
                    gateway, unix_path=tmp_path / "t", tcp=("127.0.0.1", server.port or 0)
                )
            assert not (tmp_path / "t").exists()
            assert path.exists()

    asyncio.run(main())


def test_addresses_that_cannot_be(gateway: Any, tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "file").write_bytes(b"mine")
        for path, match in (
            (tmp_path / "file", "something else of that name"),
            (tmp_path / "no" / "folder", "No such file or directory"),
            (tmp_path / ("x" * 120), "longer than 107 bytes"),
        ):
            with pytest.raises(ClusterStartError, match=match):
                await service.serve(gateway, unix_path=path, tcp=None)
        with pytest.raises(ClusterStartError, match=r"cannot listen on TCP port 0 of 192\.0\.2\.1"):
            await service.serve(gateway, unix_path=None, tcp=("192.0.2.1", 0))
        with pytest.raises(ClusterStartError, match="cannot listen on no such host"):
            await service.serve(gateway, unix_path=None, tcp=("no such host", 0))

    asyncio.run(main())
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_a_socket_that_was_left_behind_is_replaced(gateway: Any, tmp_path: Path) -> None:
    async def main() -> None:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(tmp_path / "s"))
        async with serving(gateway, unix_path=tmp_path / "s", tcp=None):
            assert (tmp_path / "s").is_socket()
            (tmp_path / "s").unlink()
            (tmp_path / "s").write_bytes(b"another's")

    asyncio.run(main())
    assert (tmp_path / "s").read_bytes() == b"another's"
