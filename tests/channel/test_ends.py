"""Both ends over real sockets, in one process."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from regrow.channel.head_end import HeadChannel
from regrow.channel.link import Link
from regrow.errors import FrameError, HandshakeError, ResourceError, WaitTimeout


@pytest.mark.parametrize("endpoint", [None, ("127.0.0.1", 0)], ids=["unix", "tcp"])
def test_messages_cross_both_ways_in_order(bench: Any, wait_until: Any, endpoint: Any) -> None:
    async def main() -> None:
        async with bench.serving(endpoint=endpoint or bench.path):
            worker = await bench.connected()
            sizes = (1, 113, 4096, 70_000, 3 << 20)
            payloads = [os.urandom(size) for size in sizes] * 3
            for payload in payloads:
                bench.channel.send(payload)
                await asyncio.to_thread(worker.send, [payload[:1], payload[1:]])
            await wait_until(lambda: len(bench.at_head) == 15 == len(bench.at_worker), "messages")
            assert bench.at_head == payloads == bench.at_worker

    asyncio.run(main())


def test_what_is_sent_before_the_worker_is_there_arrives(bench: Any, wait_until: Any) -> None:
    async def main() -> None:
        bench.channel.send(b"early")
        async with bench.serving():
            assert not bench.channel.connected
            await bench.connected()
            await wait_until(lambda: bench.at_worker == [b"early"], "the early message")
            assert bench.channel.connected

    asyncio.run(main())


def test_a_cut_connection_loses_and_repeats_nothing(
    bench: Any, wait_until: Any, proxy_for: Any
) -> None:
    rng = random.Random(7)

    async def cutter(proxy: Any) -> None:
        for _ in range(12):
            await asyncio.sleep(rng.uniform(0.01, 0.08))
            proxy.refusing = rng.random() < 0.3
            proxy.cut()
            await asyncio.sleep(0.02)
            proxy.refusing = False

    async def main() -> None:
        sent: list[bytes] = []
        async with bench.serving(), proxy_for(bench.path).running() as proxy:
            worker = await bench.connected(proxy.path)
            cutting = asyncio.create_task(cutter(proxy))
            while not cutting.done():
                payload = rng.randbytes(rng.choice((5, 200, 5000, 300_000)))
                sent.append(payload)
                bench.channel.send(payload)
                await asyncio.to_thread(worker.send, payload)
                await asyncio.sleep(0.001)
            await cutting
            await wait_until(
                lambda: len(bench.at_head) == len(bench.at_worker) == len(sent), "all messages"
            )
            assert bench.at_head == sent == bench.at_worker
            assert proxy.connections > 5
            assert bench.attached == len(bench.broken) + 1
            assert not bench.lost

    asyncio.run(main())


def test_everything_is_acknowledged_when_the_line_is_idle(bench: Any, wait_until: Any) -> None:
    async def main() -> None:
        async with bench.serving():
            worker = await bench.connected()
            bench.channel.send(b"x" * 1000)
            worker.send(b"y" * 1000)
            await asyncio.to_thread(worker.flush, 5)
            await wait_until(lambda: bench.channel.unacked_bytes == 0, "the idle acknowledgement")
            assert bench.at_head == [b"y" * 1000]

    asyncio.run(main())


def test_flush_says_what_it_waited_for(bench: Any, proxy_for: Any) -> None:
    async def main() -> None:
        async with bench.serving(), proxy_for(bench.path).running() as proxy:
            worker = await bench.connected(proxy.path)
            proxy.refusing = True
            proxy.cut()
            await asyncio.sleep(0.02)
            worker.send(b"x")
            with pytest.raises(WaitTimeout, match="the head to acknowledge what this worker sent"):
                await asyncio.to_thread(worker.flush, 0.1)

    asyncio.run(main())


def test_messages_of_many_threads_keep_their_order(bench: Any, wait_until: Any) -> None:
    async def main() -> None:
        async with bench.serving():
            worker = await bench.connected()

            def send(name: int) -> None:
                for number in range(300):
                    worker.send(b"%d %d" % (name, number))

            threads = [threading.Thread(target=send, args=(name,)) for name in range(4)]
            for thread in threads:
                thread.start()
            await wait_until(lambda: len(bench.at_head) == 1200, "all messages")
            for thread in threads:
                thread.join(5)
            for name in range(4):
                mine = [
                    int(text.split()[1]) for text in bench.at_head if text.startswith(b"%d " % name)
                ]
                assert mine == list(range(300))

    asyncio.run(main())


def test_a_worker_may_answer_from_the_reader_thread(bench: Any, wait_until: Any) -> None:
    async def main() -> None:
        async with bench.serving():
            worker = await bench.connected(on_payload=lambda payload: worker.send(payload))
            for number in range(200):
                bench.channel.send(b"%d" % number)
            await wait_until(lambda: len(bench.at_head) == 200, "the answers")

    asyncio.run(main())


def test_a_send_inside_a_send_of_the_same_thread_is_not_a_deadlock(
    bench: Any, wait_until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a finalizer that the garbage collector runs while the lock is held."""

    async def main() -> None:
        async with bench.serving():
            worker = await bench.connected()
            send, nested = Link.send, [b"inner"]

            def send_with_a_finalizer(link: Link, message: Any) -> Any:
                if link is worker._link and nested:
                    worker.send(nested.pop())
                return send(link, message)

            monkeypatch.setattr(Link, "send", send_with_a_finalizer)
            worker.send(b"outer")
            await wait_until(lambda: len(bench.at_head) == 2, "both messages")
            assert bench.at_head == [b"outer", b"inner"]

    asyncio.run(main())


