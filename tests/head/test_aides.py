"""The compiler is started again when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
from head_world import Answer

from regrow.channel import commands as c
from regrow.channel.head_end import HeadChannel
from regrow.errors import Code, LaunchError
from regrow.head import aides
from regrow.head.aides import Aide
from waiting import until_on_loop


class FakeProcess:
    """A process that ends when the test says so."""

    pid = 4711
    cause: str | None = None

    def __init__(self) -> None:
        self._callback: Callable[[str], None] | None = None

    def on_exit(self, callback: Callable[[str], None]) -> None:
        self._callback = callback

    def kill(self) -> None:
        self.end()

    def end(self, cause: str = "SIGKILL (signal 9)") -> None:
        self.cause = cause
        assert self._callback is not None
        self._callback(cause)


class Bench:
    """A launcher of aides, and the server that admits them."""

    def __init__(self) -> None:
        self.aide = Aide("compiler", "some.module:entry")
        self.aide.on_up = lambda: self.events.append("up")
        self.events: list[str] = []
        self.started: list[tuple[str, Mapping[str, Any], str, str]] = []
        self.processes: list[FakeProcess] = []
        self.admitted: list[tuple[str, HeadChannel]] = []
        self.refusals = 0

    async def start_entry(
        self, entry: str, spec: Mapping[str, Any], label: str, name: str
    ) -> FakeProcess:
        self.started.append((entry, spec, label, name))
        await asyncio.sleep(0)
        if self.refusals:
            self.refusals -= 1
            raise LaunchError("no more processes")
        self.processes.append(FakeProcess())
        return self.processes[-1]

    async def start(self) -> None:
        await self.aide.start(self, {"devices": [0, 1]}, lambda *a: self.admitted.append(a))  # type: ignore[arg-type]

    def says(self, command: Any) -> None:
        """The process that was started last reports."""
        self.admitted[-1][1]._on_payload(c.pack(command))

    async def lives(self, count: int) -> None:
        """Waits until so many processes have been started."""
        await until_on_loop(lambda: len(self.started) >= count, f"life {count}")
        await asyncio.sleep(0.001)


def run(test: Callable[[Bench], Awaitable[None]]) -> None:
    async def main() -> None:
        bench = Bench()
        await bench.start()
        await test(bench)
        bench.aide.close()

    asyncio.run(main())


@pytest.fixture(autouse=True)
def _in_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aides, "_BACKOFF_S", (0.001, 0.05, 0.05, 0.05))


def test_it_is_there_once_it_says_so() -> None:
    async def main(bench: Bench) -> None:
        assert bench.aide.link is None
        entry, spec, label, _ = bench.started[0]
        assert (entry, label) == ("some.module:entry", "compiler")
        assert spec == {"devices": [0, 1], "slice": 0, "host": 0, "incarnation": 1}
        assert bench.admitted[0][0] == "compiler"
        bench.says(c.Up("0.10.2", True))
        assert bench.aide.link is not None
        assert bench.events == ["up"]

    run(main)


def test_answers() -> None:
    async def main(bench: Bench) -> None:
        bench.says(c.Up("0.10.2", True))
        link = bench.aide.link
        assert link is not None
        fine, failed = Answer(), Answer()
        for answer in (fine, failed):
            link.ask(lambda rid: c.Describe(rid, "text", b"", b"", b"", 1), answer)
        bench.says(c.Failed(2, 3, "no", 0))
        bench.says(c.Reply(1, {"text": "x"}))
        bench.says(c.Pong(1, 0))
        assert fine.value == {"text": "x"}
        assert failed.error is not None
        assert (failed.error.code, failed.error.message) == (Code.INVALID_ARGUMENT, "no")

    run(main)


def test_its_end_fails_what_was_asked_and_it_comes_back() -> None:
    async def main(bench: Bench) -> None:
        bench.says(c.Up("0.10.2", True))
        answer = Answer()
        assert bench.aide.link is not None
        bench.aide.link.ask(lambda rid: c.Describe(rid, "text", b"", b"", b"", 1), answer)
        bench.processes[0].end("SIGSEGV (signal 11)")
        assert answer.error is not None
        assert answer.error.code is Code.UNAVAILABLE
        assert answer.error.message == "the compiler ended: SIGSEGV (signal 11)"
        assert bench.aide.link is None
        assert bench.events == ["up"]
        await bench.lives(2)
        assert bench.started[1][1]["incarnation"] == 2
        bench.says(c.Up("0.10.2", True))
        assert bench.events == ["up", "up"]
        assert bench.admitted[1][1] is not bench.admitted[0][1]

    run(main)


def test_one_that_never_comes_up_is_tried_with_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(bench: Bench) -> None:
        delays: list[float] = []
        loop = asyncio.get_running_loop()
        call_later = loop.call_later

        def noting(delay: float, *rest: Any, **more: Any) -> Any:
            if rest[0] != bench.aide._start_again:
                return call_later(delay, *rest, **more)
            delays.append(delay)
            return call_later(0, *rest, **more)

        monkeypatch.setattr(loop, "call_later", noting)
        for life in range(1, 6):
            bench.processes[-1].end("exit status 1")
            await bench.lives(life + 1)
        assert delays == [0.05] * 5
        bench.says(c.Up("0.10.2", True))

    monkeypatch.setattr(aides, "_BACKOFF_S", (0.001, 0.05))
    run(main)


def test_one_that_was_up_long_is_tried_at_once_however_often_it_failed_to_start_before() -> None:
    async def main(bench: Bench) -> None:
        for life in range(1, 4):
            bench.processes[-1].end("exit status 1")
            await bench.lives(life + 1)
        bench.says(c.Up("0.10.2", True))
        assert bench.aide._failures == 0
        bench.processes[-1].end()
        await bench.lives(5)

    run(main)


def test_a_launch_that_fails_is_repeated() -> None:
    async def main(bench: Bench) -> None:
        bench.refusals = 2
        bench.processes[0].end()
        await bench.lives(4)
        assert len(bench.processes) == 2
        bench.says(c.Up("0.10.2", True))
        assert bench.aide.link is not None

    run(main)


def test_after_close_it_is_not_started_again() -> None:
    async def main(bench: Bench) -> None:
        bench.says(c.Up("0.10.2", True))
        bench.aide.close()
        bench.processes[0].end()
        await asyncio.sleep(0.02)
        assert len(bench.started) == 1
        assert bench.events == ["up"]

    run(main)


def test_closed_while_it_waits_to_be_started_again() -> None:
    async def main(bench: Bench) -> None:
        bench.processes[0].end()
        bench.aide.close()
        await asyncio.sleep(0.08)
        assert len(bench.started) == 1

    run(main)


def test_one_that_is_silent_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aides, "_PING_S", 0.01)

    async def main(bench: Bench) -> None:
        await bench.start()  # The first one was started with longer pauses.
        bench.says(c.Up("0.10.2", True))
        for _ in range(30):
            bench.says(c.Pong(1, 0))
            await asyncio.sleep(0.01)
        assert len(bench.started) == 2
        answer = Answer()
        link = bench.aide.link
        assert link is not None
        link.ask(lambda rid: c.Describe(rid, "text", b"", b"", b"", 1), answer)
        await bench.lives(3)
        assert answer.error is not None
        assert answer.error.code is Code.UNAVAILABLE

    run(main)
