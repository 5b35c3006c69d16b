"""Compares the transport with grpcio's server: round trips, bandwidth, and the server's CPU time.

    python benchmarks/transport.py [--tcp] [--seconds 1.0] [--megabytes 100]

Both servers only echo requests and keep host buffers; each is a process of its own, and so is the
client, which is grpcio's. The two servers take turns, so that a busy machine disturbs both alike.
The rows "raw" use prepared HTTP/2 frames on a plain socket: there the client costs next to nothing,
and the server's CPU time for each message is what matters.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import queue
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import hpack
import psutil

from regrow.wire import frames, schema, service

METHOD = "/xla.ifrt.proxy.GrpcIfrtService/"
SESSION_KEY = "ifrt-proxy-grpc-ifrt-session-metadata-bin"
STORE_KEY = "ifrt-proxy-grpc-host-buffer-store-metadata-bin"
REQUEST = bytes(113)  # the size of a small IfrtRequest
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
ROUNDS = 3


# The servers.


class EchoSession:
    def __init__(self, gateway: EchoGateway, send: Callable[[bytes], None]) -> None:
        self.session_id = 1
        self._gateway = gateway
        self.request = send

    def store_begin(self, handle: int, size: int) -> memoryview:
        spare = self._gateway.spare.get(size)
        memory = spare.pop() if spare else memoryview(bytearray(size))
        self._gateway.buffers[handle] = memory
        return memory

    def store_end(self, handle: int) -> None: ...

    def store_abort(self, handle: int) -> None: ...

    def lookup(self, handle: int) -> memoryview | None:
        return self._gateway.buffers.get(handle)

    def delete(self, handle: int) -> None:
        memory = self._gateway.buffers.pop(handle)
        self._gateway.spare.setdefault(len(memory), []).append(memory)

    def closed(self) -> None: ...


class EchoGateway:
    """Reuses memory of deleted buffers, as the arena of a cluster does."""

    def __init__(self) -> None:
        self.buffers: dict[int, memoryview] = {}
        self.spare: dict[int, list[memoryview]] = {}
        self._session: Any = None

    def negotiate(self, min_protocol: int, max_protocol: int, max_serdes: int) -> tuple[int, int]:
        return max_protocol, max_serdes

    def open(self, *args: Any) -> Any:
        self._session = EchoSession(self, args[-1])
        return self._session

    def session(self, session_id: int) -> Any:
        return self._session

    def callback_connection(self, sock: socket.socket, nonce: str) -> None:
        sock.close()


async def serve_regrow(address: str) -> None:
    tcp = ("127.0.0.1", int(address)) if address.isdigit() else None
    unix_path = None if tcp else address
    server = await service.serve(EchoGateway(), unix_path=unix_path, tcp=tcp)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await server.close()


def serve_grpcio(address: str) -> None:
    buffers: dict[int, bytes] = {}

    def store(requests: Iterator[bytes], context: Any) -> bytes:
        value = dict(context.invocation_metadata())[STORE_KEY]
        metadata = schema.proxy.GrpcHostBufferStoreMetadata.FromString(value)
        parse = schema.proxy.GrpcHostBufferStoreRequest.FromString
        buffers[metadata.handle] = b"".join(parse(request).data for request in requests)
        return b""

    def lookup(request: bytes, context: Any) -> Iterator[bytes]:
        handle = schema.proxy.GrpcHostBufferLookupRequest.FromString(request).handle
        view = memoryview(buffers[handle])
        for start in range(0, len(view), 1 << 20):
            part = bytes(view[start : start + (1 << 20)])
            yield schema.proxy.GrpcHostBufferLookupResponse(data=part).SerializeToString()

    def delete(request: bytes, context: Any) -> bytes:
        buffers.pop(schema.proxy.GrpcHostBufferDeleteRequest.FromString(request).handle)
        return b""

    handlers = {
        "IfrtSession": grpc.stream_stream_rpc_method_handler(lambda requests, _: requests),
        "HostBufferStore": grpc.stream_unary_rpc_method_handler(store),
        "HostBufferLookup": grpc.unary_stream_rpc_method_handler(lookup),
        "HostBufferDelete": grpc.unary_unary_rpc_method_handler(delete),
    }
    server = grpc.server(futures.ThreadPoolExecutor(16), options=UNLIMITED)
    name = METHOD.strip("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
    target = f"127.0.0.1:{address}" if address.isdigit() else f"unix:{address}"
    server.add_insecure_port(target)
    server.start()
    signal.signal(signal.SIGTERM, lambda *_: server.stop(0))
    server.wait_for_termination()


# The client.


class Client:
    def __init__(self, address: str, process: psutil.Process) -> None:
        self.process = process
        target = f"127.0.0.1:{address}" if address.isdigit() else f"unix:{address}"
        self.channel = grpc.insecure_channel(target, options=UNLIMITED)
        grpc.channel_ready_future(self.channel).result(20)
        self._address = address
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._responses: Any = self.channel.stream_stream(METHOD + "IfrtSession")(
            iter(self._requests.get, None), metadata=[(SESSION_KEY, b"")]
        )
        self._handles = itertools.count(1)

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def close(self) -> None:
        self._requests.put(None)
        list(self._responses)
        self.channel.close()

    def sync(self, count: int) -> None:
        for _ in range(count):
            self._requests.put(REQUEST)
            next(self._responses)

    def pipelined(self, count: int) -> None:
        for _ in range(count):
            self._requests.put(REQUEST)
        for _ in range(count):
            next(self._responses)

    def store(self, data: bytes) -> int:
        handle = next(self._handles)
        metadata = schema.proxy.GrpcHostBufferStoreMetadata(
            session_id=1, handle=handle, buffer_size=len(data)
        )
        parts = (data[at : at + (1 << 20)] for at in range(0, len(data), 1 << 20))
        make = schema.proxy.GrpcHostBufferStoreRequest
        self.channel.stream_unary(METHOD + "HostBufferStore")(
            (make(data=part).SerializeToString() for part in parts),
            metadata=[(STORE_KEY, metadata.SerializeToString())],
        )
        return handle

    def lookup(self, handle: int) -> int:
        request = schema.proxy.GrpcHostBufferLookupRequest(session_id=1, handle=handle)
        call = self.channel.unary_stream(METHOD + "HostBufferLookup")
        return sum(len(part) for part in call(request.SerializeToString()))

    def delete(self, handle: int) -> None:
        request = schema.proxy.GrpcHostBufferDeleteRequest(session_id=1, handle=handle)
        self.channel.unary_unary(METHOD + "HostBufferDelete")(request.SerializeToString())

    def small_buffers(self, count: int) -> None:
        for _ in range(count):
            handle = self.store(b"12345678")
            self.lookup(handle)
            self.delete(handle)

    def raw(self, count: int, batch: int) -> None:
        """Requests as prepared frames, `batch` of them at a time."""
        with self._raw_session() as (sock, request):
            sent = request * batch
            size = len(REQUEST) + 5
            for _ in range(max(count // batch, 1)):
                sock.sendall(sent)
                left = size * batch
                while left > 0:
                    # The frames' own heads are few bytes beside the payload's: never too much.
                    left -= _payload_bytes(sock)

    @contextlib.contextmanager
    def _raw_session(self) -> Iterator[tuple[socket.socket, bytes]]:
        if self._address.isdigit():
            sock = socket.create_connection(("127.0.0.1", int(self._address)))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(self._address)
        fields = [(":method", "POST"), (":scheme", "http"), (":path", METHOD + "IfrtSession")]
        fields += [(":authority", "here"), ("content-type", "application/grpc")]
        fields += [("te", "trailers"), (SESSION_KEY, "")]
        block = hpack.Encoder().encode(fields)
        with sock:
            window = (1 << 31) - 1
            sock.sendall(
                frames.PREFACE
                + frames.settings({frames.INITIAL_WINDOW_SIZE: window})
                + frames.window_update(0, window - 65535)
                + frames.frame(frames.HEADERS, frames.END_HEADERS, 1, block)
            )
            payload = b"\0" + len(REQUEST).to_bytes(4, "big") + REQUEST
            yield sock, frames.frame(frames.DATA, 0, 1, payload)


_rest = b""


def _payload_bytes(sock: socket.socket) -> int:
    """Reads once, and returns how much payload of DATA frames came to an end."""
    global _rest
    data = _rest + sock.recv(1 << 16)
    found = position = 0
    while len(data) - position >= 9:
        word, _, _ = frames.unpack_header(data, position)
        end = position + 9 + (word >> 8)
        if end > len(data):
            break
        if not word & 255:
            found += word >> 8
        position = end
    _rest = data[position:]
    return found


# Measuring.


def rate(client: Client, work: Callable[[int], None], seconds: float) -> tuple[float, float]:
    """Microseconds of time and of the server's CPU, for each operation."""
    work(10)
    count, elapsed = 20, 0.0
    while elapsed < seconds / 4:
        count *= 2
        start = time.perf_counter()
        work(count)
        elapsed = time.perf_counter() - start
    count = int(count * seconds / elapsed)
    cpu, start = client.cpu_s(), time.perf_counter()
    work(count)
    elapsed = time.perf_counter() - start
    return elapsed / count * 1e6, (client.cpu_s() - cpu) / count * 1e6


