"""One cluster and one client for the tests of suspension."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from suspend_rig import STEPS, Rig


@pytest.fixture(scope="package")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig(tmp_path_factory.mktemp("home")) as rig:
        yield rig


@pytest.fixture(scope="package")
def expected(rig: Rig) -> list[dict[str, str]]:
    """The state after STEPS, twice and three times as many, of a run that nothing happened to."""
    rig.client.do("begin")
    digests = []
    for _ in range(3):
        rig.client.do("steps", count=STEPS)
        digests.append(rig.client.do("digest"))
    return digests
