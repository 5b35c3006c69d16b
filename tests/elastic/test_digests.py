"""Digests of several arrays on several devices, compared."""

from __future__ import annotations

import numpy as np

from regrow.elastic.digests import different


def test_arrays_differ_where_any_device_has_another_hash() -> None:
    one = np.arange(2 * 5 * 16, dtype=np.uint8).reshape(2, 5, 16)
    other = one.copy()
    assert different(one, other) == []
    other[1, 3, 15] ^= 1
    other[0, 0, 0] ^= 128
    assert different(one, other) == [0, 3]