def bandwidth(client: Client, megabytes: int) -> dict[str, tuple[float, float]]:
    """Microseconds for each MB, of time and of the server's CPU."""
    data = os.urandom(megabytes * 1_000_000)
    found: dict[str, list[tuple[float, float]]] = {"store": [], "lookup": []}
    for _ in range(3):
        marks = [(time.perf_counter(), client.cpu_s())]
        handle = client.store(data)
        marks.append((time.perf_counter(), client.cpu_s()))
        client.lookup(handle)
        marks.append((time.perf_counter(), client.cpu_s()))
        client.delete(handle)
        for name, (before, after) in zip(found, itertools.pairwise(marks), strict=True):
            delta = tuple((b - a) / megabytes * 1e6 for a, b in zip(before, after, strict=True))
            found[name].append((delta[0], delta[1]))
    return {name: min(values) for name, values in found.items()}


def measure(client: Client, args: argparse.Namespace) -> dict[str, tuple[float, float]]:
    works: dict[str, Callable[[int], None]] = {
        "round trip": client.sync,
        "pipelined": client.pipelined,
        "raw, one at a time": lambda count: client.raw(count, 1),
        "raw, 16 at a time": lambda count: client.raw(count, 16),
        "8 bytes: store, lookup, delete": client.small_buffers,
    }
    results = {name: rate(client, work, args.seconds) for name, work in works.items()}
    for name, value in bandwidth(client, args.megabytes).items():
        results[f"{name}, for each MB"] = value
    return results


