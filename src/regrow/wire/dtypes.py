"""The element types of arrays: as numbers of the wire, as numpy dtypes and as MLIR text."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

import ml_dtypes
import numpy as np

from regrow.errors import Code, StatusError

PRED: Final = 1
TOKEN: Final = 17
STRING: Final = 99

# (kind, name of the type in numpy or ml_dtypes, MLIR text). ml_dtypes grows: newer types may lack.
_TYPES: Final[tuple[tuple[int, str, str], ...]] = (
    (1, "bool_", "i1"),
    (2, "int8", "i8"),
    (3, "int16", "i16"),
    (4, "int32", "i32"),
    (5, "int64", "i64"),
    (6, "uint8", "ui8"),
    (7, "uint16", "ui16"),
    (8, "uint32", "ui32"),
    (9, "uint64", "ui64"),
    (10, "float16", "f16"),
    (11, "float32", "f32"),
    (12, "float64", "f64"),
    (15, "complex64", "complex<f32>"),
    (16, "bfloat16", "bf16"),
    (18, "complex128", "complex<f64>"),
    (19, "float8_e5m2", "f8E5M2"),
    (20, "float8_e4m3fn", "f8E4M3FN"),
    (21, "int4", "i4"),
    (22, "uint4", "ui4"),
    (23, "float8_e4m3b11fnuz", "f8E4M3B11FNUZ"),
    (24, "float8_e5m2fnuz", "f8E5M2FNUZ"),
    (25, "float8_e4m3fnuz", "f8E4M3FNUZ"),
    (26, "int2", "i2"),
    (27, "uint2", "ui2"),
    (28, "float8_e4m3", "f8E4M3"),
    (29, "float8_e3m4", "f8E3M4"),
    (30, "float4_e2m1fn", "f4E2M1FN"),
    (31, "float8_e8m0fnu", "f8E8M0FNU"),
    (33, "uint1", "ui1"),
    (34, "float6_e2m3fn", "f6E2M3FN"),
    (35, "float6_e3m2fn", "f6E3M2FN"),
    (32, "int1", "si1"),  # in MLIR `i1` is the boolean
)
_LAYOUT_BITS: Final = MappingProxyType({21: 4, 22: 4, 26: 2, 27: 2, 30: 4, 32: 1, 33: 1})


def _numpy_type(name: str) -> np.dtype[Any] | None:
    scalar = getattr(np, name, None) or getattr(ml_dtypes, name, None)
    return None if scalar is None else np.dtype(scalar)


_DTYPES: Final = MappingProxyType(
    {kind: dtype for kind, name, _ in _TYPES if (dtype := _numpy_type(name)) is not None}
)
_KINDS: Final = MappingProxyType({dtype: kind for kind, dtype in _DTYPES.items()})
_KINDS_OF_MLIR: Final = MappingProxyType(
    {text: kind for kind, _, text in _TYPES} | {"!stablehlo.token": TOKEN}
)


def numpy_dtype(kind: int) -> np.dtype[Any]:
    """The numpy dtype of one element; types below a byte take a byte.

    Raises:
        StatusError: UNIMPLEMENTED for a kind without one, as tokens and strings are.
    """
    dtype = _DTYPES.get(kind)
    if dtype is None:
        raise StatusError(Code.UNIMPLEMENTED, f"element type number {kind} has no numpy dtype")
    return dtype


def kind_of(dtype: np.dtype[Any]) -> int:
    """The number of a numpy dtype.

    Raises:
        StatusError: UNIMPLEMENTED for a dtype that arrays of JAX cannot have.
    """
    kind = _KINDS.get(dtype)
    if kind is None:
        raise StatusError(Code.UNIMPLEMENTED, f"arrays cannot have the numpy dtype {dtype}")
    return kind


def kind_of_mlir(text: str) -> int:
    """The number of an element type as MLIR prints it, such as `f32` or `complex<f32>`.

    Raises:
        StatusError: UNIMPLEMENTED for a type that is not known.
    """
    kind = _KINDS_OF_MLIR.get(text)
    if kind is None:
        raise StatusError(Code.UNIMPLEMENTED, f"element type {text} of a program is not known")
    return kind


def layout_bits(kind: int) -> int | None:
    """The bits of an element in a device's layout, where that is less than a byte."""
    return _LAYOUT_BITS.get(kind)
