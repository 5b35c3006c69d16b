"""A head whose slices are leased: grants, losses, and what is given back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from regrow.errors import UsageError
from regrow.head.leases import Leases
from regrow.launchers.leased import Lease, LeasedLauncher, pack_spec, unpack_spec
from regrow.slices import (
    HostConnected,
    HostReady,
    Membership,
    Policy,
    RestoreRequested,
    SliceLost,
    SliceTaken,
    StartHost,
)


class FakeFleet:
    """A fleet that notes what it is asked."""

    def __init__(self, slices: int) -> None:
        self.slices = slices
        self.asked: list[Any] = []

    def grant(self, index: int) -> None:
        if index >= self.slices:
            raise UsageError(f"there is no slice {index}")
        self.asked.append(("grant", index))

    def take(self, index: int, cause: str) -> None:
        self.asked.append(("take", index, cause))

    async def wait_ended(self, index: int, incarnation: int, timeout_s: float) -> None:
        self.asked.append(("wait", index, incarnation))


def test_a_lease_is_taken_once_and_lost_by_its_own_number() -> None:
    async def main() -> None:
        launcher, fleet = LeasedLauncher("/nowhere"), FakeFleet(2)
        leases = Leases(launcher, fleet)  # type: ignore[arg-type]
        leases.grant(0, Lease(4, 1))
        leases.grant(0, Lease(4, 1))
        assert fleet.asked == [("grant", 0)]
        with pytest.raises(UsageError):
            leases.grant(2, Lease(5, 1))
        assert leases.ranks() == {0}
        launcher.placed[0, 1] = Lease(4, 1)
        leases.grant(0, Lease(5, 3))
        # The loss of what was there before says nothing of what is there now.
        event = leases.lost(0, 1, "SIGKILL")
        assert event is not None
        assert (event["slice"], event["incarnation"], event["text"]) == (4, 1, "SIGKILL")
        assert leases.ranks() == {0}
        assert leases.lost(0, 1, "again") is None
        leases.withdraw(Lease(4, 1), "late")
        assert leases.ranks() == {0}
        launcher.placed[0, 2] = Lease(5, 3)
        await leases.give_back(Lease(5, 3), "others need it")
        assert fleet.asked[-2:] == [("take", 0, "others need it"), ("wait", 0, 2)]
        assert leases.ranks() == set()

    asyncio.run(main())


def test_a_leased_slice_starts_when_it_is_granted_and_only_then() -> None:
    membership = Membership([1], Policy(leased=True, start_s=5))
    assert membership.tick(100) == ()
    (start,) = membership.handle(RestoreRequested(0), 100)
    assert start == StartHost(0, 1, 0)
    membership.handle(HostConnected(0, 1, 0), 101)
    membership.handle(HostReady(0, 1, 0), 101)
    taken = membership.handle(SliceTaken(0, "job high needs it"), 102)
    assert SliceLost(0, 1, "job high needs it", True) in taken
    assert "when there is a slice to take its place" in membership.describe_loss(0, 1, 0)
    assert membership.handle(SliceTaken(0, "again"), 103) == ()
    # Neither does a start that fails bring another one by itself.
    membership.handle(RestoreRequested(0), 130)
    assert membership.tick(130) == (StartHost(0, 2, 0),)
    assert any(isinstance(one, SliceLost) for one in membership.tick(136))
    assert membership.tick(1000) == ()
    membership.validate()


def test_a_specification_passes_as_json() -> None:
    spec = {"secret": b"\x00\xff", "devices": [0, 1], "log_level": "info", "endpoint": None}
    assert unpack_spec(pack_spec(spec)) == spec
