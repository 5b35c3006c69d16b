"""pathwaysutils and Orbax through Regrow, as a client of a cluster of several slices."""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pathwaysutils
from cases import case, run_cases
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pathwaysutils.elastic import elastic, manager
from pathwaysutils.experimental import (
    concatenate_by_mesh_axis,
    reshard,
    split_by_mesh_axis,
)

pathwaysutils.initialize()
DEVICES = jax.devices()
SLICES = 1 + max(d.slice_index for d in DEVICES)
MESH = Mesh(np.array(DEVICES).reshape(SLICES, -1), ("replica", "model"))
TURNED = Mesh(np.array(DEVICES[::-1]).reshape(SLICES, -1), ("replica", "model"))
TABLE = np.arange(64, dtype=np.float32).reshape(8, 8)


def there(x: Any, mesh: Mesh = MESH, *spec: Any) -> Any:
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


@case
def slices_are_seen() -> None:
    made = manager.Manager()
    try:
        assert made.total_slice_count == SLICES
        assert made.active_slice_indices == frozenset(range(SLICES))
        assert elastic.get_active_slice_indices(made.slice_to_devices) == set(range(SLICES))
        waited = elastic.wait_for_slices(
            slice_count=SLICES,
            slice_to_devices=made.slice_to_devices,
            poll_interval=0.1,
            timeout=20,
        )
        assert waited == set(range(SLICES))
    finally:
        made.close()


@case
def elastic_retry_runs_a_loop() -> None:
    made = manager.Manager()
    try:

        @made.elastic_retry(minimum_slice_count=1, poll_interval=0.2, timeout=20)
        def loop() -> float:
            return float(jax.jit(jnp.sum)(there(TABLE, MESH, "replica", "model")))

        assert loop() == TABLE.sum()
    finally:
        made.close()


@case
def split_and_concatenate() -> None:
    trees = {
        "split": there(TABLE, MESH, None, "model"),
        "along": there(TABLE, MESH, "replica", "model"),
        "whole": there(TABLE[0], MESH),
    }
    parts = split_by_mesh_axis.split_by_mesh_axis(trees, "replica")
    assert len(parts) == SLICES
    for index, part in enumerate(parts):
        assert {d.slice_index for d in part["split"].sharding.device_set} == {index}
        assert np.array_equal(part["split"], TABLE)
    again = concatenate_by_mesh_axis.concatenate_by_mesh_axis(parts, "replica")
    for name, x in trees.items():
        assert np.array_equal(again[name], x), name


@case
def pathways_reshard() -> None:
    tree = {"a": there(TABLE, MESH, "replica", "model"), "b": there(TABLE[0], MESH, "model")}
    for donate in (False, True):
        for cache in (False, True):
            wanted = {
                "a": NamedSharding(TURNED, P("model", "replica")),
                "b": NamedSharding(TURNED, P(), memory_kind="pinned_host"),
            }
            source = jax.tree.map(jnp.copy, tree)
            got = reshard.reshard(
                source, wanted, donate=donate, may_alias=None, cache_resharding_plans=cache
            )
            for name, value in (("a", TABLE), ("b", TABLE[0])):
                assert got[name].sharding == wanted[name]
                assert np.array_equal(got[name], value)
                assert source[name].is_deleted() == donate


@case
def snapshotter() -> None:
    state = {
        "w": there(TABLE, MESH, None, "model"),
        "step": there(np.int32(7), MESH),
    }
    snapshotter = ocp.v1.training.pathways.Snapshotter(replica_axis_index=0)
    snapshotter.save(7, {"state": state, "step": 7})
    snapshotter.join()
    assert snapshotter.latest is not None
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    got = snapshotter.load({"state": abstract, "step": 0})
    assert got["step"] == 7
    for name, x in state.items():
        assert got["state"][name].sharding == x.sharding
        assert np.array_equal(got["state"][name], x)


@case
def standard_checkpointer() -> None:
    state = {"w": there(TABLE, MESH, "replica", "model"), "b": there(TABLE[0], MESH, "model")}
    target = {
        "w": NamedSharding(TURNED, P("model", "replica")),
        "b": NamedSharding(MESH, P()),
    }
    abstract = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=target[name])
        for name, x in state.items()
    }
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(f"{folder}/one", state)
        checkpointer.wait_until_finished()
        got = checkpointer.restore(f"{folder}/one", abstract)
        for name, x in state.items():
            assert got[name].sharding == target[name]
            assert np.array_equal(got[name], x)


if __name__ == "__main__":
    sys.exit(run_cases())