def test_a_handler_that_raises_does_not_stop_the_channel(
    bench: Any, wait_until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fail_once(payload: bytes) -> None:
        if payload == b"bad":
            raise ValueError("cannot do it")
        bench.at_worker.append(payload)

    async def main() -> None:
        async with bench.serving():
            await bench.connected(on_payload=fail_once)
            bench.channel.send(b"bad")
            bench.channel.send(b"good")
            await wait_until(lambda: bench.at_worker == [b"good"], "the second message")

    asyncio.run(main())
    assert "was not handled" in caplog.text
    assert "cannot do it" in caplog.text


def test_the_worker_is_told_once_when_the_budget_is_over(bench: Any, proxy_for: Any) -> None:
    async def main() -> None:
        async with bench.serving(), proxy_for(bench.path).running() as proxy:
            await bench.connected(proxy.path, budget_s=0.3)
            proxy.refusing = True
            start = time.monotonic()
            proxy.cut()
            await asyncio.to_thread(bench.lost_event.wait, 5)
            assert 0.25 < time.monotonic() - start < 1.5
            assert len(bench.lost) == 1
            assert "waited 0.3 s for the head at unix:" in bench.lost[0]
            assert len(bench.broken) == 1

    asyncio.run(main())


def test_a_worker_whose_channel_is_closed_is_lost_at_once(bench: Any) -> None:
    async def main() -> None:
        async with bench.serving():
            await bench.connected(budget_s=30)
            bench.channel.close()
            await asyncio.to_thread(bench.lost_event.wait, 5)
            assert bench.lost == ["the head refuses this process: slice 0 host 0 is closed"]
            assert not bench.broken
            bench.channel.send(b"nobody is there")

    asyncio.run(main())


def test_a_worker_that_closes_is_not_lost(bench: Any, wait_until: Any) -> None:
    async def main() -> None:
        async with bench.serving():
            worker = await bench.connected()
            await asyncio.to_thread(worker.close)
            await wait_until(lambda: bench.broken, "the head to notice")
            assert bench.broken == ["the peer closed the connection"]
            assert not bench.lost

    asyncio.run(main())


def test_a_worker_waits_for_a_head_that_is_late(bench: Any, wait_until: Any) -> None:
    async def main() -> None:
        worker = bench.worker(bench.path)
        connecting = asyncio.create_task(asyncio.to_thread(worker.connect, 5))
        await asyncio.sleep(0.1)
        async with bench.serving():
            welcome = await connecting
            assert welcome.pid == os.getpid()

    asyncio.run(main())


def test_a_head_that_is_not_there_is_named(bench: Any) -> None:
    with pytest.raises(WaitTimeout, match=r"waited 0.1 s for the head at unix:/.*No such file"):
        bench.worker(bench.path).connect(0.1)


def test_a_second_process_cannot_take_over_a_channel(bench: Any) -> None:
    async def main() -> None:
        async with bench.serving():
            await bench.connected()
            with pytest.raises(HandshakeError, match="another process is slice 0 host 0"):
                await bench.connected()
            assert bench.channel.connected

    asyncio.run(main())


def test_a_worker_too_far_behind_is_an_error_to_the_sender(bench: Any) -> None:
    async def main() -> None:
        async with bench.serving():
            worker = bench.worker(max_unacked_bytes=10)
            worker.send(b"x" * 11)
            with pytest.raises(ResourceError):
                worker.send(b"y")

    asyncio.run(main())


def test_a_bad_message_is_the_senders_error_and_does_no_harm(bench: Any, wait_until: Any) -> None:
    async def main() -> None:
        async with bench.serving():
            worker = await bench.connected()
            for end in (worker, bench.channel):
                with pytest.raises(FrameError):
                    end.send(b"")
            worker.send(b"fine")
            await wait_until(lambda: bench.at_head == [b"fine"], "the good message")

    asyncio.run(main())


def test_no_descriptor_and_no_thread_is_left(bench: Any, proxy_for: Any, wait_until: Any) -> None:
    def descriptors() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    async def main() -> None:
        before = descriptors(), threading.active_count()
        async with bench.serving(), proxy_for(bench.path).running() as proxy:
            await bench.connected(proxy.path)
            for connections in range(2, 6):
                proxy.cut()
                await wait_until(lambda n=connections: bench.attached >= n, "a new connection")
        await asyncio.sleep(0.05)
        assert descriptors() <= before[0]
        names = [thread.name for thread in threading.enumerate()]
        assert "regrow-channel" not in names

    asyncio.run(main())


@pytest.mark.usefixtures("without_collector")
def test_a_closed_channel_lets_go_of_its_owner() -> None:
    class Owner:
        def __init__(self) -> None:
            self.channel = HeadChannel("slice 0 host 0", self.hear, self.hear, self.attached)

        def hear(self, news: object) -> None:
            pass

        def attached(self) -> None:
            pass

    owner = Owner()
    owner.channel.close()
    gone = weakref.ref(owner)
    del owner
    assert gone() is None
