"""What a real cluster answers to bad input: one clear error each, and it goes on serving."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from head_world import F32, one
from session_noise import compile_options, compiling, put

import regrow
from regrow import LocalCluster
from regrow.channel import rgcb
from regrow.channel.handshake import Identity, new_secret
from regrow.channel.worker_end import WorkerChannel
from regrow.errors import ClusterError, Code, HandshakeError, UsageError
from regrow.wire.schema import proxy

METHOD = "/xla.ifrt.proxy.GrpcIfrtService/"
SESSION_KEY = "ifrt-proxy-grpc-ifrt-session-metadata-bin"
STORE_KEY = "ifrt-proxy-grpc-host-buffer-store-metadata-bin"
SOURCES = str(Path(regrow.__file__).parents[1])
WAIT_S = 20.0
TOKEN = "sesame"


class RawClient:
    """The calls of a client, without JAX in front of them."""

    def __init__(self, target: str, token: str | None = None) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.insecure_channel(target.removeprefix("grpc://"), options=options)
        self._requests: queue.Queue[bytes | None] = queue.Queue()
        metadata = proxy.GrpcIfrtSessionMetadata()
        metadata.version.protocol_version = 25
        if token is not None:
            attributes = metadata.initialization_data.attributes
            attributes[rgcb.TOKEN_KEY].string_value = token.encode()
        self.responses = self.channel.stream_stream(METHOD + "IfrtSession")(
            iter(self._requests.get, None),
            metadata=[(SESSION_KEY, metadata.SerializeToString())],
            timeout=WAIT_S,
        )
        self._op_id = 0
        self.session = 0

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.put(None)
        self.channel.close()

    def begin(self) -> RawClient:
        request = proxy.IfrtRequest()
        request.init_request.SetInParent()
        self.session = self.ask(request).init_response.session_id
        return self

    def send_bytes(self, data: bytes) -> None:
        self._requests.put(data)

    def send(self, request: Any) -> int:
        self._op_id += 1
        request.request_metadata.op_id = self._op_id
        self.send_bytes(request.SerializeToString())
        return self._op_id

    def ask(self, request: Any) -> Any:
        op_id = self.send(request)
        for data in self.responses:
            response = proxy.IfrtResponse.FromString(data)
            if response.response_metadata.op_id == op_id:
                return response
        raise AssertionError("the session ended without an answer")

    def error(self, request: Any) -> tuple[Code, str]:
        status = self.ask(request).response_metadata.status
        return Code(status.code), status.message

    def store(self, handle: int, data: bytes, size: int | None = None, session: int = 0) -> None:
        metadata = proxy.GrpcHostBufferStoreMetadata(
            session_id=session or self.session,
            handle=handle,
            buffer_size=len(data) if size is None else size,
        )
        message = proxy.GrpcHostBufferStoreRequest(data=data).SerializeToString()
        self.channel.stream_unary(METHOD + "HostBufferStore")(
            iter([message]), metadata=[(STORE_KEY, metadata.SerializeToString())], timeout=WAIT_S
        )

    def lookup(self, handle: int) -> bytes:
        request = proxy.GrpcHostBufferLookupRequest(session_id=self.session, handle=handle)
        call = self.channel.unary_stream(METHOD + "HostBufferLookup")
        parse = proxy.GrpcHostBufferLookupResponse.FromString
        parts = call(request.SerializeToString(), timeout=WAIT_S)
        return b"".join(parse(part).data for part in parts)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(slices=2, devices_per_slice=2, port=0, token=TOKEN) as made:
        yield made


@pytest.fixture(autouse=True)
def _still_serving(cluster: LocalCluster) -> Iterator[None]:
    """Another client is served after each test, and every slice is as it was."""
    with RawClient(cluster.target) as bystander:
        bystander.begin()
        yield
        for client in (bystander, RawClient(cluster.target).begin()):
            with client:
                client.store(1, np.arange(4, dtype=np.float32).tobytes())
                assert client.error(put(0, 7, 1, (4,), one(3))) == (Code.OK, "")
                request = proxy.IfrtRequest()
                request.copy_to_host_buffer_request.array_handle = 7
                request.copy_to_host_buffer_request.host_buffer_handle = 9
                assert client.error(request) == (Code.OK, "")
                assert np.frombuffer(client.lookup(9), np.float32).tolist() == [0, 1, 2, 3]
    assert [(one.state, one.incarnation) for one in cluster.slices] == [("up", 1), ("up", 1)]


def refused(call: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value


def test_a_message_that_is_no_protobuf(cluster: LocalCluster) -> None:
    with RawClient(cluster.target) as client:
        client.begin()
        client.send_bytes(b"\xff\xff\xff\xff")
        error = refused(lambda: list(client.responses))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "a message of 4 bytes is no IfrtRequest" in error.details()


def test_an_empty_request(cluster: LocalCluster) -> None:
    with RawClient(cluster.target) as client:
        client.begin()
        code, text = client.error(proxy.IfrtRequest())
        assert code is Code.UNIMPLEMENTED
        assert text == "an empty request is not supported by this server"


def test_metadata_that_is_none(cluster: LocalCluster) -> None:
    with grpc.insecure_channel(cluster.target.removeprefix("grpc://")) as channel:
        for metadata in ([], [(SESSION_KEY, b"\xff\xff")]):
            call = channel.stream_stream(METHOD + "IfrtSession")
            error = refused(lambda call=call, m=metadata: list(call(iter(()), metadata=m)))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        error = refused(lambda: channel.unary_unary(METHOD + "GetVersion")(b"\xff\xff"))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        error = refused(lambda: channel.unary_unary("/no.such/Method")(b""))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(("low", "high"), [(1, 15), (26, 40)])
def test_a_client_too_old_or_too_new(cluster: LocalCluster, low: int, high: int) -> None:
    request = proxy.GrpcGetVersionRequest()
    request.min_version.protocol_version = low
    request.max_version.protocol_version = high
    with grpc.insecure_channel(cluster.target.removeprefix("grpc://")) as channel:
        call = channel.unary_unary(METHOD + "GetVersion")
        error = refused(lambda: call(request.SerializeToString(), timeout=WAIT_S))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert f"versions {low} to {high}" in error.details()
        assert "regrow doctor" in error.details()


def test_a_huge_declared_buffer(cluster: LocalCluster) -> None:
    with RawClient(cluster.target) as client:
        client.begin()
        waiting = client.send(put(0, 1, 5, (4,), one(0)))
        error = refused(lambda: client.store(5, b"abcd", size=1 << 60))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"{1 << 60} bytes wanted" in error.details()
        # What waited for the buffer is told as well, and the session goes on.
        response = proxy.IfrtResponse.FromString(next(client.responses))
        assert response.response_metadata.op_id == waiting
        assert response.response_metadata.status.code == Code.RESOURCE_EXHAUSTED
        for size in (3, 5):
            error = refused(lambda size=size: client.store(6, b"abcd", size=size))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        client.store(8, bytes(16))
        assert client.error(put(0, 2, 8, (4,), one(0))) == (Code.OK, "")


def test_unknown_handles(cluster: LocalCluster) -> None:
    with RawClient(cluster.target) as client:
        client.begin()
        request = proxy.IfrtRequest()
        request.check_value_ready_request.value_handles.append(4711)
        code, text = client.error(request)
        assert (code, text) == (
            Code.INVALID_ARGUMENT,
            "array handle 4711 is not known to this session",
        )
        request = proxy.IfrtRequest()
        request.loaded_executable_metadata_request.loaded_executable_handle = 4711
        code, text = client.error(request)
        assert "program handle 4711" in text
        error = refused(lambda: client.lookup(4711))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        error = refused(lambda: client.store(1, b"abcd", session=4711))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "there is no session 4711" in error.details()


def test_more_devices_than_there_are(cluster: LocalCluster) -> None:
    with RawClient(cluster.target) as client:
        client.begin()
        code, text = client.error(compiling(b"program", compile_options([[0], [4]])))
        assert (code, text) == (
            Code.INVALID_ARGUMENT,
            "there is no device 4; the cluster has 4",
        )
        client.store(1, bytes(16))
        code, text = client.error(put(0, 1, 1, (4,), one(64)))
        assert "there is no device 64" in text
        request = proxy.IfrtRequest()
        request.get_default_device_assignment_request.num_replicas = 5
        request.get_default_device_assignment_request.num_partitions = 1
        code, text = client.error(request)
        assert "do not fit on the 4 devices" in text


def test_programs_that_are_none(cluster: LocalCluster) -> None:
    with RawClient(cluster.target) as client:
        client.begin()
        for program, text in (
            (b"ML\xefRStableHLO_v99.0.0\x00", "written as StableHLO"),
            (b"no program at all", "cannot read this program"),
        ):
            code, message = client.error(compiling(program, compile_options([[0]])))
            assert code is Code.FAILED_PRECONDITION
            assert text in message


def test_an_array_of_a_shape_that_its_bytes_do_not_have(cluster: LocalCluster) -> None:
    with RawClient(cluster.target) as client:
        client.begin()
        for shape in ((5,), (1 << 40, 1 << 40), (-1,)):
            client.store(1, bytes(16))
            code, text = client.error(put(0, 1, 1, shape, one(0)))
            assert code is Code.INVALID_ARGUMENT
            assert "shape" in text
    assert F32 == 11


@pytest.mark.parametrize("token", [None, "wrong"])
def test_a_client_over_tcp_without_the_token(cluster: LocalCluster, token: str | None) -> None:
    assert cluster.tcp_target is not None
    with RawClient(cluster.tcp_target, token) as client:
        for request in (compiling(b"", b""), put(0, 1, 1, (4,), one(0))):
            code, text = client.error(request)
            assert code is Code.UNAUTHENTICATED
            assert "token" in text
            assert TOKEN not in text
    with RawClient(cluster.tcp_target, TOKEN) as client:
        assert client.begin().session


def test_a_worker_without_the_secret(cluster: LocalCluster) -> None:
    endpoint = cluster.target.removeprefix("grpc://unix:").replace("client.sock", "workers.sock")
    lost: list[str] = []
    for secret in (new_secret(), b""):
        worker = WorkerChannel(
            endpoint, secret, Identity("worker", 0, 0, 1, os.getpid()), lost.append, lost.append
        )
        with pytest.raises(HandshakeError, match="the secret is not that of this cluster"):
            worker.connect(5.0)
        worker.close()


@pytest.mark.parametrize("noise", [b"", b"\x00" * 64, b"\xff" * 4096, b"GET / HTTP/1.1\r\n\r\n"])
def test_strangers_at_every_door(cluster: LocalCluster, noise: bytes) -> None:
    directory = Path(cluster.target.removeprefix("grpc://unix:")).parent
    for name in ("client.sock", "workers.sock", "control.sock"):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(directory / name))
            stranger.sendall(noise)
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(10)
            try:
                while stranger.recv(4096):
                    pass
            except ConnectionError:
                pass


def test_a_port_in_use(cluster: LocalCluster, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ClusterError, match=f"{port}") as caught:
            LocalCluster(slices=1, devices_per_slice=1, port=port, home=tmp_path)
    assert "in use" in str(caught.value)


def test_sizes_that_are_none(cluster: LocalCluster, tmp_path: Path) -> None:
    for sizes in ({"slices": 0}, {"devices_per_slice": -1}, {"hosts_per_slice": 3}):
        with pytest.raises(UsageError, match=next(iter(sizes)).replace("_", ".")):
            LocalCluster(home=tmp_path, **sizes)


def run(code: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": SOURCES} | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_what_a_user_sees(cluster: LocalCluster) -> None:
    """The same with stock JAX: an exception with one clear line, and the script goes on."""
    done = run(
        """
        import jax, numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        def told(act):
            try:
                act()
            except Exception as error:
                print(type(error).__name__, str(error).splitlines()[0])
        told(lambda: jax.devices()[4])
        told(lambda: jax.make_mesh((8,), ("x",)))
        told(lambda: jax.device_put(np.zeros(5), NamedSharding(jax.make_mesh((4,), ("x",)), P("x"))))
        told(lambda: np.asarray(jax.jit(lambda x: x + 1, donate_argnums=0)(x) + x)
             if (x := jax.device_put(np.float32(1))) is not None else None)
        print(jax.jit(lambda x: x * 2)(np.float32(21)))
        """,
        cluster.env,
    )
    assert done.returncode == 0, done.stderr
    *errors, last = done.stdout.splitlines()
    assert last == "42.0"
    assert [line.split()[0] for line in errors] == [
        "IndexError",
        "ValueError",
        "ValueError",
        "RuntimeError",
    ]
    assert not any(word in done.stdout for word in ("DATA_LOSS", "INTERNAL", "NOT_FOUND"))


def test_a_target_where_nobody_listens(cluster: LocalCluster, tmp_path: Path) -> None:
    done = run(
        f"""
        import regrow
        from regrow.errors import UsageError
        try:
            regrow.connect("no address")
        except UsageError as error:
            print(error)
        regrow.connect({str(tmp_path / "nobody.sock")!r})
        import jax
        try:
            jax.devices()
        except Exception as error:
            print(type(error).__name__, str(error).splitlines()[0])
        """,
        {},
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("no address of a cluster: 'no address'")
    assert "nobody.sock" in second
