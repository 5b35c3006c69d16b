"""The manager through simulated hours of failures, its own deaths included."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jobs_world import HOUR_S, Manners, World

from regrow.jobs.model import JobSpec, Policy, Shape

SMALL = Shape("cpu", 1, 2)
LARGE = Shape("cpu", 2, 8)


@st.composite
def specs(draw: st.DrawFn, name: str) -> JobSpec:
    slices = draw(st.integers(1, 3))
    return JobSpec(
        name=name,
        slices=slices,
        shape=draw(st.sampled_from([SMALL, SMALL, SMALL, LARGE])),
        priority=draw(st.sampled_from([0, 0, 100, 2000])),
        preempts=draw(st.sampled_from([True, True, True, False])),
        min_slices=draw(st.none() | st.integers(1, slices)),
        suspendable=draw(st.booleans()),
        restart=draw(st.sampled_from(["never", "on-failure"])),
        max_restarts=draw(st.integers(0, 2)),
    )


@st.composite
def jobs(draw: st.DrawFn) -> list[JobSpec]:
    return [draw(specs(f"job-{number}")) for number in range(draw(st.integers(2, 6)))]


def storm(
    jobs: list[JobSpec], small: int, large: int, spares: int, manners: Manners, hours: float
) -> World:
    """The world after so many hours of failures and one of calm."""
    world = World([SMALL] * small + [LARGE] * large, Policy(spares=spares), manners)
    for spec in jobs:
        world.after(world.random.uniform(0, 1800), lambda one=spec: world.submit(one))
    world.storm(hours * HOUR_S)
    world.settle()
    world.check_served()
    return world


@given(
    jobs=jobs(),
    small=st.integers(2, 6),
    large=st.integers(0, 2),
    spares=st.sampled_from([0, 0, 1]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
def test_nobody_is_wronged_in_hours_of_failures(
    jobs: list[JobSpec], small: int, large: int, spares: int, seed: int
) -> None:
    storm(jobs, small, large, spares, Manners(seed), hours=2)


@pytest.mark.parametrize("seed", range(5))
def test_two_jobs_share_a_spare_through_a_day(seed: int) -> None:
    high = JobSpec(name="high", slices=3, priority=2000, restart="on-failure", shape=SMALL)
    low = JobSpec(name="low", slices=2, suspendable=True, restart="on-failure", shape=SMALL)
    manners = Manners(seed, mean_life_s=1200, repair_s=600, manager_life_s=3600)
    world = storm([high, low], 6, 0, 0, manners, hours=24)
    # The day was no quiet one, and both are there at its end.
    assert world.grants > 50
    assert world.clients["high"].running
    assert world.clients["low"].running
