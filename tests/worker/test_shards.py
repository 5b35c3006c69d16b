"""The shards of an array are found by several threads at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from jaxlib import xla_client as xc

from regrow.worker.platform import Domain, shards_of
from regrow.worker.store import Part

DEVICES = (0, 1, 2, 3)
ROUNDS = 300
THREADS = 4


@pytest.fixture
def hurry() -> Iterator[None]:
    """Has threads alternate as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def fresh_arrays() -> Iterator[Any]:
    """Arrays over all devices, whose shards nobody has looked at."""
    domain = Domain.home(DEVICES)
    shards = [domain.put(np.full(1, float(device)), device, "device") for device in DEVICES]
    whole = domain.assemble(DEVICES, shards)
    for _ in range(ROUNDS):
        (copy,) = xc.batched_copy_array_to_devices_with_sharding(
            [whole],
            [domain.device_list(DEVICES)],
            [whole.sharding],
            [xc.ArrayCopySemantics.ALWAYS_COPY],
        )
        yield copy


@pytest.mark.usefixtures("hurry")
def test_threads_find_the_same_shards() -> None:
    for array in fresh_arrays():
        found: list[list[float]] = []
        begin = threading.Barrier(THREADS)

        def look(array: Any = array, begin: Any = begin, found: Any = found) -> None:
            begin.wait()
            found.append([float(np.asarray(shard)[0]) for shard in shards_of(array)])

        threads = [threading.Thread(target=look) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [list(map(float, DEVICES))] * THREADS


@pytest.mark.usefixtures("hurry")
def test_who_reads_a_part_while_it_moves_does_not_put_the_old_shards_back() -> None:
    """As a helper does that hashes a part, when a loss has the executor move it home."""
    home = Domain.home(DEVICES)
    for array in fresh_arrays():
        domain = Domain(next(iter(array.devices())).client, {}, DEVICES)
        part = Part(domain, DEVICES, whole=array)
        begin = threading.Barrier(THREADS)

        def read(part: Part = part, begin: Any = begin) -> None:
            begin.wait()
            part.singles()
            part.arrays()[0].block_until_ready()

        with ThreadPoolExecutor(THREADS) as pool:
            readers = [pool.submit(read) for _ in range(THREADS - 1)]
            begin.wait()
            part.move(home)
            for reader in readers:
                reader.result()
        assert part.shards is not None
        found = [next(iter(shard.devices())) for shard in part.shards]
        assert found == [home.devices[device] for device in DEVICES]
