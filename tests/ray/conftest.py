"""Real Ray clusters on this machine: one for each module that needs one."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cloud"))
sys.path.insert(0, str(Path(__file__).parent))

from cloud_server import LocalCloud

from regrow.ray.head import RayHead, start_head

MISSING = "Ray is not installed: NOTHING of its tests runs (pip install 'regrow[ray]')"


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    """The head of a Ray cluster without further nodes."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip(MISSING)
    started = start_head(port=0, dashboard_port=0)
    yield started
    started.end()


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCloud]:
    """A local Cloud TPU with slices of processes."""
    local = LocalCloud(tmp_path_factory.mktemp("cloud"), "--notice", "0.2", "--stop", "2")
    local.start()
    yield local
    local.stop()
