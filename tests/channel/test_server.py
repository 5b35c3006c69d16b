"""The head's server against peers that are wrong, slow, hostile or killed."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from regrow.channel.frames import HEADER
from regrow.channel.handshake import (
    LENGTH,
    Hello,
    Identity,
    Welcome,
    WorkerHandshake,
    new_link_id,
    new_secret,
)
from regrow.channel.stream import connect, listen
from regrow.errors import HandshakeError, UsageError

HELLO = Hello(Identity("worker", 0, 0, 1, 4711), new_link_id(), 0)


class Peer:
    """A connection that a test speaks on by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, path: str) -> Peer:
        return cls(*await asyncio.open_unix_connection(path))

    async def message(self) -> bytes:
        size = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))[0]
        return await self.reader.readexactly(size)

    async def handshake(self, secret: bytes, hello: Hello = HELLO) -> Welcome:
        mine = WorkerHandshake(secret, hello)
        self.writer.write(mine.answer(await self.message()))
        return mine.finish(await self.message())

    async def rest(self) -> bytes:
        """What comes until the head closes the connection, which a peer may see as a reset."""
        try:
            return await asyncio.wait_for(self.reader.read(), 5)
        except ConnectionError:
            return b""

    async def __aenter__(self) -> Peer:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except OSError:
            return


def test_a_wrong_secret_is_refused_at_once_and_others_are_served(bench: Any) -> None:
    async def main() -> None:
        async with bench.serving():
            with pytest.raises(HandshakeError, match="the secret is not that of this cluster"):
                await bench.connected(secret=new_secret())
            assert not bench.hellos
            await bench.connected()

    asyncio.run(main())


def test_a_stale_incarnation_is_refused_with_the_reason(bench: Any) -> None:
    async def main() -> None:
        async with bench.serving():
            bench.refuse_with = "incarnation 1 of slice 0 is over; 2 is the one now"
            with pytest.raises(HandshakeError, match="incarnation 1 of slice 0 is over"):
                await bench.connected()
            assert bench.hellos[0].identity.incarnation == 1

    asyncio.run(main())


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        LENGTH.pack(0),
        LENGTH.pack(0xFFFFFFFF),
        LENGTH.pack(3) + b"\xc1\xc1\xc1",
        LENGTH.pack(60_000) + b"\x91" * 60_000,
    ],
)
def test_garbage_gets_one_refusal_and_a_close(bench: Any, garbage: bytes) -> None:
    async def main() -> None:
        async with bench.serving():
            async with await Peer.connect(bench.path) as peer:
                await peer.message()
                peer.writer.write(garbage)
                refusal = await peer.message()
                assert await peer.rest() == b""
            with pytest.raises(HandshakeError, match="refuses this process: "):
                WorkerHandshake(bench.secret, HELLO).finish(refusal)
            await bench.connected()

    asyncio.run(main())


def test_random_bytes_do_not_stop_the_server(bench: Any) -> None:
    rng = random.Random(3)

    async def main() -> None:
        async with bench.serving():
            for _ in range(50):
                async with await Peer.connect(bench.path) as peer:
                    peer.writer.write(rng.randbytes(rng.randrange(1, 200)))
                    peer.writer.write_eof()
                    await peer.rest()
            await bench.connected()

    asyncio.run(main())


def test_a_silent_or_trickling_peer_is_dropped_at_the_deadline(bench: Any) -> None:
    async def main() -> None:
        async with bench.serving(handshake_s=0.15):
            async with await Peer.connect(bench.path) as silent:
                async with await Peer.connect(bench.path) as slow:
                    slow.writer.write(LENGTH.pack(1000) + b"x")
                    await asyncio.wait_for(silent.rest(), 2)
                    await asyncio.wait_for(slow.rest(), 2)
            await bench.connected()

    asyncio.run(main())


