"""Data for a number of slices that changes: what a loader must be able to do, and grain's as one.

One program drives all slices, so it reads whole global batches, and JAX deals them out. A loader then
has one position in the data, which is good for any number of slices.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final, Protocol, TypeVar, final

from regrow.elastic import progress
from regrow.errors import UnsupportedError

_BatchT_co = TypeVar("_BatchT_co", covariant=True)
POSITION: Final = "global_next_index"
"""What the state of a loader calls the number of the next record, as grain does."""


class ElasticLoader(Protocol[_BatchT_co]):
    """What elastic training needs of a loader.

    Exactly once: between `get_state` and a `set_state` of what it returned, the same batches must come
    again, and `record_ids` must name the same record by the same number in any run, so that whoever
    compares runs can tell that no record was left out or used twice.
    """

    @property
    def record_ids(self) -> Sequence[int]:
        """The records of the batch that came last; empty before the first."""
        ...

    def __next__(self) -> _BatchT_co:
        """The next global batch; raises StopIteration at the end."""
        ...

    def get_state(self) -> Any:
        """The position behind the batch that came last: a tree of plain values."""
        ...

    def set_state(self, state: Any) -> None:
        """Goes to a position that `get_state` returned, also in another process."""
        ...


@final
class GrainLoader:
    """`grain.experimental.ElasticIterator` as an `ElasticLoader`.

    The number of a record is its position in the dataset as it is given (shuffled, repeated): in the
    second epoch it is another. A last batch that is not full is left out, as grain does.
    """

    def __init__(self, dataset: Any, records: int, *, read_options: Any = None) -> None:
        """Begins at the first record.

        Args:
            dataset: A `grain.MapDataset`, neither batched nor sharded, and without `filter`.
            records: Of a global batch.
            read_options: `grain.ReadOptions`; default: grain's.

        Raises:
            UnsupportedError: grain is not installed.
            ValueError: The dataset filters.
        """
        self._dataset = dataset
        self._read_options = read_options
        self._grain = grain("GrainLoader")
        self._ids = range(0)
        self._iterator = self._made(records)
        self._moved = True

    @property
    def record_ids(self) -> Sequence[int]:
        """The positions of the records of the batch that came last."""
        return self._ids

    def __iter__(self) -> GrainLoader:
        return self

    def __next__(self) -> Any:
        begin = self.get_state()[POSITION]
        with self._phase():
            batch = next(self._iterator)
        self._moved = False
        self._ids = range(begin, self.get_state()[POSITION])
        return batch

    def get_state(self) -> dict[str, int]:
        """The position of the next record."""
        return {POSITION: int(self._iterator.get_state()[POSITION])}

    def set_state(self, state: dict[str, int]) -> None:
        """Goes to a position; also one of another batch size or number of slices."""
        self._iterator.set_state({POSITION: int(state[POSITION])})
        self._ids = range(0)
        self._moved = True

    def resize(self, records: int) -> None:
        """Goes on with another size of global batches, at the same position."""
        state = self.get_state()
        self.close()
        self._iterator = self._made(records)
        self._iterator.set_state(state)
        self._moved = True

    def close(self) -> None:
        """Ends the threads that read ahead."""
        self._iterator.close()

    def _phase(self) -> contextlib.AbstractContextManager[None]:
        """To begin at another position takes long; the phase of the program is its main thread's."""
        if self._moved and threading.current_thread() is threading.main_thread():
            return progress.phase("data")
        return contextlib.nullcontext()

    def _made(self, records: int) -> Any:
        options = {} if self._read_options is None else {"read_options": self._read_options}
        whole = self._grain.sharding.ShardOptions(shard_index=0, shard_count=1)
        return self._grain.experimental.ElasticIterator(self._dataset, records, whole, **options)


def grain(user: str) -> Any:
    """The library of that name.

    Args:
        user: What needs it.

    Raises:
        UnsupportedError: It is not installed.
    """
    try:
        return import_module("grain")
    except ImportError as error:
        raise UnsupportedError(
            f"{user} needs grain, which cannot be imported ({error}); it comes with: "
            "pip install 'regrow[elastic]'"
        ) from error
