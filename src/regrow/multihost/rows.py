"""Which rows of the global batch a host reads, and these rows as a grain dataset. Imports no JAX."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, final

from regrow.elastic.loaders import grain
from regrow.errors import UsageError

_ROWS: Final = 0
"""The axis of a batch that counts records."""


@final
@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a global batch that a host's devices hold, in their order.

    Attributes:
        batch: Rows of the global batch.
        numbers: Those of this host.
    """

    batch: int
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, sharding: object, batch: int) -> Rows:
        """The rows that a sharding puts onto this process's devices.

        Args:
            sharding: A `jax.sharding.Sharding` for arrays whose first axis counts records.
            batch: Rows of the global batch.

        Raises:
            UsageError: The batch does not divide over the devices.
        """
        try:
            held = sharding.addressable_devices_indices_map((batch,))  # type: ignore[attr-defined]
        except ValueError as error:
            raise UsageError(f"a batch of {batch} records does not divide: {error}") from None
        return cls.covered(batch, (range(*index[_ROWS].indices(batch)) for index in held.values()))

    @classmethod
    def covered(cls, batch: int, parts: Iterable[Iterable[int]]) -> Rows:
        """The rows of some parts, which may overlap, each once."""
        return cls(batch, tuple(sorted({row for part in parts for row in part})))

    @property
    def count(self) -> int:
        """How many they are."""
        return len(self.numbers)

    def record(self, index: int) -> int:
        """The number, in the whole data, of the record `index` of all that this host reads."""
        batch, row = divmod(index, self.count)
        return batch * self.batch + self.numbers[row]

    def place(self, rows: slice) -> slice:
        """Where a part of the global batch, all of which this host has, lies in what it has read."""
        wanted = range(*rows.indices(self.batch))
        first = bisect_left(self.numbers, wanted[0])
        return slice(first, first + len(wanted))


def batches_of(dataset: Any, rows: Rows, first: int) -> Any:
    """What a host reads of the batches from one on.

    Args:
        dataset: A `grain.MapDataset` of records.
        rows: Those of a batch that the host reads.
        first: The number of the first batch.

    Returns:
        A `grain.MapDataset` of batches of `rows.count` records; the last one, if it is not full, is
        left out.
    """
    source = grain("HostLoader").MapDataset.source(_Part(dataset, rows))
    return source.batch(rows.count, drop_remainder=True)[first:]


@final
class _Part:
    """The records of one host, one batch's after the other's: a source for grain."""

    def __init__(self, dataset: Any, rows: Rows) -> None:
        self._dataset = dataset
        self._rows = rows

    def __len__(self) -> int:
        return len(self._dataset) // self._rows.batch * self._rows.count

    def __getitem__(self, index: int) -> Any:
        number = self._rows.record(index)
        record = self._dataset[number]
        if record is None:
            raise UsageError(
                f"record {number} was filtered out: filter the data before, since positions count "
                "its records"
            )
        return record

    def __repr__(self) -> str:
        return f"Part(records of {self._dataset!r})"
