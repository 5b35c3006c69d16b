"""Orbax with ENABLE_PATHWAYS_PERSISTENCE=1: saves, and restores to the same and to another sharding."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pathwaysutils
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pathwaysutils.persistence import helper

pathwaysutils.initialize()


def main(directory: Path) -> None:
    devices = np.array(jax.devices()).reshape(2, -1)
    mesh, turned = Mesh(devices, ("a", "b")), Mesh(devices.T, ("x", "y"))
    wide = np.random.default_rng(1).standard_normal((8, 12)).astype(np.float32)

    def put(value: np.ndarray, spec: P) -> jax.Array:
        return jax.device_put(value, NamedSharding(mesh, spec))

    tree = {
        "w": put(wide, P("a", "b")),
        "half": put(wide.astype(ml_dtypes.bfloat16), P(None, "b")),
        "step": put(np.int32(7), P()),
        "deep": {"one": put(np.arange(8), P("a"))},
    }
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(directory / "ckpt", tree)
    # What is given away while it is being written is written as it was.
    jax.jit(lambda x: x * 0, donate_argnums=0)(tree["w"]).block_until_ready()
    checkpointer.wait_until_finished()

    specs = {"w": P("y", "x"), "half": P("x"), "step": P(), "deep": {"one": P("y")}}
    other = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(turned, spec)
        ),
        tree,
        specs,
    )
    restored = checkpointer.restore(directory / "ckpt", other)
    equal = [
        np.asarray(restored["w"]).tobytes() == wide.tobytes(),
        np.asarray(restored["half"]).tobytes() == wide.astype(ml_dtypes.bfloat16).tobytes(),
        int(restored["step"]) == 7,
        np.asarray(restored["deep"]["one"]).tolist() == list(range(8)),
    ]
    (path,) = (directory / "ckpt").rglob("w/.zarray")
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(path.parent)}}
    read = ts.open(spec, read=True).result().read().result()
    equal.append(read.tobytes() == wide.tobytes())
    try:
        x = restored["w"]
        args = ([x.dtype], [x.shape], [x.sharding], turned.devices, helper.datetime.timedelta(60))
        _, future = helper.read_arrays(str(directory / "ckpt"), ["nothing"], *args)
        future.result()
        error = ""
    except Exception as failed:
        error = str(failed)
    print(json.dumps({"equal": equal, "error": error}))


main(Path(sys.argv[1]))
