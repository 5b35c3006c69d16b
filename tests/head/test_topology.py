"""Which device is where."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from regrow.head.topology import Topology


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_every_device_has_one_place(slices: int, hosts: int, per_host: int) -> None:
    topology = Topology(slices, hosts, hosts * per_host)
    assert topology.hosts == slices * hosts
    assert topology.devices == topology.hosts * per_host
    assert topology.devices_per_host == per_host
    told = [topology.devices_of_host(host) for host in range(topology.hosts)]
    assert [device for devices in told for device in devices] == list(range(topology.devices))
    for host, devices in enumerate(told):
        for device in devices:
            assert topology.host_of(device) == host
            assert topology.slice_of(device) == topology.slice_of_host(host)


def test_in_numbers() -> None:
    topology = Topology(slices=3, hosts_per_slice=2, devices_per_slice=4)
    assert (topology.devices, topology.hosts) == (12, 6)
    assert topology.devices_of_host(3) == (6, 7)
    assert topology.slice_of_host(3) == topology.slice_of(7) == 1
