"""Every fault in every phase of a client's work, with real processes."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

import pytest
from failure_matrix import CELLS, run_cell, sample
from failure_rig import Hang, Rig

# The quick run: a sample within this time, by a seed that can be given.
SAMPLE_S = 30.0
SEED = int(os.environ.get("REGROW_TEST_SEED", "1"))
LONGEST_DELAY_S = 0.15


@pytest.fixture(scope="module")
def shared_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    pytest.importorskip("orbax.checkpoint")
    pytest.importorskip("pathwaysutils")
    rig = Rig(tmp_path_factory.mktemp("home"))
    yield rig
    rig.close()


@pytest.fixture
def rig(shared_rig: Rig) -> Rig:
    """Three slices of two devices, all up, and a client."""
    shared_rig.ready()
    return shared_rig


def run(rig: Rig, cell: tuple[str, str], cells_run: list[str]) -> None:
    fault, phase = cell
    cells_run.append(f"{fault}, {phase}")
    chance = random.Random(f"{SEED} {fault} {phase}")
    # At once, which hits the phase itself for certain, or a little later.
    delay_s = chance.choice((0.0, chance.uniform(0, LONGEST_DELAY_S)))
    began = rig.accounts()
    try:
        took = run_cell(rig, fault, phase, delay_s)
    except Exception as error:
        error.add_note(f"processes before:\n{began}\nand now:\n{rig.accounts()}")
        if isinstance(error, Hang):
            rig.renew_client()
        error.add_note(f"fault: {fault}; phase: {phase}; {delay_s:.3f} s after its begin")
        raise
    print(f"{fault}, {phase}: {took}")


@pytest.mark.timeout(300)
def test_a_sample_of_the_matrix(rig: Rig, cells_run: list[str]) -> None:
    ends_at = time.monotonic() + SAMPLE_S
    for cell in sample(len(CELLS), SEED):
        if time.monotonic() > ends_at:
            break
        run(rig, cell, cells_run)


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell[0]}-{cell[1]}".replace(" ", "_"))
def test_the_matrix(rig: Rig, cell: tuple[str, str], cells_run: list[str]) -> None:
    run(rig, cell, cells_run)
