"""Which device belongs to which slice and host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from regrow.errors import UsageError

MEMORY_KINDS: Final = ("device", "pinned_host", "unpinned_host")


@final
@dataclass(slots=True)
class Topology:
    """Slices of equal size, each with hosts of equal size, devices numbered through.

    There is one of it in a head. How many hosts a slice has may change while no slice has any.
    """

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

    def check_hosts(self, hosts_per_slice: int) -> None:
        """Checks that slices can have so many hosts.

        Raises:
            UsageError: They cannot.
        """
        if hosts_per_slice < 1 or self.devices_per_slice % hosts_per_slice:
            raise UsageError(
                f"the devices of a slice ({self.devices_per_slice}) cannot be divided among "
                f"{hosts_per_slice} hosts"
            )

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
