"""Bytes in and out of real XLA arrays."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxlib import _jax
from worker_rig import ADD_ONE, DONATING, F32, HostRig, Memory

from regrow.channel import commands as c
from regrow.channel.commands import HostShard
from regrow.errors import ChannelError, StatusError
from regrow.wire.dtypes import TOKEN, kind_of
from regrow.worker import transfers
from regrow.worker.compiler import Compiler
from regrow.worker.platform import Domain
from regrow.worker.store import Part, PartError, Store
from waiting import until

KINDS = [
    np.dtype(d)
    for d in (
        "bool",
        "int8",
        "int64",
        "uint16",
        "float16",
        "float64",
        "complex128",
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.int4,
        ml_dtypes.uint4,
        ml_dtypes.int2,
        ml_dtypes.float4_e2m1fn,
    )
]


def never() -> None:
    raise AssertionError("released, though there is no lease")


def put_bytes(domain: Domain, bulk: Any, shards: list[HostShard], **how: Any) -> Part:
    kind, memory = how.get("kind", F32), how.get("memory")
    view = memory.view if memory is not None else None
    lease = how.get("lease", 0)
    release = (lambda: memory.release(lease)) if lease else never
    command = c.Put(
        1, kind, bulk, shards, how.get("where", "device"), False, lease, how.get("keep", False)
    )
    return transfers.put(command, view, domain, release)  # type: ignore[arg-type]


def read(part: Part, shard: int = 0, **how: Any) -> Any:
    command = c.Get(1, 1, shard, how.get("bulk"), how.get("strides"), how.get("region"))
    memory = how.get("memory")
    view = memory.view if memory is not None else None
    return transfers.hand_over(command, transfers.value(command, part), view)  # type: ignore[arg-type]


def collect() -> None:
    """XLA leaves the last references to Python objects to be dropped when it is asked to."""
    _jax.collect_garbage()


# --- in -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_each_kind_of_element(home: Domain, dtype: np.dtype[Any]) -> None:
    value = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    shards = [HostShard(5, 0, (2, 3), None), HostShard(4, 0, (2, 3), None)]
    part = put_bytes(home, value.tobytes(), shards, kind=kind_of(dtype))
    assert part.devices == [5, 4]
    for shard in range(2):
        assert read(part, shard) == value.tobytes()
        assert part.singles()[shard].dtype == dtype


@pytest.mark.parametrize("where", ["device", "pinned_host", "unpinned_host"])
def test_each_kind_of_memory(home: Domain, where: str) -> None:
    value = np.arange(6, dtype=np.float32)
    part = put_bytes(home, value.tobytes(), [HostShard(4, 0, (6,), None)], where=where)
    assert read(part) == value.tobytes()
    assert part.singles()[0].sharding.memory_kind == where


def test_a_memory_that_there_is_not(home: Domain) -> None:
    with pytest.raises(Exception, match="no_such"):
        put_bytes(home, bytes(4), [HostShard(4, 0, (1,), None)], where="no_such")


def test_empty_arrays(home: Domain) -> None:
    part = put_bytes(home, b"", [HostShard(4, 0, (0, 8), None), HostShard(5, 0, (3, 0), None)])
    assert read(part) == read(part, 1) == b""
    assert [single.shape for single in part.singles()] == [(0, 8), (3, 0)]


def test_a_token_has_no_bytes(home: Domain) -> None:
    with pytest.raises(StatusError, match="element type number 17"):
        put_bytes(home, b"", [HostShard(4, 0, (), None)], kind=TOKEN)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_shards_with_any_strides(home: Domain, data: st.DataObject) -> None:
    """Each shard is a window of an array in memory, whatever its strides."""
    rank = data.draw(st.integers(0, 3))
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=rank, max_size=rank)))
    whole = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    shown = np.transpose(whole, data.draw(st.permutations(range(rank))))
    if data.draw(st.booleans()) and rank:
        shown = np.broadcast_to(shown[:1], shown.shape)
    starts = [data.draw(st.integers(0, dim - 1)) for dim in shown.shape]
    stops = [data.draw(st.integers(s + 1, dim)) for s, dim in zip(starts, shown.shape, strict=True)]
    window = shown[tuple(slice(*part) for part in zip(starts, stops, strict=True))]
    offset = sum(s * step for s, step in zip(starts, shown.strides, strict=True))
    shard = HostShard(4, offset, window.shape, shown.strides)
    part = put_bytes(home, whole.tobytes(), [shard])
    assert read(part) == window.tobytes()


def test_a_shard_that_lies_outside_its_bytes(home: Domain) -> None:
    for shard in (
        HostShard(4, 0, (5,), None),
        HostShard(4, 8, (3,), None),
        HostShard(4, 0, (2,), (16,)),
        HostShard(4, 0, (1 << 40, 1 << 40), None),
    ):
        with pytest.raises((ValueError, TypeError)):
            put_bytes(home, bytes(16), [shard])


# --- shared memory --------------------------------------------------------------------------------


def in_memory(home: Domain, memory: Memory, value: Any, *, keep: bool) -> tuple[Part, int]:
    ref, lease = memory.put(value.tobytes())
    shards = [HostShard(4, 0, value.shape, None)]
    return put_bytes(home, ref, shards, memory=memory, lease=lease, keep=keep), lease


def test_a_kept_array_lives_in_shared_memory_as_long_as_it_lives(
    home: Domain, memory: Memory
) -> None:
    value = np.arange(40_000, dtype=np.float32)
    part, lease = in_memory(home, memory, value, keep=True)
    (single,) = part.singles()
    mapping = np.frombuffer(memory.view.view(memory.blocks[lease].ref()), np.uint8)
    assert single.unsafe_buffer_pointer() == mapping.ctypes.data
    del mapping
    collect()
    assert not memory.released
    # Other blocks come and go meanwhile, and the values stay.
    for number in range(20):
        other, _ = in_memory(home, memory, value + number, keep=True)
        assert read(other) == (value + number).tobytes()
        del other
        collect()
    assert lease not in memory.released
    assert read(part) == value.tobytes()
    del part
    collect()
    assert lease not in memory.released
    copied = np.array(single)
    del single
    collect()
    assert lease in memory.released
    assert copied.tobytes() == value.tobytes()


def test_the_lease_of_a_copied_array_ends_at_once(home: Domain, memory: Memory) -> None:
    value = np.arange(40_000, dtype=np.float32)
    part, lease = in_memory(home, memory, value, keep=False)
    collect()
    assert memory.released == [lease]  # which overwrites the block
    assert read(part) == value.tobytes()


def test_a_block_of_several_shards_is_kept_for_the_last(home: Domain, memory: Memory) -> None:
    value = np.arange(80_000, dtype=np.float32)
    ref, lease = memory.put(value.tobytes())
    shards = [HostShard(4, 0, (40_000,), None), HostShard(5, 160_000, (40_000,), None)]
    part = put_bytes(home, ref, shards, memory=memory, lease=lease, keep=True)
    first, second = part.singles()
    del part, first
    collect()
    assert not memory.released
    assert np.asarray(second).tobytes() == value[40_000:].tobytes()
    del second
    collect()
    assert memory.released == [lease]


@pytest.mark.parametrize("shared", [True, False])
def test_a_donated_array_that_lives_in_foreign_memory(
    host: HostRig, compiler: Compiler, shared: bool
) -> None:
    """XLA must not write its result there: others may read it, and `bytes` are for ever."""
    program = host.load(compiler, DONATING)
    value = np.full(4, 7, np.float32)
    first, second = (
        host.put(value, shared=shared, keep=True),
        host.put(value, shared=shared, keep=True),
    )
    (result,) = host.execute(program, first)
    assert host.floats(result) == [8, 8, 8, 8]
    assert host.floats(second) == [7, 7, 7, 7]
    assert value.tolist() == [7, 7, 7, 7]
    for block in host.memory.blocks.values():  # type: ignore[union-attr]
        assert np.frombuffer(block.view, np.float32).tolist() == [7, 7, 7, 7]
    (again,) = host.execute(program, result)
    assert host.floats(again) == [9, 9, 9, 9]


def test_a_host_releases_what_is_freed(host: HostRig, compiler: Compiler) -> None:
    memory = host.memory
    assert memory is not None
    program = host.load(compiler, ADD_ONE)
    arg = host.put(np.arange(4, dtype=np.float32), shared=True, keep=True)
    (result,) = host.execute(program, arg)
    assert host.floats(result) == [1, 2, 3, 4]
    assert not memory.released
    host.tell(c.Free((arg,)))
    until(lambda: memory.released, "the release")
    assert host.floats(result) == [1, 2, 3, 4]


def test_what_fails_is_released_too(host: HostRig) -> None:
    memory = host.memory
    assert memory is not None
    ref, lease = memory.put(bytes(400))
    host.tell(memory.segment(ref))
    bad_kind = c.Put(1, 777, ref, (HostShard(4, 0, (4,), None),), "device", False, lease, True)
    host.tell(bad_kind)
    assert isinstance(host.get(1), c.Failed)
    ref, other = memory.put(bytes(400))
    bad_place = c.Put(2, F32, ref, (HostShard(9, 0, (4,), None),), "device", False, other, True)
    host.tell(bad_place)
    assert isinstance(host.get(2), c.Failed)
    until(lambda: sorted(memory.released) == [lease, other], "the releases")


def test_a_segment_that_is_not_open(home: Domain, memory: Memory) -> None:
    with pytest.raises(ChannelError, match="segment 99"):
        put_bytes(home, (99, 0, 4), [HostShard(4, 0, (1,), None)], memory=memory)


# --- out ------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_regions_and_strides(home: Domain, data: st.DataObject) -> None:
    """Any rectangle of a shard, laid out as wanted, inline or in place."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
    whole = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    part = put_bytes(home, whole.tobytes(), [HostShard(4, 0, shape, None)])
    region = [sorted(data.draw(st.tuples(st.integers(0, d), st.integers(0, d)))) for d in shape]
    inside = whole[tuple(slice(*part) for part in region)]
    assert read(part, region=region) == inside.tobytes()
    order = data.draw(st.permutations(range(len(shape))))
    strides, step = [0] * len(shape), 4
    for axis in order:
        strides[axis] = step
        step *= inside.shape[axis] + data.draw(st.integers(0, 1))
    if not inside.size:
        assert read(part, region=region, strides=tuple(strides)) == b""
        return
    got = read(part, region=region, strides=tuple(strides))
    laid: Any = np.ndarray(inside.shape, np.float32, got, 0, strides)
    np.testing.assert_array_equal(laid, inside)
    memory = Memory()
    try:
        ref, lease = memory.put(bytes(len(got) + 8))
        target = (ref[0], ref[1] + 8, ref[2] - 8)
        where = {"bulk": target, "strides": tuple(strides), "region": region, "memory": memory}
        assert read(part, **where) is None
        view = bytes(memory.blocks[lease].view)
        assert view[:8] == bytes(8)
        laid = np.ndarray(inside.shape, np.float32, view, 8, strides)
        np.testing.assert_array_equal(laid, inside)
    finally:
        memory.close()


