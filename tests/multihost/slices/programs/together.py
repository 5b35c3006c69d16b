"""On every host: joins the others, looks around, reads data and traces; tells it in a file."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import grain
import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from regrow.multihost import HostLoader, trace

BATCH = 96


def batches(mesh: Mesh, position: int, number: int) -> list[str]:
    """Digests of whole global batches, which every host can make of what all hosts have read."""
    data = grain.MapDataset.source(np.arange(10_000)).seed(2).shuffle()
    sharding = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    loader = HostLoader(data, BATCH, sharding)
    loader.set_state({"global_next_index": position})
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
    digests = []
    for _ in range(number):
        batch = np.asarray(whole(next(loader)))
        digests.append(hashlib.sha256(batch.tobytes()).hexdigest())
    loader.close()
    return digests


def main() -> None:
    out, position = Path(sys.argv[1]), int(sys.argv[2])
    jax.distributed.initialize()
    devices = jax.devices()
    slices = sorted({device.slice_index for device in devices})
    per_slice = len(devices) // len(slices)
    mesh_devices = mesh_utils.create_hybrid_device_mesh((1, per_slice), (len(slices), 1))
    mesh = Mesh(mesh_devices, ("data", "fsdp"))
    digests = batches(mesh, position, 3)
    with trace(out / "traces"):
        digests += batches(mesh, position + 3 * BATCH, 1)
    told = {
        "jax": jax.__version__,
        "devices": len(devices),
        "slices": slices,
        "own": sorted({device.slice_index for device in jax.local_devices()}),
        "mesh": [[device.slice_index for device in row] for row in mesh_devices],
        "digests": digests,
    }
    (out / f"process-{jax.process_index()}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
