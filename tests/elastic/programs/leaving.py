"""Ends while a slice hangs, with a check and a snapshot that wait for it."""

from __future__ import annotations

import sys

import numpy as np
from elastic_rig import mesh_of, stop, there

from regrow.elastic import Snapshotter, elastic

if __name__ == "__main__":
    state = there(np.ones(8, np.float32), mesh_of(0, 1)) + 1
    assert elastic.get_active_slice_indices() == {0, 1}
    snapshotter = Snapshotter()
    snapshotter.save(0, state)
    snapshotter.join()
    stop(1)
    if sys.argv[1] == "check":
        assert elastic.get_active_slice_indices(timeout=0.2) == {0}
    else:
        assert snapshotter.save(1, state + 1)
    print("leaves", flush=True)
