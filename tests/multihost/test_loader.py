"""The loader in one process, against grain's own batches; several processes: test_local_slices.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from regrow.elastic import ElasticLoader
from regrow.errors import UsageError
from regrow.multihost import HostLoader
from regrow.multihost.rows import Rows, batches_of

RECORDS = 100
BATCH = 8


def dataset() -> grain.MapDataset:
    def record(number: int, random: np.random.Generator) -> dict[str, Any]:
        return {"number": np.int32(number), "noise": random.normal(size=(3,)).astype(np.float32)}

    return grain.MapDataset.source(range(RECORDS)).seed(5).shuffle().random_map(record)


def sharding() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec("data"))


@pytest.fixture
def make() -> Iterator[Callable[..., HostLoader]]:
    made: list[HostLoader] = []

    def loader(data: Any = None, **options: Any) -> HostLoader:
        made.append(HostLoader(data or dataset(), BATCH, sharding(), **options))
        return made[-1]

    yield loader
    for one in made:
        one.close()


def bytes_of(batch: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(batch)]


@pytest.mark.parametrize("ahead", [0, 2])
def test_batches_are_those_of_the_data(make: Callable[..., HostLoader], ahead: int) -> None:
    loader: ElasticLoader[Any] = make(ahead=ahead)
    expected = dataset().batch(BATCH, drop_remainder=True)
    seen: list[int] = []
    for number in range(RECORDS // BATCH):
        batch = next(loader)
        assert bytes_of(batch) == bytes_of(expected[number])
        assert isinstance(batch["noise"], jax.Array)
        seen += loader.record_ids
    with pytest.raises(StopIteration):
        next(loader)
    assert seen == list(range(RECORDS // BATCH * BATCH))


def test_the_position_is_that_of_what_came(make: Callable[..., HostLoader]) -> None:
    loader = make(ahead=3, read_options=grain.ReadOptions(num_threads=2))
    assert loader.get_state() == {"global_next_index": 0}
    first = [bytes_of(next(loader)) for _ in range(3)]
    state = loader.get_state()
    assert state == {"global_next_index": 3 * BATCH}
    later = [bytes_of(next(loader)) for _ in range(3)]
    loader.set_state(state)
    assert list(loader.record_ids) == []
    assert [bytes_of(next(loader)) for _ in range(3)] == later
    other = make()
    other.set_state(state)
    assert bytes_of(next(other)) == later[0]
    assert first[0] not in later


def test_data_without_end(make: Callable[..., HostLoader]) -> None:
    loader = make(dataset().repeat())
    loader.set_state({"global_next_index": 12 * BATCH})
    # The last of one epoch and the first of the next are in one batch.
    assert [len(batch["number"]) for batch in itertools.islice(loader, 3)] == [BATCH] * 3


def test_what_is_refused(make: Callable[..., HostLoader]) -> None:
    with pytest.raises(UsageError, match="no batch of 8 records begins at position 12"):
        make().set_state({"global_next_index": 12})
    with pytest.raises(UsageError, match="the data has 3 records, and a batch 8"):
        make(grain.MapDataset.source(range(3)))
    with pytest.raises(UsageError, match="-1 batches"):
        make(ahead=-1)
    filtered = grain.MapDataset.source(range(RECORDS)).filter(lambda number: number != 4)
    with pytest.raises(UsageError, match="record 4 was filtered out"):
        next(make(filtered))


@settings(deadline=None, max_examples=12)
@given(st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=2, max_size=3), st.integers(0, 3))
def test_any_numbers_of_hosts_one_after_the_other_read_the_same(hosts: list[int], at: int) -> None:
    """Byte for byte, as one host alone does, from the position at which the last ones stopped."""
    size = 12
    expected = dataset().batch(size, drop_remainder=True)
    for number, count in enumerate(hosts, start=at):
        parts = [range(index, size, count) for index in reversed(range(count))]
        joined: dict[str, list[bytes]] = {"number": [b""] * size, "noise": [b""] * size}
        for part in parts:
            rows = Rows.covered(size, [part])
            batch = batches_of(dataset(), rows, number)[0]
            for key, values in joined.items():
                for row, value in zip(rows.numbers, batch[key], strict=True):
                    values[row] = value.tobytes()
        for key, values in joined.items():
            assert b"".join(values) == expected[number][key].tobytes()