def test_connections_in_the_handshake_are_bounded(bench: Any, wait_until: Any) -> None:
    async def main() -> None:
        async with bench.serving(handshake_s=0.4, max_half_open=3):
            silent = [await Peer.connect(bench.path) for _ in range(3)]
            for peer in silent:
                await peer.message()
            async with await Peer.connect(bench.path) as extra:
                assert await extra.rest() == b""
            await bench.connected()  # The worker tries again until the deadline frees a place.
            for peer in silent:
                await peer.__aexit__()

    asyncio.run(main())


def test_a_worker_that_breaks_the_protocol_is_not_let_in_again(bench: Any, wait_until: Any) -> None:
    async def main() -> None:
        async with bench.serving():
            async with await Peer.connect(bench.path) as peer:
                await peer.handshake(bench.secret)
                peer.writer.write(HEADER.pack(1, 5, 0) + b"x")
                assert await peer.rest() == b""
            await wait_until(lambda: bench.broken, "the break")
            assert bench.broken == ["message 1 is missing, 4 after it came"]
            async with await Peer.connect(bench.path) as peer:
                with pytest.raises(HandshakeError, match="is closed"):
                    await peer.handshake(bench.secret)

    asyncio.run(main())


def test_a_frame_beyond_all_bounds_is_not_believed(bench: Any, wait_until: Any) -> None:
    async def main() -> None:
        async with bench.serving():
            async with await Peer.connect(bench.path) as peer:
                await peer.handshake(bench.secret)
                peer.writer.write(HEADER.pack(0xFFFFFFFF, 1, 0))
                assert await peer.rest() == b""
            await wait_until(lambda: bench.broken, "the break")
            assert "a frame of 4294967295 bytes" in bench.broken[0]

    asyncio.run(main())


def test_a_worker_that_forgot_what_it_received_is_refused(bench: Any, wait_until: Any) -> None:
    async def main() -> None:
        async with bench.serving():
            async with await Peer.connect(bench.path) as peer:
                await peer.handshake(bench.secret)
                bench.channel.send(b"one")
                await peer.reader.readexactly(HEADER.size + 3)
                peer.writer.write(HEADER.pack(0, 0, 1))
                await wait_until(lambda: bench.channel.unacked_bytes == 0, "the acknowledgement")
            async with await Peer.connect(bench.path) as peer:
                with pytest.raises(HandshakeError, match="cannot resume after message 0"):
                    await peer.handshake(bench.secret)

    asyncio.run(main())


def test_a_new_connection_replaces_one_that_the_head_has_not_seen_break(
    bench: Any, wait_until: Any
) -> None:
    async def main() -> None:
        async with bench.serving():
            async with await Peer.connect(bench.path) as old, await Peer.connect(bench.path) as new:
                await old.handshake(bench.secret)
                await wait_until(lambda: bench.attached == 1, "the first connection")
                bench.channel.send(b"one")
                await new.handshake(bench.secret)
                assert await new.reader.readexactly(HEADER.size + 3) == (
                    HEADER.pack(3, 1, 0) + b"one"
                )
                await old.rest()
                assert bench.broken == ["the worker connects again"]

    asyncio.run(main())