@contextlib.contextmanager
def running(kind: str, folder: Path, tcp: bool) -> Iterator[Client]:
    if tcp:
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = str(free.getsockname()[1])
    else:
        address = str(folder / f"{kind}.sock")
    with subprocess.Popen([sys.executable, __file__, "--serve", kind, address]) as process:
        try:
            client = Client(address, psutil.Process(process.pid))
            yield client
            client.close()
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tcp", action="store_true", help="over TCP rather than a Unix socket")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each row and round")
    parser.add_argument("--megabytes", type=int, default=100, help="size of a large buffer")
    parser.add_argument("--only", choices=["regrow", "grpcio"], help="measure one server only")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        kind, address = args.serve
        if kind == "regrow":
            asyncio.run(serve_regrow(address))
        else:
            serve_grpcio(address)
        return
    kinds = [args.only] if args.only else ["regrow", "grpcio"]
    rounds: dict[str, list[dict[str, tuple[float, float]]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            for kind in kinds:
                with running(kind, Path(folder), args.tcp) as client:
                    rounds[kind].append(measure(client, args))
    report(rounds)


def report(rounds: dict[str, list[dict[str, tuple[float, float]]]]) -> None:
    kinds = list(rounds)
    print(f"{'microseconds, median of ' + str(ROUNDS):34}", end="")
    print(*(f"{kind + ' (server CPU)':>24}" for kind in kinds), f"{'ratio (CPU)':>16}")
    for name in rounds[kinds[0]][0]:
        values = [
            [statistics.median(found[name][part] for found in rounds[kind]) for part in (0, 1)]
            for kind in kinds
        ]
        print(f"{name:34}", end="")
        print(*(f"{wall:14.1f} ({cpu:7.1f})" for wall, cpu in values), end="")
        ratio = [b / a if a else float("nan") for a, b in zip(values[0], values[-1], strict=True)]
        print(f"{ratio[0]:8.1f} ({ratio[1]:5.1f})")


if __name__ == "__main__":
    main()
