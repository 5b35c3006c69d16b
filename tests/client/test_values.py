"""The values of host callbacks survive their way as bytes, and damaged bytes do no harm."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from regrow.channel import rgcb, values
from regrow.errors import Code, ProtocolError, UnsupportedError

PLAIN = ["bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
ARRAYS = st.sampled_from(PLAIN).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0))
)


def roundtrip(items: list[object]) -> list[values.Value]:
    return values.decode(b"".join(values.encode(items)))


@given(st.lists(st.none() | ARRAYS, max_size=4))
@settings(max_examples=60, deadline=None)
def test_arrays_and_tokens_come_back_as_they_were(items: list[np.ndarray | None]) -> None:
    for before, after in zip(items, roundtrip(list(items)), strict=True):
        if before is None:
            assert after is None
        else:
            assert after is not None
            assert after.dtype == before.dtype
            assert after.shape == before.shape
            assert after.tobytes() == before.tobytes()
            assert after.flags.aligned


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4"])
def test_types_that_numpy_alone_does_not_know(name: str) -> None:
    array = np.array([[0, 1, 1], [1, 0, 3]]).astype(getattr(ml_dtypes, name))
    (back,) = roundtrip([array])
    assert back is not None
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_strides_byte_order_scalars_and_large_arrays() -> None:
    big = np.arange(30000, dtype=np.float32).reshape(100, 300)
    items = [big[::-1], big.T, big.astype(">f4"), np.broadcast_to(np.int8(3), (4,)), 2.5, True]
    for before, after in zip(items, roundtrip(items), strict=True):
        np.testing.assert_array_equal(after, before)
        assert after is not None
        assert after.dtype.isnative


def test_elements_of_large_arrays_are_not_copied() -> None:
    array = np.zeros(100_000, np.uint8)
    parts = values.encode([array])
    assert any(np.shares_memory(np.frombuffer(part, np.uint8), array) for part in parts)


def test_a_type_that_no_program_has_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="datetime64"):
        values.encode([np.zeros(3, "M8[s]")])


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_any_bytes_give_values_or_a_clear_error(data: bytes) -> None:
    try:
        values.decode(data)
    except (ProtocolError, UnsupportedError):
        pass


@given(st.integers(0, 300), st.integers(0, 255))
@settings(max_examples=100, deadline=None)
def test_damaged_bytes_give_values_or_a_clear_error(position: int, byte: int) -> None:
    data = bytearray(b"".join(values.encode([np.arange(6.0).reshape(2, 3), None, np.int32(1)])))
    data[position % len(data)] = byte
    try:
        values.decode(data)
    except (ProtocolError, UnsupportedError):
        pass


def test_preface_and_attribute() -> None:
    nonce = "0123456789abcdef"
    assert len(rgcb.preface(nonce)) == rgcb.PREFACE_BYTES
    callbacks = rgcb.ProgramCallbacks(nonce, 7, 2)
    program = b"ML\xefR\0" + rgcb.attribute(callbacks).encode() + b"\0more"
    assert rgcb.callbacks_of(program) == callbacks
    assert rgcb.callbacks_of(b"a program without") is None


def test_answers() -> None:
    found = rgcb.parse_answer(memoryview(rgcb.failure(Code.UNKNOWN, "so \u00e4")))
    assert found == (Code.UNKNOWN, "so \u00e4")
    for bad in (b"", b"\x07" + bytes(7)):
        with pytest.raises(ProtocolError):
            rgcb.parse_answer(memoryview(bad))