def test_another_users_process_is_refused(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with bench.serving():
            uid = os.geteuid()
            monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
            async with await Peer.connect(bench.path) as peer:
                refusal = await peer.message()
                assert await peer.rest() == b""
            with pytest.raises(HandshakeError, match=f"user {uid} does not own this cluster"):
                WorkerHandshake(bench.secret, HELLO).finish(refusal)

    asyncio.run(main())


class ExhaustedListener:
    """A listening socket that is out of descriptors for its first two connections."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.failures = 2

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def accept(self) -> tuple[socket.socket, Any]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._sock.accept()


def test_running_out_of_descriptors_delays_a_worker_and_no_more(bench: Any) -> None:
    async def main() -> None:
        async with bench.serving():
            bench.server._listener = ExhaustedListener(bench.server._listener)
            await bench.connected()
            assert bench.server._listener.failures == 0

    asyncio.run(main())


def test_the_socket_file_is_the_owners_and_goes_with_the_server(bench: Any) -> None:
    async def main() -> None:
        async with bench.serving():
            modes.append(stat.S_IMODE(os.lstat(bench.path).st_mode))

    modes: list[int] = []
    asyncio.run(main())
    assert modes == [0o600]
    assert not Path(bench.path).exists()


def test_a_dead_socket_file_is_replaced_and_another_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    for _ in range(2):
        listen(str(path), 1).close()
    path.unlink()
    path.write_text("precious")
    with pytest.raises(OSError, match="in use"):
        listen(str(path), 1)
    assert path.read_text() == "precious"


def test_a_socket_path_that_is_too_long_is_a_usage_error(tmp_path: Path) -> None:
    path = str(tmp_path / ("x" * 108))
    with pytest.raises(UsageError, match="choose a shorter folder"):
        listen(path, 1)
    with pytest.raises(UsageError):
        connect(path, 1)


WORKER = """
import os, sys, time
from regrow.channel.handshake import Identity
from regrow.channel.worker_end import WorkerChannel
path, secret = sys.argv[1], bytes.fromhex(sys.argv[2])
channel = WorkerChannel(path, secret, Identity("worker", 0, 0, 1, os.getpid()),
                        lambda payload: channel.send(payload), print)
channel.connect(10)
time.sleep(30)
"""


def start_worker(bench: Any, program: str = WORKER) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", program, bench.path, bench.secret.hex()])


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_the_head_learns_at_once_that_a_worker_was_killed(bench: Any, wait_until: Any) -> None:
    async def main() -> None:
        before = descriptors()
        async with bench.serving():
            worker = start_worker(bench)
            try:
                await wait_until(lambda: bench.attached, "the worker")
                bench.channel.send(b"x" * (20 << 20))
                await wait_until(lambda: bench.at_head, "the answer")
                assert len(bench.at_head[0]) == 20 << 20
                worker.send_signal(signal.SIGKILL)
                await wait_until(lambda: bench.broken, "the break", timeout_s=1)
            finally:
                worker.kill()
                worker.wait(5)
        assert descriptors() <= before

    asyncio.run(main())


def test_a_stopped_worker_does_not_hold_up_the_head(bench: Any, wait_until: Any) -> None:
    async def main() -> None:
        async with bench.serving():
            worker = start_worker(bench)
            try:
                await wait_until(lambda: bench.attached, "the worker")
                worker.send_signal(signal.SIGSTOP)
                for _ in range(20):
                    bench.channel.send(b"y" * (1 << 20))
                await asyncio.wait_for(asyncio.sleep(0.05), 1)
                worker.send_signal(signal.SIGCONT)
                await wait_until(lambda: len(bench.at_head) == 20, "the answers")
                assert not bench.broken
            finally:
                worker.kill()
                worker.wait(5)

    asyncio.run(main())


# The reader's thread may be at an acknowledgement: then it is that which sends what is queued.
SENT = "channel.send(b'last words')\nwhile channel._inbox: pass\nchannel._sending.acquire()"
LAST_WORDS = WORKER.replace("channel.send(payload)", "None").replace(
    "time.sleep(30)", f"{SENT}; os._exit(3)"
)


def test_the_last_words_of_a_worker_are_heard_while_the_head_talks_to_it(
    bench: Any, wait_until: Any
) -> None:
    async def main() -> None:
        async with bench.serving():
            worker = start_worker(bench, LAST_WORDS)
            try:
                while not bench.broken:
                    if bench.attached:
                        bench.channel.send(b"are you there?" * 1000)
                    await asyncio.sleep(0)
                assert bench.at_head == [b"last words"]
            finally:
                worker.kill()
                worker.wait(5)

    for _ in range(2):
        bench.new_channel()
        asyncio.run(main())
