"""Which device belongs to which slice and host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

MEMORY_KINDS: Final = ("device", "pinned_host", "unpinned_host")


@final
@dataclass(frozen=True, slots=True)
class Topology:
    """Slices of equal size, each with hosts of equal size, devices numbered through."""

    slices: int
    hosts_per_slice: int
    devices_per_slice: int

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return self.slices * self.devices_per_slice

    @property
    def hosts(self) -> int:
        """How many hosts there are."""
        return self.slices * self.hosts_per_slice

    @property
    def devices_per_host(self) -> int:
        """How many devices a host has."""
        return self.devices_per_slice // self.hosts_per_slice

    def slice_of(self, device: int) -> int:
        """The slice of a device."""
        return device // self.devices_per_slice

    def host_of(self, device: int) -> int:
        """The cluster-wide number of the host of a device."""
        return device // self.devices_per_host

    def slice_of_host(self, host: int) -> int:
        """The slice of a host."""
        return host // self.hosts_per_slice

    def devices_of_host(self, host: int) -> tuple[int, ...]:
        """The devices of a host."""
        first = host * self.devices_per_host
        return tuple(range(first, first + self.devices_per_host))
