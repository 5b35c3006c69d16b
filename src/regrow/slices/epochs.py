"""Epochs: one agreed set of live hosts, whose PJRT clients are joined for programs across them.

An epoch is known by its number, which is never used twice, and stands for a key: the hosts with
their incarnations. It ends when one of its hosts is lost, or when the links between its hosts broke
though the hosts live.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

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
