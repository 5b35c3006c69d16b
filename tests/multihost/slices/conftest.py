from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from local_slices import LocalSlices


@pytest.fixture(scope="module")
def slices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSlices]:
    """A local Cloud TPU, without slices yet."""
    made = LocalSlices(tmp_path_factory.mktemp("home"))
    made.start()
    yield made
    made.stop()