def test_what_does_not_fit_is_not_written(home: Domain, memory: Memory) -> None:
    part = put_bytes(home, bytes(64), [HostShard(4, 0, (16,), None)])
    ref, lease = memory.put(b"\x11" * 64)
    for target, strides in (((ref[0], ref[1], 60), None), (ref, (8,)), (ref, (4, 4)), (ref, (-4,))):
        with pytest.raises((ValueError, TypeError)):
            read(part, bulk=target, strides=strides, memory=memory)
    assert bytes(memory.blocks[lease].view) == b"\x11" * 64


def test_reading_an_error(home: Domain) -> None:
    from regrow.errors import Code

    part = Part.failed(home, PartError(Code.ABORTED, "no value", 3))
    with pytest.raises(PartError, match="no value") as caught:
        read(part)
    assert caught.value.epoch == 3


# --- between devices ------------------------------------------------------------------------------


def test_take_shares_and_copy_copies(home: Domain) -> None:
    value = np.arange(8, dtype=np.float32)
    shards = [HostShard(4, 0, (4,), None), HostShard(5, 16, (4,), None)]
    part = put_bytes(home, value.tobytes(), shards)
    taken = transfers.take([(part, 1), (part, 0)])
    assert taken.devices == [5, 4]
    assert taken.singles()[0] is part.singles()[1]
    copied = transfers.copy([(part, 0), (part, 1)], [5, 5], "pinned_host", home)
    assert [read(copied, 0), read(copied, 1)] == [value[:4].tobytes(), value[4:].tobytes()]
    assert [single.sharding.memory_kind for single in copied.singles()] == ["pinned_host"] * 2
    pointers = {single.unsafe_buffer_pointer() for single in copied.singles()}
    assert not pointers & {s.unsafe_buffer_pointer() for s in part.singles()}


