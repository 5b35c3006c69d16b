"""Content hashes: every change of a word shows, and where."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from regrow.elastic.digests import different, digest

DTYPES = (
    np.bool_, np.int8, np.uint16, np.int32, np.uint64, np.float16, np.float32, np.float64,
    np.complex64, np.complex128, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _wide_types() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def there(value: Any) -> jax.Array:
    mesh = Mesh(np.asarray(jax.devices("cpu")[:1]), ("x",))
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec()))


def hashes(*values: Any) -> bytes:
    return np.asarray(digest([there(value) for value in values])).tobytes()


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (700,)])
def test_every_single_change_shows(shape: tuple[int, ...]) -> None:
    dtype = np.float32
    rng = np.random.default_rng(3)
    value = rng.integers(0, 2, shape).astype(dtype)
    seen = {hashes(value)}
    places = list(np.ndindex(*shape))
    for place in places[:: max(1, len(places) // 7)]:
        changed = value.copy()
        changed[place] = value[place] == np.zeros((), dtype)
        seen.add(hashes(changed))
    assert len(seen) == 1 + len(places[:: max(1, len(places) // 7)])
    assert hashes(value) in seen


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_every_bit_counts(dtype: Any) -> None:
    value = np.ones(2, dtype)
    bits = 1 if dtype is np.bool_ else 4 if dtype is ml_dtypes.int4 else 8 * value.itemsize
    seen = {hashes(value)}
    for bit in range(bits):
        changed = value.copy()
        changed.view(np.uint8)[value.itemsize + bit // 8] ^= 1 << bit % 8
        seen.add(hashes(changed))
    assert len(seen) == 1 + bits


def test_places_count() -> None:
    value = np.arange(600, dtype=np.float32)
    swapped = value.copy()
    swapped[[5, 517]] = swapped[[517, 5]]
    assert len({hashes(value), hashes(swapped), hashes(value[::-1].copy())}) == 3
    assert hashes(np.float32(-0.0)) != hashes(np.float32(0.0))


def test_nothing_at_all_has_a_hash() -> None:
    assert hashes(np.zeros((0, 3), np.float32)) == hashes(np.zeros((3, 0), np.float32))


def test_where_the_difference_is() -> None:
    big = np.zeros((512, 512), np.float32)
    small = np.zeros(3, np.float64)
    arrays = [there(x) for x in (big, small, big, np.zeros(0), small)]
    before = digest(arrays)
    for number, place in ((0, (0, 0)), (2, (300, 1))):
        changed = big.copy()
        changed[place] = 1
        after = digest([*arrays[:number], there(changed), *arrays[number + 1 :]])
        assert different(arrays, before, after) == [number]
    after = digest([*arrays[:4], there(np.ones(3))])
    assert different(arrays, before, after) == [2, 4], "they share a block"
    assert different(arrays, before, before) == []


def test_wide_words_are_counted_as_they_are_hashed() -> None:
    wide = [there(np.zeros(128 * 512, dtype)) for dtype in DTYPES]
    before = digest([*wide, there(np.ones(1, np.float32))])
    after = digest([*wide, there(np.full(1, 2, np.float32))])
    arrays = [*wide, there(np.ones(1, np.float32))]
    assert different(arrays, before, after) == [len(DTYPES)]
