"""What a job makes of what it is told, and of the deaths of the manager."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs_process import SHAPE, FakeHosts, Peer, Process

from regrow.errors import NoClusterError, UsageError
from regrow.jobs.tenant import Tenancy, Tenant, place_of
from waiting import until


def grant(rank: int, index: int, incarnation: int) -> dict[str, Any]:
    return {"kind": "Grant", "rank": rank, "index": index, "incarnation": incarnation}


def test_what_is_told_twice_or_late_changes_nothing() -> None:
    tenancy = Tenancy()
    assert tenancy.take(grant(0, 3, 2))
    assert not tenancy.take(grant(0, 3, 2))
    assert not tenancy.take(grant(1, 3, 1))
    assert tenancy.leases == {0: (3, 2)}
    withdraw = {"kind": "Withdraw", "index": 3, "incarnation": 1}
    assert not tenancy.take(withdraw)
    assert tenancy.take(withdraw | {"incarnation": 2})
    assert not tenancy.take(withdraw | {"incarnation": 2})
    assert not tenancy.take(grant(0, 3, 2))
    assert tenancy.take({"kind": "Start", "attempt": 1, "restore": False})
    assert not tenancy.take({"kind": "Start", "attempt": 1, "restore": False})
    assert not tenancy.take({"kind": "Stop", "attempt": 2})


def test_what_is_granted_while_an_attempt_stops_is_of_the_next() -> None:
    tenancy = Tenancy()
    tenancy.take(grant(0, 0, 1))
    tenancy.take({"kind": "Start", "attempt": 1})
    tenancy.take({"kind": "Stop", "attempt": 1})
    tenancy.take({"kind": "Withdraw", "index": 0, "incarnation": 1})
    tenancy.take(grant(0, 1, 1))
    tenancy.ended()
    assert tenancy.leases == {0: (1, 1)}
    tenancy.take({"kind": "Start", "attempt": 2})
    tenancy.ended()
    assert tenancy.leases == {}


def test_an_address_is_a_path_and_a_name_is_none() -> None:
    assert place_of("pool") is None
    assert place_of("unix:/run/x/jobs.sock") == Path("/run/x")
    assert place_of("/run/x") == Path("/run/x")


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    running = Process(tmp_path / "jobs")
    Peer(running).close()
    yield running
    running.end()


def test_what_a_dead_manager_did_not_confirm_is_told_to_the_next(process: Process) -> None:
    hosts = FakeHosts(process, 2)
    with Tenant(process.directory) as tenant:
        tenant.submit({"name": "one", "slices": 2, "shape": SHAPE})

        def started() -> bool:
            hosts.obey()
            tenant.step()
            return tenant.tenancy.attempt == 1

        until(started)
        assert set(tenant.tenancy.leases) == {0, 1}
        process.end()
        index, incarnation = tenant.tenancy.leases[1]
        tenant.tenancy.lost(index, incarnation)
        # Nobody is there to hear it.
        tenant.tell("SliceFailed", index=index, incarnation=incarnation, cause="SIGKILL")
        assert tenant.own_status() is None
        process.start()
        hosts.connection.close()
        hosts = FakeHosts(process, 2)

        def replaced() -> bool:
            hosts.obey()
            tenant.step()
            return set(tenant.tenancy.leases) == {0, 1}

        until(replaced)
        assert tenant.tenancy.leases[1][1] > incarnation
        tenant.ended(ok=True, cause="", attempt=1)
        until(lambda: tenant.own_status() == {})
    hosts.close()


def test_a_wrong_job_and_a_manager_that_is_not_there(process: Process, tmp_path: Path) -> None:
    with Tenant(process.directory) as tenant:
        with pytest.raises(UsageError, match="no priority class 'urgent'"):
            tenant.submit({"name": "one", "slices": 1, "priority_class": "urgent"})
        assert tenant.names() == set()
    with pytest.raises(NoClusterError, match="no shared cluster answers"):
        Tenant(tmp_path)
