"""Epochs: one agreed set of live hosts, whose PJRT clients are joined for programs across them.

An epoch is known by its number, which is never used twice, and stands for a key: the hosts with
their incarnations. It ends when one of its hosts is lost, or by itself (`invalidate`), when the
links between its hosts broke though the hosts live. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias, final

from regrow.errors import UsageError

EpochKey: TypeAlias = tuple[tuple[int, int], ...]
"""The (host id, incarnation) of each member, sorted."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """A numbered, agreed set of hosts."""

    number: int
    key: EpochKey

    @property
    def hosts(self) -> tuple[int, ...]:
        """The ids of its hosts, in the order of their ranks."""
        return tuple(host for host, _ in self.key)

    def rank(self, host: int) -> int:
        """The process number of a host in this epoch."""
        return self.hosts.index(host)

    def has(self, host: int, incarnation: int) -> bool:
        """Whether this incarnation of a host is a member."""
        return (host, incarnation) in self.key


@final
class EpochBook:
    """Which epochs there are. A host is one process; its incarnation is its slice's."""

    __slots__ = ("_by_key", "_by_number", "_hosts", "_last")

    def __init__(self) -> None:
        self._hosts: dict[int, int] = {}
        self._by_key: dict[EpochKey, Epoch] = {}
        self._by_number: dict[int, Epoch] = {}
        self._last = 0

    def host_up(self, host: int, incarnation: int) -> None:
        """A host has come; its former incarnation must have been lost before.

        Raises:
            UsageError: Another incarnation of it is here, or it comes with an older number.
        """
        known = self._hosts.get(host)
        if known is not None and known != incarnation:
            raise UsageError(
                f"host {host} comes as incarnation {incarnation}, but {known} is not lost"
            )
        self._hosts[host] = incarnation

    def host_lost(self, host: int, incarnation: int) -> tuple[Epoch, ...]:
        """A host is lost; returns the epochs that end by it, oldest first."""
        if self._hosts.get(host) == incarnation:
            del self._hosts[host]
        return self._drop(epoch for epoch in self.epochs() if epoch.has(host, incarnation))

    def invalidate(self, number: int) -> bool:
        """Ends one epoch whose hosts live; the next `current` for them is a new one."""
        epoch = self._by_number.get(number)
        return epoch is not None and bool(self._drop([epoch]))

    def key(self, hosts: Iterable[int]) -> EpochKey | None:
        """The key of a set of hosts as they are now; None: one of them is not there."""
        wanted = sorted(set(hosts))
        if any(host not in self._hosts for host in wanted):
            return None
        return tuple((host, self._hosts[host]) for host in wanted)

    def current(self, hosts: Iterable[int]) -> Epoch | None:
        """The epoch of exactly these hosts, made when there is none; None: one is not there."""
        key = self.key(hosts)
        if not key:
            return None
        epoch = self._by_key.get(key)
        if epoch is None:
            self._last += 1
            epoch = Epoch(self._last, key)
            self._by_key[key] = self._by_number[epoch.number] = epoch
        return epoch

    def get(self, number: int) -> Epoch | None:
        """The epoch of that number, if it has not ended."""
        return self._by_number.get(number)

    def epochs(self) -> tuple[Epoch, ...]:
        """All epochs that have not ended, oldest first."""
        return tuple(self._by_number.values())

    def epochs_of(self, host: int) -> tuple[Epoch, ...]:
        """The epochs that the loss of this host would end, oldest first."""
        return tuple(epoch for epoch in self.epochs() if host in epoch.hosts)

    def hosts(self) -> EpochKey:
        """All hosts that are there."""
        return tuple(sorted(self._hosts.items()))

    def validate(self) -> None:
        """Checks what must always hold.

        Raises:
            AssertionError: It does not.
        """
        for number, epoch in self._by_number.items():
            if self._by_key.get(epoch.key) is not epoch or number != epoch.number:
                raise AssertionError(f"{epoch} is not the epoch of its key")
            if any(self._hosts.get(host) != incarnation for host, incarnation in epoch.key):
                raise AssertionError(f"{epoch} has a host that is not there: {self._hosts}")
        if len(self._by_key) != len(self._by_number):
            raise AssertionError("two epochs for one key")

    def _drop(self, epochs: Iterable[Epoch]) -> tuple[Epoch, ...]:
        ended = tuple(epochs)
        for epoch in ended:
            del self._by_number[epoch.number]
            del self._by_key[epoch.key]
        return ended
