"""Commands of one turn, answers that come once, and shared memory that outlives nobody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from head_world import Answer, Recorder
from hypothesis import given
from hypothesis import strategies as st

from regrow.channel import commands as c
from regrow.channel.arena import Arena, ArenaView
from regrow.errors import Code, ResourceError, SliceLostError, StatusError
from regrow.head import links
from regrow.head.links import Lease, Link, gather, unknown

LOSS = SliceLostError(1, 1, "SIGKILL (signal 9)")


def run(test: Callable[[Link, Recorder], Any]) -> None:
    async def main() -> None:
        link, channel = Link("slice 1 host 0", 1, 1, 1), Recorder()
        link.attach(channel)
        await test(link, channel)

    asyncio.run(main())


def test_commands_of_one_turn_are_one_payload() -> None:
    async def main(link: Link, channel: Recorder) -> None:
        link.send(c.Ping(1))
        link.post(c.pack(c.Ping(2)))
        link.free(7)
        link.free(8)
        assert not channel.payloads
        await asyncio.sleep(0)
        assert len(channel.payloads) == 1
        assert channel.commands == [c.Ping(1), c.Ping(2), c.Free((7, 8))]
        await asyncio.sleep(0)
        assert len(channel.payloads) == 1

    run(main)


def test_frees_go_along_with_the_next_payload_or_soon() -> None:
    async def main(link: Link, channel: Recorder) -> None:
        await asyncio.sleep(0)
        link.free(1)
        await asyncio.sleep(0)
        assert not channel.payloads
        link.free(2)
        link.send(c.Ping(1))
        await asyncio.sleep(0)
        assert channel.commands == [c.Ping(1), c.Free((1, 2))]
        link.free(3)
        link.free(4)
        deadline = time.monotonic() + 5
        while len(channel.payloads) < 2:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.001)
        assert channel.of(c.Free)[1:] == [c.Free((3, 4))]

    run(main)


def test_what_was_sent_before_the_channel_was_there_is_not_lost() -> None:
    async def main() -> None:
        link = Link("compiler")
        link.send(c.Ping(1))
        link.free(3)
        await asyncio.sleep(0)
        channel = Recorder()
        link.attach(channel)
        await asyncio.sleep(0)
        assert channel.commands == [c.Ping(1), c.Free((3,))]

    asyncio.run(main())


def test_answers_find_who_asked() -> None:
    async def main(link: Link, channel: Recorder) -> None:
        first, second, third = Answer(), Answer(), Answer()
        for answer in (first, second, third):
            link.ask(lambda rid: c.Ready(rid, (1,)), answer)
        await asyncio.sleep(0)
        rids = [command.rid for command in channel.commands]
        assert len(set(rids)) == 3
        assert link.waiting == 3
        link.answered(rids[1], None, "second")
        link.answered(rids[0], StatusError(Code.UNKNOWN, "no"), None)
        link.answered(rids[0], None, "again")
        link.answered(99, None, "nobody")
        assert second.value == "second"
        assert first.error is not None
        assert not third.there
        assert link.waiting == 1

    run(main)


def test_a_loss_ends_all_waits_once_and_for_ever() -> None:
    async def main(link: Link, channel: Recorder) -> None:
        before, after = Answer(), Answer()
        link.ask(lambda rid: c.Ready(rid, ()), before)
        link.send(c.Ping(1))
        link.lose(LOSS)
        assert before.error is LOSS
        assert channel.closed
        link.ask(lambda rid: c.Ready(rid, ()), after)
        assert after.error is LOSS
        link.answered(1, None, "late")
        link.send(c.Ping(2))
        await asyncio.sleep(0)
        assert not channel.payloads

    run(main)


def test_a_waiter_may_ask_again_while_the_link_is_being_lost() -> None:
    async def main(link: Link, channel: Recorder) -> None:
        again = Answer()
        link.ask(
            lambda rid: c.Ready(rid, ()),
            lambda error, value: link.ask(lambda rid: c.Ready(rid, ()), again),
        )
        link.lose(LOSS)
        assert again.error is LOSS
        assert not link.waiting

    run(main)


def test_a_segment_is_told_before_it_is_used_and_once() -> None:
    async def main(link: Link, channel: Recorder) -> None:
        arena = Arena(1 << 24)
        one, other = Lease(arena, 100), Lease(arena, 200)
        one.view[:5] = b"hello"
        ref = link.reach(one)
        assert link.reach(one) == ref
        link.reach(other)
        await asyncio.sleep(0)
        told = channel.of(c.Segment)
        assert [command.segment for command in told] == list(
            dict.fromkeys([one.block.segment_id, other.block.segment_id])
        )
        memory = ArenaView()
        memory.open(*told[0])
        assert bytes(memory.view(ref)[:5]) == b"hello"
        link.forget_segment(ref[0])
        link.forget_segment(ref[0])
        link.forget_segment(12345)
        await asyncio.sleep(0)
        assert channel.of(c.Segment)[len(told) :] == [c.Segment(ref[0], "", 0)]
        del one, other
        arena.close()

    run(main)


def test_memory_is_held_until_it_is_released_and_by_a_lost_host_until_its_end() -> None:
    async def main(link: Link, channel: Recorder) -> None:
        arena = Arena(1 << 24)
        lease = Lease(arena, 1 << 16)
        held, held_twice = link.hold(lease), link.hold(lease)
        del lease
        assert arena.used_bytes
        link.released((held,))
        link.released((held, 999))
        assert arena.used_bytes
        link.released((held_twice,))
        assert not arena.used_bytes
        link.hold(Lease(arena, 1 << 16))
        link.lose(LOSS)  # It may still be writing.
        assert arena.used_bytes
        link.ended()
        assert not arena.used_bytes
        arena.close()

    run(main)


@given(st.lists(st.booleans(), min_size=1, max_size=6))
def test_gather_answers_once(outcomes: list[bool]) -> None:
    answer = Answer()
    one = gather(len(outcomes), answer)
    for number, fine in enumerate(outcomes):
        due = number == len(outcomes) - 1 or not all(outcomes[:number])
        assert not answer.there or due or not all(outcomes[:number])
        one(None if fine else StatusError(Code.UNKNOWN, f"number {number}"), number)
    assert answer.there
    if all(outcomes):
        assert answer.error is None
    else:
        assert answer.error is not None
        assert answer.error.message == f"number {outcomes.index(False)}"


def test_gather_tells_the_first_error_at_once() -> None:
    answer = Answer()
    one = gather(3, answer)
    one(StatusError(Code.UNKNOWN, "first"), None)
    assert answer.there
    one(StatusError(Code.UNKNOWN, "second"), None)
    one(None, None)


def test_an_unknown_handle_is_the_users_own_fault() -> None:
    with pytest.raises(StatusError, match="array handle 5 is not known") as caught:
        raise unknown("array handle 5")
    assert caught.value.code is Code.INVALID_ARGUMENT


def test_more_than_a_message_may_hold_goes_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MAX_PAYLOAD_BYTES", 40)

    async def main(link: Link, channel: Recorder) -> None:
        commands = [c.CallbackResult(call, b"x" * 10) for call in range(5)]
        for command in commands:
            link.send(command)
        with pytest.raises(ResourceError, match="a message to slice 1 host 0"):
            link.send(c.CallbackResult(5, b"x" * 50))
        answer = Answer()
        with pytest.raises(ResourceError):
            link.ask(lambda rid: c.Ready(rid, list(range(1000, 1100))), answer)
        assert not link.waiting
        await asyncio.sleep(0)
        assert channel.commands == commands
        assert len(channel.payloads) > 1

    run(main)


def test_a_process_that_is_far_behind_gets_its_commands_later() -> None:
    async def main(link: Link, channel: Recorder) -> None:
        send, refusals = channel.send, [ResourceError("messages", 2, 1)] * 2

        def full(payload: Any) -> None:
            if refusals:
                raise refusals.pop()
            send(payload)

        channel.send = full  # type: ignore[method-assign]
        link.send(c.Ping(1))
        await asyncio.sleep(0)
        link.send(c.Ping(2))
        for _ in range(500):
            if len(channel.commands) < 2:
                await asyncio.sleep(0.01)
        assert channel.commands == [c.Ping(1), c.Ping(2)]

    run(main)
