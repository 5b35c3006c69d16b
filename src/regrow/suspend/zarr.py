"""Arrays as zarr (version 2, not compressed), one chunk a shard: what Orbax and TensorStore read, too. No I/O.

    NAME/.zarray        shape, chunk shape and type
    NAME/1.0            the chunk at that place of the grid, in C order

The format is at https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html; TensorStore adds bfloat16.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, final

from regrow.errors import StorageError

Region: TypeAlias = tuple[tuple[int, int], ...]

METADATA: Final = ".zarray"
TYPES: Final = {
    "BF16": (16, "bfloat16"),
    "F32": (11, "<f4"),
    "F64": (12, "<f8"),
    "S8": (2, "|i1"),
    "S16": (3, "<i2"),
    "S32": (4, "<i4"),
    "S64": (5, "<i8"),
    "U8": (6, "|u1"),
    "U16": (7, "<u2"),
    "U32": (8, "<u4"),
    "U64": (9, "<u8"),
}
"""By the name in a persistence request: number of the element type, and its name in zarr."""

_NAMES: Final = dict(TYPES.values())
_KINDS: Final = {name: kind for kind, name in TYPES.values()}


@final
@dataclass(frozen=True, slots=True)
class Grid:
    """How an array is cut into chunks.

    Attributes:
        shape: Of the array.
        chunk: Shape of every chunk; those at the end may stick out.
        kind: Element type.
    """

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    kind: int

    def metadata(self) -> bytes:
        """The file METADATA.

        Raises:
            StorageError: zarr has no such type.
        """
        if self.kind not in _NAMES:
            raise StorageError(f"arrays of type number {self.kind} cannot be written as zarr")
        return json.dumps(
            {
                "chunks": self.chunk,
                "compressor": None,
                "dimension_separator": ".",
                "dtype": _NAMES[self.kind],
                "fill_value": None,
                "filters": None,
                "order": "C",
                "shape": self.shape,
                "zarr_format": 2,
            }
        ).encode()

    @classmethod
    def read(cls, data: bytes, name: str) -> Grid:
        """From the file METADATA of the array `name`.

        Raises:
            StorageError: It is none, or of a form that is not written here.
        """
        try:
            told = json.loads(data)
            plain = (
                told["zarr_format"] == 2
                and told["order"] == "C"
                and told.get("dimension_separator", ".") == "."
            )
            if not plain or told["compressor"] or told["filters"]:
                raise StorageError(f"{name} is zarr that is compressed or laid out otherwise")
            return cls(tuple(told["shape"]), tuple(told["chunks"]), _KINDS[told["dtype"]])
        except (ValueError, KeyError, TypeError):
            raise StorageError(f"{name} has no metadata of zarr that is known here") from None

    def place(self, region: Region) -> str | None:
        """The name of the chunk that is just this region; None: there is none."""
        if any(
            start % size or stop - start != size
            for (start, stop), size in zip(region, self.chunk, strict=True)
        ):
            return None
        return chunk_name(
            [start // size for (start, _), size in zip(region, self.chunk, strict=True)]
        )

    def covering(self, region: Region) -> Iterator[tuple[str, Region, Region]]:
        """The chunks that a region needs: name, and the common part within the chunk and the region."""
        spans = [
            range(start // size, -(-stop // size))
            for (start, stop), size in zip(region, self.chunk, strict=True)
        ]
        for index in itertools.product(*spans):
            inside, target = [], []
            for number, size, (start, stop) in zip(index, self.chunk, region, strict=True):
                first, last = max(start, number * size), min(stop, (number + 1) * size)
                inside.append((first - number * size, last - number * size))
                target.append((first - start, last - start))
            yield chunk_name(index), tuple(inside), tuple(target)


def chunk_name(index: Sequence[int]) -> str:
    """The file of a chunk."""
    return ".".join(map(str, index)) or "0"
