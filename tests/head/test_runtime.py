"""What the parts of a head do together."""

from __future__ import annotations

import asyncio

import pytest
from head_world import Answer, Recorder, World, run

from regrow.channel import commands as c
from regrow.channel import rgcb
from regrow.errors import Code, SliceLostError, StatusError
from regrow.head import links
from regrow.head import runtime as runtimes
from regrow.head.links import Link


def test_an_answer_of_a_callback_that_no_message_holds_fails_its_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "MAX_PAYLOAD_BYTES", 1000)

    async def main(world: World) -> None:
        monkeypatch.setattr(world.runtime.callbacks, "call", lambda *call: call[-1](b"x" * 2000))
        link, channel = Link("slice 0 host 0"), Recorder()
        link.attach(channel)
        world.runtime.call_client(link, c.Callback(7, "0" * 16, 1, 0, b""))
        await asyncio.sleep(0)
        (result,) = channel.of(c.CallbackResult)
        assert result.call == 7
        answer = rgcb.parse_answer(memoryview(result.answer))
        assert isinstance(answer, tuple)
        assert answer[0] is Code.RESOURCE_EXHAUSTED
        assert "the limit is 1000 bytes" in answer[1]

    run(main)


def test_the_end_of_the_head_ends_every_wait() -> None:
    async def main(world: World) -> None:
        waits = [Answer() for _ in range(3)]
        host, other = world.hosts[0].link, world.hosts[1].link
        other.ask(lambda rid: c.Ready(rid, [1]), waits[0])
        world.runtime.compiler.compile(b"program", b"", False, 0, waits[1])
        world.runtime.end(StatusError(Code.UNAVAILABLE, "the head failed"))
        host.ask(lambda rid: c.Ready(rid, [1]), waits[2])
        assert [str(wait.error) for wait in waits] == ["UNAVAILABLE: the head failed"] * 3

    run(main)


@pytest.mark.parametrize("lives", [True, False])
def test_a_lack_of_memory_is_told_once_its_host_has_outlived_it(
    monkeypatch: pytest.MonkeyPatch, lives: bool
) -> None:
    monkeypatch.setattr(runtimes, "_LAST_WORD_S", 0.05)
    text = "Out of memory allocating 8388608 bytes."

    async def main(world: World) -> None:
        link, wait, asked = Link("slice 1 host 0", 1, 1, 1), Answer(), list[int]()
        link.ask(lambda rid: asked.append(rid) or c.Ready(rid, [1]), wait)
        world.runtime.report(link, c.Failed(asked[0], int(Code.RESOURCE_EXHAUSTED), text, 0))
        await asyncio.sleep(0.01)
        assert not wait.calls
        if not lives:
            link.lose(SliceLostError(1, 1, "was lost: SIGABRT"))
        await asyncio.sleep(0.1)
        code = "RESOURCE_EXHAUSTED: Out of memory" if lives else "DATA_LOSS: slice 1 was lost"
        assert str(wait.error).startswith(code)
        assert len(wait.calls) == 1

    run(main)


def test_a_program_across_hosts_that_lacks_memory_ends_as_the_loss_that_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtimes, "_LAST_WORD_S", 0.05)

    async def main(world: World) -> None:
        runtime = world.runtime
        number = runtime.epochs.covering([0, 1])
        # As a launch reports it whose error may be that of its links.
        lack = c.EpochBroken(number, 1, "RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.")
        runtime.report(world.hosts[1].link, lack)
        verdicts: list[StatusError] = []
        for host in (0, 1):
            runtime.epochs.alive(host, -1)
        world.lose(1, "was lost: SIGABRT")
        runtime.epochs.judge(number, StatusError(Code.UNKNOWN, lack.message), verdicts.append)
        await asyncio.sleep(0.1)
        assert [str(one) for one in verdicts] == ["DATA_LOSS: slice 1 was lost: SIGABRT"]

    run(main)
