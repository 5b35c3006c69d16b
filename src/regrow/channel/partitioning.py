"""What a compilation asks a function of the user's process, as arrays for `channel.values`.

    key         the client's own name for the function, as bytes
    counts      of arguments and of results, and whether the results are a tuple
    arguments   shapes, each as an array of that shape behind a dimension of 0
    arguments   shardings, each as the bytes that `of_sharding` makes
    results     shapes
    results     their sharding, likewise

It also runs in the user's process.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from regrow.errors import ProtocolError

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Shape: TypeAlias = "tuple[tuple[int, ...], np.dtype[Any]]"


class Question(NamedTuple):
    """Shapes are pairs of dimensions and element type, shardings bytes (see `of_sharding`)."""

    key: bytes
    shapes: Sequence[Shape] = ()
    shardings: Sequence[bytes] = ()
    result_shapes: Sequence[Shape] = ()
    tupled: bool = False
    result_sharding: bytes = b""


def to_arrays(question: Question) -> list[Array]:
    """A question as arrays."""
    counts = (len(question.shapes), len(question.result_shapes), question.tupled)
    return [
        of_bytes(question.key),
        np.asarray(counts, np.int64),
        *map(_of_shape, question.shapes),
        *map(of_bytes, question.shardings),
        *map(_of_shape, question.result_shapes),
        of_bytes(question.result_sharding),
    ]


def from_arrays(arrays: Sequence[Array | None]) -> Question:
    """The question in arrays.

    Raises:
        ProtocolError: They hold none.
    """
    try:
        key, counts, *rest = [np.asarray(array) for array in arrays]
        number, results, tupled = map(int, counts)
        middle = 2 * number
        if len(rest) != middle + results + 1:
            raise ValueError(f"{len(rest)} values for {number} arguments and {results} results")
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"a question of a compilation is malformed: {error}") from None
    return Question(
        key.tobytes(),
        [(array.shape[1:], array.dtype) for array in rest[:number]],
        [array.tobytes() for array in rest[number:middle]],
        [(array.shape[1:], array.dtype) for array in rest[middle:-1]],
        bool(tupled),
        rest[-1].tobytes(),
    )


def of_bytes(data: bytes) -> Array:
    """Bytes as an array."""
    return np.frombuffer(data, np.uint8)


def of_sharding(sharding: Any) -> bytes:
    """An HloSharding, or None, as bytes."""
    # Behind a byte, because a replicated sharding is serialised as nothing.
    return b"" if sharding is None else b"=" + bytes(sharding.to_proto().SerializeToString())


def to_sharding(data: bytes) -> Any:
    """The HloSharding in bytes, or None."""
    if not data:
        return None
    xla_client: Any = importlib.import_module("jaxlib.xla_client")
    proto = xla_client.OpSharding()
    proto.ParseFromString(data[1:])
    return xla_client.HloSharding.from_proto(proto)


def _of_shape(shape: Shape) -> Array:
    dims, dtype = shape
    return np.empty((0, *dims), dtype)
