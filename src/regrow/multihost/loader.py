"""Global batches for programs that run on every host: each host reads its part, ahead of time.

The position is one number for all hosts, the next record of the whole data, and a batch is the same
bytes however many hosts read it: row r of the batch at position p is record p + r, whatever host reads
it. So a checkpoint of one number of hosts can be resumed by any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import jax

from regrow.elastic.loaders import POSITION, grain
from regrow.errors import UsageError
from regrow.multihost.rows import Rows, batches_of

_AHEAD: Final = 2
"""Batches that lie on the devices before they are asked for."""


@final
class HostLoader:
    """Batches as global `jax.Array`s, of which this host reads what its devices hold.

    Threads of grain read ahead, and send the next batches to the devices while the present one is
    computed with. It is an `ElasticLoader`: `get_state` belongs to the batch that came last,
    however far it has read. All hosts have to ask for the same number of batches.

    A last batch that is not full is left out.
    """

    def __init__(
        self,
        dataset: Any,
        records: int,
        sharding: jax.sharding.Sharding,
        *,
        read_options: Any = None,
        ahead: int = _AHEAD,
    ) -> None:
        """Begins at the first record.

        Args:
            dataset: A `grain.MapDataset`, neither batched nor sharded, and without `filter`.
            records: Of a global batch.
            sharding: Of the arrays; their first axis counts records.
            read_options: `grain.ReadOptions` (threads, and elements that are read ahead); default:
                grain's.
            ahead: Batches that are sent to the devices ahead.

        Raises:
            UnsupportedError: grain is not installed.
            UsageError: The records do not divide over the devices, or the data has less than a batch.
        """
        self._grain = grain("HostLoader")
        if ahead < 0:
            raise UsageError(f"{ahead} batches cannot be read ahead")
        self._rows = Rows.of(sharding, records)
        if len(dataset) < records:
            raise UsageError(f"the data has {len(dataset)} records, and a batch {records}")
        self._dataset = dataset
        self._sharding = sharding
        self._read_options = read_options
        self._ahead = ahead
        self._next = 0
        self._ids = range(0)
        self._iterator: Any = None

    @property
    def record_ids(self) -> Sequence[int]:
        """The positions of the records of the global batch that came last."""
        return self._ids

    def __iter__(self) -> HostLoader:
        return self

    def __next__(self) -> Any:
        """The next global batch: the records' tree, with arrays in place of the values."""
        if self._iterator is None:
            self._iterator = iter(self._from(self._next // self._rows.batch))
        batch = next(self._iterator)
        self._ids = range(self._next, self._next + self._rows.batch)
        self._next += self._rows.batch
        return batch

    def get_state(self) -> dict[str, int]:
        """The position of the next record."""
        return {POSITION: self._next}

    def set_state(self, state: dict[str, int]) -> None:
        """Goes to a position, also one of another number of hosts.

        Raises:
            UsageError: No batch of this size begins there.
        """
        position = int(state[POSITION])
        if position < 0 or position % self._rows.batch:
            raise UsageError(
                f"no batch of {self._rows.batch} records begins at position {position}: it comes from "
                "another batch size"
            )
        self.close()
        self._next = position
        self._ids = range(0)

    def close(self) -> None:
        """Ends the threads that read ahead."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None

    def _from(self, batch: int) -> Any:
        """The batches from one on: read by threads, and sent to the devices by another."""
        options = {} if self._read_options is None else {"read_options": self._read_options}
        batches = batches_of(self._dataset, self._rows, batch).to_iter_dataset(**options)
        return self._grain.experimental.ThreadPrefetchIterDataset(
            batches.map(self._sent), prefetch_buffer_size=self._ahead
        )

    def _sent(self, local: Any) -> Any:
        return jax.tree.map(self._global, local)

    def _global(self, local: Any) -> jax.Array:
        def part(index: Any) -> Any:
            return local[(self._rows.place(index[0]), *index[1:])]

        shape = (self._rows.batch, *local.shape[1:])
        return jax.make_array_from_callback(shape, self._sharding, part)
