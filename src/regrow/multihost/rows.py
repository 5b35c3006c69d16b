"""Which rows of the global batch a host reads."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, final

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
            raise UsageError(f"{batch} records of a batch do not fit {sharding}: {error}") from None
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