def test_take_and_copy_of_errors(home: Domain) -> None:
    good = put_bytes(home, bytes(16), [HostShard(4, 0, (4,), None)])
    bad = Store(home).get(9)
    with pytest.raises(PartError, match="buffer 9 is not on this host"):
        transfers.take([(good, 0), (bad, 0)])
    with pytest.raises(PartError, match="buffer 9 is not on this host"):
        transfers.copy([(bad, 0)], [4], "device", home)
    with pytest.raises(PartError, match="device 7 is not on this host"):
        transfers.copy([(good, 0)], [7], "device", home)


def test_take_across_domains_of_one_host() -> None:
    one, other = Domain.home((0, 1)), Domain.home((0, 1))
    first = put_bytes(one, np.float32([1, 2]).tobytes(), [HostShard(0, 0, (2,), None)])
    second = put_bytes(other, np.float32([3, 4]).tobytes(), [HostShard(1, 0, (2,), None)])
    pointer = second.singles()[0].unsafe_buffer_pointer()
    taken = transfers.take([(first, 0), (second, 0)])
    assert taken.domain is one
    assert second.domain is one
    assert taken.singles()[1].unsafe_buffer_pointer() == pointer
    assert np.frombuffer(read(taken, 1), np.float32).tolist() == [3, 4]
