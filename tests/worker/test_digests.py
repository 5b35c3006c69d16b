"""Content hashes of shards: every bit counts, and who makes them waits for nobody."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xxhash
from worker_rig import DONATING, F32, HostRig

from regrow.channel import commands as c
from regrow.channel.digests import HASH_BYTES
from regrow.worker.compiler import Compiler
from regrow.worker.digests import digest
from regrow.worker.platform import Domain
from regrow.worker.store import Part

DTYPES = (
    np.bool_, np.int8, np.uint16, np.int32, np.uint64, np.float16, np.float32, np.float64,
    np.complex64, np.complex128, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4,
)  # fmt: skip


@pytest.fixture(scope="module")
def home() -> Domain:
    return Domain.home((4, 5))


def hash_of(home: Domain, value: Any) -> bytes:
    part = Part(home, [4], [home.put(np.asarray(value), 4, "pinned_host")])
    (hashes,) = digest([(part, 0)], 4, home)
    again, copy = digest([(part, 0)], 4, home, "pinned_host")
    assert (copy.shape, copy.dtype) == (np.shape(value), value.dtype)
    assert np.asarray(copy).tobytes() == np.asarray(value).tobytes()
    assert hashes.shape == (1, 1, HASH_BYTES)
    assert np.array_equal(hashes, again)
    return np.asarray(hashes).tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_every_bit_counts(home: Domain, dtype: Any) -> None:
    value = np.ones(2, dtype)
    bits = 1 if dtype is np.bool_ else 4 if dtype is ml_dtypes.int4 else 8 * value.itemsize
    seen = {hash_of(home, value)}
    for bit in range(bits):
        changed = value.copy()
        changed.view(np.uint8)[value.itemsize + bit // 8] ^= 1 << bit % 8
        seen.add(hash_of(home, changed))
    assert len(seen) == 1 + bits


@pytest.mark.parametrize("shape", [(1,), (0, 3), (3, 5), (700, 501)])
def test_it_is_that_of_the_bytes(home: Domain, shape: tuple[int, ...]) -> None:
    value = np.random.default_rng(3).random(shape, np.float32)
    assert hash_of(home, value) == xxhash.xxh3_128_digest(value.tobytes())


def hashes_of(host: HostRig, aid: int, shard: int) -> Any:
    rid = host.asked(lambda rid: c.Get(rid, aid, shard, None, None, None))
    answer = host.reports.answer(rid)
    assert isinstance(answer, c.Reply), answer
    return np.frombuffer(answer.value, np.uint8).reshape(-1, HASH_BYTES)


def test_each_device_has_those_of_its_shards_array_by_array(host: HostRig) -> None:
    values = np.arange(4, dtype=np.float32).reshape(4, 1)
    first, second, third, fourth = (
        host.put(value, device) for value, device in zip(values, (5, 4, 5, 4), strict=True)
    )
    aid = host.aid()
    sources = [(first, 0), (second, 0), (third, 0), (fourth, 0)]
    host.tell(c.Digest(aid, sources, [5, 4], [], ""), c.Free([first, second, third, fourth]))
    for shard, mine in enumerate((values[::2], values[1::2])):
        wanted = [xxhash.xxh3_128_digest(value.tobytes()) for value in mine]
        assert [row.tobytes() for row in hashes_of(host, aid, shard)] == wanted


def test_copies_are_what_is_hashed_and_outlive_the_source(
    host: HostRig, compiler: Compiler
) -> None:
    """The source is given away to a program in the same payload."""
    value = np.float32([1, 2, 3, 4])
    source = host.put(value, 4)
    program = host.load(compiler, DONATING, (4,))
    aid, copy, out = host.aid(), host.aid(), host.aid()
    host.tell(
        c.Digest(aid, [(source, 0)], [4], [copy], "pinned_host"),
        c.Execute(1, program, [source], [out], 0),
    )
    assert hashes_of(host, aid, 0)[0].tobytes() == xxhash.xxh3_128_digest(value.tobytes())
    assert host.floats(out) == [2, 3, 4, 5]
    assert host.floats(copy) == [1, 2, 3, 4]


def test_it_waits_for_the_values_and_the_executor_does_not(host: HostRig) -> None:
    promised, aid, copy = host.aid(), host.aid(), host.aid()
    host.tell(
        c.Expect(promised, F32, (4,), "device"),
        c.Digest(aid, [(promised, 0)], [4], [copy], "pinned_host"),
    )
    value = np.float32([1, 2])
    assert host.floats(host.put(value)) == [1, 2]
    host.tell(c.Fill(promised, 0, value.shape, value.tobytes(), 0))
    assert hashes_of(host, aid, 0)[0].tobytes() == xxhash.xxh3_128_digest(value.tobytes())
    assert host.floats(copy) == [1, 2]


def test_what_has_no_value_has_neither_hash_nor_copy(host: HostRig) -> None:
    promised, aid, copy = host.aid(), host.aid(), host.aid()
    host.tell(
        c.Expect(promised, F32, (4,), "device"),
        c.Digest(aid, [(promised, 0)], [4], [copy], "pinned_host"),
    )
    host.tell(c.FillError(promised, 15, "slice 1 was lost"))
    for result in (aid, copy):
        answer = host.ready(result)
        assert isinstance(answer, c.Failed)
        assert (answer.code, answer.message) == (15, "slice 1 was lost")
