from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cloud_server import LocalCloud


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCloud]:
    """A local Cloud TPU whose slices have no processes."""
    cloud = LocalCloud(tmp_path_factory.mktemp("cloud"), "--simulate", "--notice", "0.2")
    cloud.start()
    yield cloud
    assert "Error" not in cloud.stop()


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[LocalCloud]:
    """A local Cloud TPU with slices of processes; to be started."""
    cloud = LocalCloud(tmp_path / "cloud", "--notice", "0.2", "--stop", "2")
    yield cloud
    if cloud.process is not None:
        cloud.stop()
