"""One position in the data, good for any number of slices."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import grain
import numpy as np
import pytest

from regrow.elastic import ElasticLoader, GrainLoader, progress

RECORDS = 600
BATCH = 12


def dataset() -> grain.MapDataset:
    return grain.MapDataset.source(np.arange(RECORDS)).seed(3).shuffle()


@pytest.fixture
def loader() -> Iterator[GrainLoader]:
    made = GrainLoader(dataset(), BATCH, read_options=grain.ReadOptions(num_threads=1))
    yield made
    made.close()


def test_it_is_a_loader(loader: GrainLoader) -> None:
    as_loader: ElasticLoader[np.ndarray] = loader
    assert list(as_loader.record_ids) == []
    assert as_loader.get_state() == {"global_next_index": 0}


def test_all_records_come_once_by_their_numbers(loader: GrainLoader) -> None:
    whole, seen = list(dataset()), []
    for batch in loader:
        assert [whole[number] for number in loader.record_ids] == batch.tolist()
        seen += loader.record_ids
    assert seen == list(range(RECORDS))


def test_a_position_is_good_again_and_elsewhere(loader: GrainLoader) -> None:
    first = [next(loader).tolist() for _ in range(3)]
    state = loader.get_state()
    later = [next(loader).tolist() for _ in range(3)]
    loader.set_state(state)
    assert list(loader.record_ids) == []
    assert [next(loader).tolist() for _ in range(3)] == later
    other = GrainLoader(dataset(), BATCH)
    other.set_state(state)
    assert next(other).tolist() == later[0]
    other.close()
    assert first != later


def test_another_batch_size_goes_on_where_it_was(loader: GrainLoader) -> None:
    seen: list[int] = []
    for records in (12, 9, 12):
        loader.resize(records)
        for batch in itertools.islice(loader, 4):
            assert len(batch) == records
            seen += loader.record_ids
    assert seen == list(range(132))


def test_the_shards_of_4_3_and_4_slices_are_the_whole(loader: GrainLoader) -> None:
    """grain's own sharding by slices, for programs that read shard by shard."""
    state = loader.get_state()
    for slices in (4, 3, 4):
        shards = [
            grain.experimental.ElasticIterator(
                dataset(), BATCH, grain.sharding.ShardOptions(index, slices)
            )
            for index in range(slices)
        ]
        for shard in shards:
            shard.set_state(state)
        for _ in range(3):
            parts = np.concatenate([next(shard) for shard in shards])
            assert sorted(parts.tolist()) == sorted(next(loader).tolist())
        states = [shard.get_state() for shard in shards]
        assert states == [loader.get_state()] * slices
        state = states[0]
        for shard in shards:
            shard.close()


def test_the_first_batch_at_a_position_is_a_phase_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    phases: list[str | None] = []
    monkeypatch.setattr(progress, "_now", progress.Progress())
    monkeypatch.setattr(progress, "tell", lambda _, *, step, phase: phases.append(phase))
    made = GrainLoader(dataset(), BATCH, read_options=grain.ReadOptions(num_threads=1))
    next(made), next(made)
    assert phases == ["data", None]
    made.set_state(made.get_state())
    reader = threading.Thread(target=next, args=(made,))
    reader.start()
    reader.join()
    assert phases == ["data", None], "the phase is that of the main thread"
    made.close()
