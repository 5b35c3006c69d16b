"""Checkpoints whose bytes go between hosts and storage; and the zarr that they are."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow import LocalCluster
from regrow.errors import StorageError
from regrow.suspend.zarr import Grid

CLIENT = Path(__file__).with_name("persistence_client.py")


@pytest.mark.slow
def test_orbax_saves_and_restores_without_the_head(tmp_path: Path) -> None:
    with LocalCluster(2, 2) as cluster:
        done = subprocess.run(
            [sys.executable, str(CLIENT), str(tmp_path)],
            env=os.environ | cluster.env | {"ENABLE_PATHWAYS_PERSISTENCE": "1"},
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["equal"] == [True] * 5
    assert "nothing/.zarray cannot be read: No such file" in told["error"]


@given(st.data())
def test_any_region_is_put_together_from_its_chunks(data: st.DataObject) -> None:
    sizes = st.integers(1, 7)
    shape = tuple(data.draw(st.lists(sizes, min_size=0, max_size=3)))
    chunk = tuple(data.draw(sizes) for _ in shape)
    region = []
    for size in shape:
        start = data.draw(st.integers(0, size - 1))
        region.append((start, data.draw(st.integers(start + 1, size))))
    grid = Grid(shape, chunk, 11)
    value = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    padded = value
    for axis, (size, part) in enumerate(zip(shape, chunk, strict=True)):
        more = [(0, 0)] * len(shape)
        more[axis] = (0, -size % part)
        padded = np.pad(padded, more)
    counts = [-(-size // part) for size, part in zip(shape, chunk, strict=True)]
    chunks = {}
    for index in itertools.product(*map(range, counts)):
        where = tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, chunk, strict=True))
        chunks[".".join(map(str, index)) or "0"] = padded[where]
    out = np.full([stop - start for start, stop in region], -1)
    for name, inside, target in grid.covering(tuple(region)):
        part = chunks[name][tuple(slice(*span) for span in inside)]
        out[tuple(slice(*span) for span in target)] = part
    assert (out == value[tuple(slice(*span) for span in region)]).all()
    place = grid.place(tuple(region))
    assert place is None or (chunks[place] == out).all()
    assert Grid.read(grid.metadata(), "w") == grid


@pytest.mark.parametrize(
    "change",
    [
        {"zarr_format": 3},
        {"compressor": {"id": "zstd"}},
        {"order": "F"},
        {"dtype": ">f4"},
        {"dimension_separator": "/"},
    ],
)
def test_other_zarr_is_refused(change: dict[str, object]) -> None:
    told = json.loads(Grid((4,), (2,), 11).metadata()) | change
    with pytest.raises(StorageError, match=r"^w "):
        Grid.read(json.dumps(told).encode(), "w")
