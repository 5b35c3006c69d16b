"""Which rows a host reads: a property over numbers of hosts, devices and batches."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.errors import UsageError
from regrow.multihost.rows import Rows


@dataclass
class Sharding:
    """Of one host: as many devices as parts, each with a part of the batch."""

    parts: list[slice]

    def addressable_devices_indices_map(self, shape: tuple[int]) -> dict[int, tuple[slice]]:
        return {number: (part,) for number, part in enumerate(self.parts)}


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, list[Rows]]:
    """A batch, split over devices in any order, and these over hosts; some devices hold the same."""
    hosts, devices = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    copies = draw(st.sampled_from([1, devices]))
    shards = hosts * devices // copies
    each = draw(st.integers(1, 5))
    parts = [slice(index * each, (index + 1) * each) for index in range(shards)] * copies
    parts = draw(st.permutations(parts))
    batch = shards * each
    return batch, [
        Rows.of(Sharding(parts[host * devices : (host + 1) * devices]), batch)
        for host in range(hosts)
    ]


@given(layouts(), st.integers(0, 7))
def test_the_hosts_read_the_batch_that_one_host_would(
    layout: tuple[int, list[Rows]], number: int
) -> None:
    batch, hosts = layout
    read: dict[int, int] = {}
    for rows in hosts:
        for place, row in enumerate(rows.numbers):
            read[row] = rows.record(number * rows.count + place)
    assert [read[row] for row in range(batch)] == list(range(number * batch, (number + 1) * batch))


@given(layouts())
def test_a_part_lies_where_it_is_said_to(layout: tuple[int, list[Rows]]) -> None:
    batch, hosts = layout
    for rows in hosts:
        for first in rows.numbers:
            place = rows.place(slice(first, first + 1))
            assert rows.numbers[place] == (first,)
        whole = Rows.covered(batch, [range(batch)])
        assert whole.place(slice(None)) == slice(0, batch)


def test_a_batch_that_does_not_divide() -> None:
    class Refuses:
        def addressable_devices_indices_map(self, shape: tuple[int]) -> dict[int, tuple[slice]]:
            raise ValueError("it does not divide")

    with pytest.raises(UsageError, match="a batch of 7 records does not divide"):
        Rows.of(Refuses(), 7)
