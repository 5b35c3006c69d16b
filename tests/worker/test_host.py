"""A host, driven by the payloads of a head."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from worker_rig import ADD_ONE, F32, SHARDED, SLOW, TWO_RESULTS, HostRig, Memory, options_of

from regrow.channel import commands as c
from regrow.errors import SLICE_DOWN_WORDS, Code
from regrow.worker.compiler import Compiler
from waiting import until

ONES = np.ones(4, np.float32)


def test_a_whole_day(host: HostRig, compiler: Compiler) -> None:
    """Put, load, execute, take, copy, get, free in one payload, in that order."""
    one, other = host.put(np.float32([1, 2]), 4), host.put(np.float32([3, 4]), 5)
    program = host.load(compiler, SHARDED, (4, 5))
    whole, copied = host.aid(), host.aid()
    host.tell(
        c.Take(whole, [(one, 0), (other, 0)]),
        c.Execute(1, program, [whole], [2001, 2002], 2003),
        c.Copy(copied, [(2001, 1), (2001, 0)], [4, 5], "pinned_host"),
        c.Ready(7001, [2003]),
        c.Get(7002, copied, 0, None, None, None),
        c.Get(7003, 2002, 1, None, None, None),
        c.Free([one, other, whole, 2001, 2002, 2003]),
    )
    assert isinstance(host.reports.answer(7001), c.Reply)
    assert np.frombuffer(host.reports.answer(7002).value, np.float32).tolist() == [4, 5]
    assert np.frombuffer(host.reports.answer(7003).value, np.float32).tolist() == [14]
    assert host.floats(copied, 1) == [2, 3]
    assert len(host.host.store) == 1


def test_pings_are_answered_at_once_and_tell_how_far_the_queue_is() -> None:
    rig = HostRig((0,), running=False)
    rig.tell(c.Free([1]), c.Ping(5), c.Free([2]))
    assert rig.reports.all == [c.Pong(5, 0)]
    rig.start()
    until(lambda: rig.host._done == 2, "the queue")
    rig.tell(c.Ping(-6))
    assert rig.reports.all[1:] == [c.Pong(-6, 2)]
    rig.close()


def test_exit_ends_it() -> None:
    rig = HostRig((0,))
    rig.tell(c.Exit())
    rig._thread.join(10)
    assert not rig._thread.is_alive()
    rig.close()


@pytest.mark.parametrize("payload", [b"\xc1", b"\x05", b"\x92\xcc\xff\x01", b"\x91\x01"])
def test_a_payload_that_is_none(host: HostRig, payload: bytes) -> None:
    with pytest.raises((ValueError, TypeError, IndexError)):
        host.host.on_payload(payload)
    assert isinstance(host.ready(host.put(ONES)), c.Reply)


# --- promises -------------------------------------------------------------------------------------


def promise(host: HostRig, *devices: int) -> int:
    aid = host.aid()
    host.tell(c.Expect(aid, F32, devices or (4,), "device"))
    return aid


def fill(host: HostRig, aid: int, value: Any, shard: int = 0, *, shared: bool = False) -> None:
    value = np.asarray(value, np.float32)
    bulk: Any = value.tobytes()
    lease = 0
    if shared:
        assert host.memory is not None
        bulk, lease = host.memory.put(bulk)
        host.tell(host.memory.segment(bulk))
    host.tell(c.Fill(aid, shard, value.shape, bulk, lease))


@pytest.mark.parametrize("shared", [False, True])
def test_a_promise_is_kept(host: HostRig, shared: bool) -> None:
    aid = promise(host, 5, 4)
    ready = host.asked(lambda rid: c.Ready(rid, [aid]))
    get = host.asked(lambda rid: c.Get(rid, aid, 1, None, None, None))
    copied = host.aid()
    host.tell(c.Copy(copied, [(aid, 0)], [4], "device"))
    taken = host.aid()
    host.tell(c.Take(taken, [(aid, 1)]), c.Free([aid]))
    later = host.put(ONES)
    assert host.floats(later) == [1, 1, 1, 1]  # the executor does not wait
    fill(host, aid, [3, 4], 1, shared=shared)
    assert not host.reports.of(c.Reply)[1:]
    fill(host, aid, [1, 2], 0, shared=shared)
    assert isinstance(host.reports.answer(ready), c.Reply)
    assert np.frombuffer(host.reports.answer(get).value, np.float32).tolist() == [3, 4]
    assert host.floats(copied) == [1, 2]
    assert host.floats(taken) == [3, 4]
    if shared:
        assert host.memory is not None
        until(lambda: len(host.memory.released) == 2, "the releases")  # type: ignore[union-attr]


def test_a_fill_overtakes_the_queue() -> None:
    """The executor may stand still for long; what fills a promise comes at once."""
    rig = HostRig((4, 5), running=False)
    blocked = rig.put(ONES)
    aid = promise(rig)
    fill(rig, aid, [1, 2])
    rig.start()
    assert rig.floats(aid) == [1, 2]
    assert rig.floats(blocked) == [1, 1, 1, 1]
    rig.close()


def test_a_promise_is_broken(host: HostRig) -> None:
    aid = promise(host, 4, 5)
    ready = host.asked(lambda rid: c.Ready(rid, [aid]))
    host.tell(c.FillError(aid, int(Code.DATA_LOSS), "slice 1 was lost"))
    answer = host.reports.answer(ready)
    assert (Code(answer.code), answer.message, answer.epoch) == (
        Code.DATA_LOSS,
        "slice 1 was lost",
        0,
    )
    # What comes of it after all is let go of.
    fill(host, aid, [1, 2], shared=True)
    assert host.memory is not None
    until(lambda: host.memory.released, "the release")  # type: ignore[union-attr]
    assert isinstance(host.get(aid), c.Failed)


def test_a_fill_that_does_not_fit_breaks_the_promise(host: HostRig) -> None:
    aid = promise(host)
    host.tell(c.Fill(aid, 0, (100,), bytes(8), 0))
    answer = host.ready(aid)
    assert isinstance(answer, c.Failed)
    assert not any(word in answer.message for word in SLICE_DOWN_WORDS)


def test_promises_that_nobody_made(host: HostRig) -> None:
    fill(host, 77, [1, 2], shared=True)
    host.tell(c.FillError(78, 15, "text"))
    assert host.memory is not None
    until(lambda: host.memory.released, "the release")  # type: ignore[union-attr]


def test_a_promise_that_is_freed_leaves_nothing_behind(host: HostRig) -> None:
    for _ in range(3):
        aid = promise(host)
        host.tell(c.Free([aid]))
        host.tell(c.FillError(aid, 8, "no room"))
    until(lambda: not len(host.host.store), "the frees")
    promises: Any = host.host._at_once[c.Expect].__self__  # type: ignore[attr-defined]
    assert not promises._open


# --- errors ---------------------------------------------------------------------------------------


def test_numbers_that_are_not_known(host: HostRig) -> None:
    host.tell(
        c.Free([50, 51]),
        c.Unload([52]),
        c.Take(60, [(50, 0)]),
        c.Copy(61, [(50, 0)], [4], "device"),
    )
    for answer in (
        host.ask(lambda rid: c.Get(rid, 50, 0, None, None, None)),
        host.ready(50),
        host.ready(60),
        host.ready(61),
    ):
        assert isinstance(answer, c.Failed)
        assert answer.message == "buffer 50 is not on this host"
        assert Code(answer.code) is Code.FAILED_PRECONDITION


def test_shards_that_there_are_not(host: HostRig) -> None:
    aid = host.put(ONES)
    assert isinstance(host.get(aid, 3), c.Failed)
    host.tell(c.Take(60, [(aid, 3)]))
    assert isinstance(host.ready(60), c.Failed)
    assert host.floats(aid) == [1, 1, 1, 1]


def test_ready_tells_the_first_error_and_waits_for_the_values(
    host: HostRig, compiler: Compiler
) -> None:
    slow = host.load(compiler, SLOW)
    arg = host.put(ONES)
    count = host.put(np.int32(300_000))
    (result,) = host.execute(slow, arg, count)
    ready = host.asked(lambda rid: c.Ready(rid, [result]))
    assert isinstance(host.ready(arg), c.Reply)  # told while the other is computed
    assert isinstance(host.reports.answer(ready), c.Reply)
    broken = promise(host)
    host.tell(c.FillError(broken, int(Code.ABORTED), "text"))
    answer = host.ready(arg, broken, result)
    assert (Code(answer.code), answer.message) == (Code.ABORTED, "text")


def test_a_program_that_cannot_be_loaded(host: HostRig) -> None:
    host.tell(c.Load(9, "broken", b"no blob", b"", options_of(), (4,), 1, [(F32, (4,))], 0))
    (result, status) = host.execute(9, host.put(ONES), status=True)
    for aid in (result, status):
        answer = host.ready(aid)
        assert isinstance(answer, c.Failed)
        assert answer.message
        assert not any(word in answer.message for word in SLICE_DOWN_WORDS)
    host.tell(c.Unload([9]))
    (result,) = host.execute(9, host.put(ONES))
    assert host.ready(result).message == "program 9 is not loaded"


def test_a_put_that_fails_is_the_error_of_its_part(host: HostRig) -> None:
    host.tell(c.Put(5, F32, bytes(4), (c.HostShard(4, 0, (9,), None),), "device", False, 0, False))
    host.tell(c.Put(6, F32, bytes(4), (c.HostShard(77, 0, (1,), None),), "device", False, 0, False))
    host.tell(c.Put(7, 999, bytes(4), (c.HostShard(4, 0, (1,), None),), "device", False, 0, False))
    for aid in (5, 6, 7):
        answer = host.ready(aid)
        assert isinstance(answer, c.Failed)
        assert answer.message


def test_an_epoch_that_has_ended(host: HostRig, compiler: Compiler) -> None:
    program = host.load(compiler, SHARDED, (4, 5), epoch=3)
    (one, two) = host.execute(program, host.put(ONES), outs=2)
    for aid in (one, two):
        answer = host.ready(aid)
        assert (Code(answer.code), answer.epoch) == (Code.DATA_LOSS, 3)
        assert answer.message == "epoch 3 has ended"
    host.tell(c.FailEpoch(3, "slice 1 was lost", []), c.Adopt())
    assert isinstance(host.ready(host.put(ONES)), c.Reply)


# --- memory ---------------------------------------------------------------------------------------


def test_values_go_into_the_heads_memory(host: HostRig) -> None:
    memory = host.memory
    assert memory is not None
    value = np.arange(50_000, dtype=np.float32).reshape(50, 1000)
    aid = host.put(value)
    ref, lease = memory.put(bytes(value.nbytes))
    host.tell(memory.segment(ref))
    answer = host.ask(lambda rid: c.Get(rid, aid, 0, ref, None, None))
    assert answer.value is None
    assert bytes(memory.blocks[lease].view) == value.tobytes()
    answer = host.ask(lambda rid: c.Get(rid, aid, 0, ref, (4, 200), ((0, 50), (10, 20))))
    assert answer.value is None
    got: Any = np.ndarray((50, 10), np.float32, memory.blocks[lease].view, 0, (4, 200))
    np.testing.assert_array_equal(got, value[:, 10:20])
    del got
    forgotten = c.Segment(ref[0], "", 0)
    host.tell(forgotten)
    answer = host.ask(lambda rid: c.Get(rid, aid, 0, ref, None, None))
    assert isinstance(answer, c.Failed)
    assert "is not open" in answer.message


def test_many_threads_of_work(memory: Memory, compiler: Compiler) -> None:
    """Promises, programs and reads in a tangle; each value is right in the end."""
    host = HostRig((4, 5), memory)
    program = host.load(compiler, ADD_ONE)
    two = host.load(compiler, TWO_RESULTS)
    promised = [promise(host) for _ in range(30)]
    sums = []
    for aid in promised:
        (first,) = host.execute(program, aid)
        both = host.execute(two, first, aid, outs=2)
        sums.append((first, both[0], both[1]))

    def filling(start: int) -> None:
        for number in range(start, 30, 3):
            fill(host, promised[number], [number] * 4, shared=bool(number % 2))

    threads = [threading.Thread(target=filling, args=(start,)) for start in range(3)]
    for thread in threads:
        thread.start()
    for number, (first, both, total) in enumerate(sums):
        assert host.floats(first) == [number + 1] * 4
        assert host.floats(both) == [2 * number + 1] * 4
        assert host.floats(total) == [4 * (2 * number + 1)]
    for thread in threads:
        thread.join(10)
    host.close()


def test_what_is_done_at_once_and_fails_costs_only_itself(
    host: HostRig, caplog: pytest.LogCaptureFixture
) -> None:
    aid = host.aid()
    shard = c.HostShard(4, 0, (4,), None)
    host.tell(
        c.Segment(99, "/nowhere/at/all", 64),
        c.Put(aid, F32, ONES.tobytes(), (shard,), "device", False, 0, False),
        c.Ping(5),
    )
    assert host.floats(aid) == [1, 1, 1, 1]
    assert host.reports.of(c.Pong) == [c.Pong(5, 0)]
    assert "Segment" in caplog.text
