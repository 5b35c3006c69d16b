"""What hosts report of a node; each names the incarnation and the boot that it is about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from regrow.cloud.resources import Power


@dataclass(frozen=True, slots=True)
class _OfBoot:
    uid: int
    incarnation: int
    boot: int


@final
@dataclass(frozen=True, slots=True)
class HostsUp(_OfBoot):
    """All hosts run and answer."""


@final
@dataclass(frozen=True, slots=True)
class HostsDown(_OfBoot):
    """No process is left, and with the power GONE no disk either."""

    power: Power


@final
@dataclass(frozen=True, slots=True)
class HostsFailed(_OfBoot):
    """A host has not started, or has ended by itself."""

    why: str


@final
@dataclass(frozen=True, slots=True)
class HostsLost(_OfBoot):
    """The processes of all hosts went with the machine or the server; the disks are there."""


Event = HostsUp | HostsDown | HostsFailed | HostsLost
