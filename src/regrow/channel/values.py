"""The arguments and results of a host callback as bytes.

    u32 count, u32 0
    per value   u8 length of the name, u8 number of dimensions, 6 zero bytes
                the name of the element type, zero-padded to a multiple of 8 ("" is a token)
                u64 per dimension
                the elements in C order, little-endian, zero-padded to a multiple of 8

Element types travel by name and are looked up in a fixed table, so nothing of the peer's is evaluated.
Imports numpy and ml_dtypes only: it also runs in the user's process.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import ml_dtypes
import numpy as np

from regrow.errors import ProtocolError, UnsupportedError

Value: TypeAlias = "np.ndarray[Any, np.dtype[Any]] | None"
"""An array, or None for a token."""

Buffer: TypeAlias = bytes | bytearray | memoryview

_COUNT: Final = struct.Struct("<II")
_VALUE: Final = struct.Struct("<BB6x")
_ALIGNMENT: Final = 8
_INLINE_BYTES: Final = 4096
_MAX_DIMENSIONS: Final = 64
_NAMES: Final = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "bfloat16",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float6_e2m3fn",
    "float6_e3m2fn",
    "float4_e2m1fn",
    "int1",
    "uint1",
    "int2",
    "uint2",
    "int4",
    "uint4",
)


def _dtypes() -> dict[bytes, np.dtype[Any]]:
    found = {}
    for name in _NAMES:
        scalar = (
            getattr(ml_dtypes, name, None)
            or getattr(np, f"{name}_", None)
            or getattr(np, name, None)
        )
        if scalar is not None:
            found[name.encode()] = np.dtype(scalar)
    return found


_BY_NAME: Final = MappingProxyType(_dtypes())
_NAME_OF: Final = MappingProxyType({dtype: name for name, dtype in _BY_NAME.items()})


def encode(values: Iterable[Any]) -> list[Buffer]:
    """Values as a list of buffers; the elements of large arrays are not copied.

    Args:
        values: Arrays, whatever numpy makes an array of, or None for a token.

    Raises:
        UnsupportedError: An element type that no JAX program has.
    """
    values = list(values)
    small = bytearray(_COUNT.pack(len(values), 0))
    out: list[Buffer] = []
    for value in values:
        if value is None:
            small += _VALUE.pack(0, 0)
            continue
        array = np.asarray(value)
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        name = _NAME_OF.get(array.dtype)
        if name is None:
            raise UnsupportedError(f"a host callback cannot carry elements of type {array.dtype}")
        small += _VALUE.pack(len(name), array.ndim) + name + bytes(-len(name) % _ALIGNMENT)
        small += struct.pack(f"<{array.ndim}Q", *array.shape)
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        if raw.nbytes > _INLINE_BYTES:
            out += [small, raw]
            small = bytearray()
        else:
            small += raw
        small += bytes(-raw.nbytes % _ALIGNMENT)
    if small:
        out.append(small)
    return out


def decode(data: Buffer) -> list[Value]:
    """The values that `encode` wrote; the arrays are views of `data`.

    Raises:
        ProtocolError: The bytes are not what `encode` writes.
        UnsupportedError: An element type that this process does not know.
    """
    view = memoryview(data)
    try:
        return _decode(view)
    except (struct.error, ValueError, OverflowError) as error:
        raise ProtocolError(f"the values of a host callback are malformed: {error}") from None


def _decode(view: memoryview) -> list[Value]:
    count, _ = _COUNT.unpack_from(view)
    offset = _COUNT.size
    values: list[Value] = []
    for _ in range(count):
        length, ndim = _VALUE.unpack_from(view, offset)
        offset += _VALUE.size
        if not length:
            values.append(None)
            continue
        name = bytes(view[offset : offset + length])
        offset += _padded(length)
        dtype = _BY_NAME.get(name)
        if dtype is None:
            raise UnsupportedError(f"an unknown element type in a host callback: {name!r}")
        if ndim > _MAX_DIMENSIONS:
            raise ValueError(f"{ndim} dimensions")
        shape = struct.unpack_from(f"<{ndim}Q", view, offset)
        offset += 8 * ndim
        size = math.prod(shape)
        values.append(
            np.frombuffer(view, dtype, size, offset).reshape(shape)
            if size
            else np.empty(shape, dtype)
        )
        offset += _padded(size * dtype.itemsize)
    if offset != view.nbytes:
        raise ValueError(f"{view.nbytes} bytes where {offset} were announced")
    return values


def _padded(size: int) -> int:
    return size + -size % _ALIGNMENT
