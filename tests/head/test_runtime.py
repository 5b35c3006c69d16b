"""What the parts of a head do together."""

from __future__ import annotations

import asyncio

import pytest
from head_world import Answer, Recorder, World, run

from regrow.channel import commands as c
from regrow.channel import rgcb
from regrow.errors import Code, StatusError
from regrow.head import links
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
