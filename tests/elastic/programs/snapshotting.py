"""`Snapshotter` on slices that die before, in the middle of and after its work."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from cases import run_cases
from elastic_rig import (
    DEVICES,
    LOST,
    case,
    control,
    kill,
    logged,
    mesh_of,
    restore,
    stop,
    there,
    whole,
)
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from regrow.elastic import Snapshotter, replicas, snapshots
from regrow.errors import SnapshotError, UsageError, WaitTimeout

P = PartitionSpec
KEY = np.asarray(jax.random.key_data(jax.random.key(7)))
TABLE = np.arange(64, dtype=np.float32).reshape(8, 8)
PARAMS = {
    "split": (TABLE, (None, "model")),
    "whole": (TABLE[0], ()),
    "half": (TABLE.astype(ml_dtypes.bfloat16), ("model",)),
    "bools": (TABLE > 9, ()),
    "bytes": (np.arange(600, dtype=np.int8), ()),
    "scalar": (np.float32(3.5), ()),
    "empty": (np.zeros((0, 4), np.float32), ()),
}


def state_on(mesh: Mesh, shift: float = 0.0) -> dict[str, Any]:
    """A state with leaves of all kinds."""
    params = {
        name: there(
            value if value.dtype == bool else (value + shift).astype(value.dtype), mesh, *spec
        )
        for name, (value, spec) in PARAMS.items()
    }
    return {
        "params": params,
        "key": jax.device_put(jax.random.key(7), NamedSharding(mesh, P())),
        "count": jax.device_put(jnp.int32(11), mesh.devices.flat[0]),
        "step": 5,
        "iterator": {"position": 40, "names": ["a", None], "seen": np.arange(3)},
    }


def abstract(state: Any, mesh: Mesh, spec: Callable[[P], P] = lambda spec: spec) -> Any:
    """The target of a state on a mesh."""

    def of_leaf(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return 0
        if isinstance(x.sharding, SingleDeviceSharding):
            sharding: Any = SingleDeviceSharding(mesh.devices.flat[-1])
        else:
            sharding = NamedSharding(mesh, spec(x.sharding.spec))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(of_leaf, state)


def check(got: Any, target: Any, shift: float = 0.0) -> None:
    """Every bit and every sharding."""
    for name, (value, _) in PARAMS.items():
        wanted = value if value.dtype == bool else (value + shift).astype(value.dtype)
        assert np.asarray(got["params"][name]).tobytes() == wanted.tobytes(), name
        assert got["params"][name].sharding == target["params"][name].sharding, name
    assert got["key"].dtype == jax.random.key(7).dtype
    assert np.array_equal(np.asarray(jax.random.key_data(got["key"])), KEY)
    assert int(got["count"]) == 11
    assert got["count"].sharding == target["count"].sharding
    assert got["step"] == 5
    assert got["iterator"]["position"] == 40
    assert got["iterator"]["names"] == ["a", None]
    assert np.array_equal(got["iterator"]["seen"], np.arange(3))


def saved(*slices: int, step: int = 5, **options: Any) -> tuple[Snapshotter, dict[str, Any]]:
    state = state_on(mesh_of(*slices))
    snapshotter = Snapshotter(**options)
    assert snapshotter.latest is None
    assert snapshotter.save(step, state)
    snapshotter.join(60)
    assert snapshotter.latest is not None
    assert snapshotter.latest.step == step
    return snapshotter, state


def raised(kind: type[BaseException], function: Callable[[], Any]) -> str:
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")


@case
def a_slice_is_lost_and_returns() -> None:
    snapshotter, state = saved(0, 1, 2)
    kill(1)
    target = abstract(state, mesh_of(0, 2))
    check(snapshotter.load(target), target)
    restore(1)
    whole()
    # Laid out anew, each replica of the new mesh has a copy, the returned slice as well.
    target = abstract(state, mesh_of(0, 1, 2))
    check(snapshotter.load(target), target)
    kill(0)
    kill(2)
    target = abstract(state, mesh_of(1))
    check(snapshotter.load(target), target)
    assert snapshotter.latest is not None
    assert snapshotter.latest.step == 5


@case
def onto_other_layouts() -> None:
    snapshotter, state = saved(0, 1)
    devices = np.asarray([d for d in DEVICES if d.slice_index in (1, 2)])
    for shape in ((1, 4), (4, 1), (2, 2)):
        mesh = Mesh(devices.reshape(shape), ("replica", "model"))
        target = abstract(state, mesh)
        for reset in (False, True):
            check(snapshotter.load(target, reset_snapshot_state=reset), target)
    turned = abstract(
        state, mesh, lambda spec: P(*reversed(tuple(spec))) if len(spec) > 1 else spec
    )
    check(snapshotter.load(turned), turned)


@case
def onto_a_layout_that_allows_no_snapshot_the_former_stays() -> None:
    snapshotter, state = saved(0, 1)
    mesh = mesh_of(0, 1)
    target = abstract(state, mesh)
    spread = dict(target["params"])
    spread["split"] = jax.ShapeDtypeStruct(
        (8, 8), np.float32, sharding=NamedSharding(mesh, P("replica", "model"))
    )
    with logged() as log:
        got = snapshotter.load(target | {"params": spread})
    assert np.array_equal(got["params"]["split"], TABLE)
    assert "the former snapshot stays" in log.text
    assert "params/split: it is sharded over the replica axis" in log.text
    kill(0)
    target = abstract(state, mesh_of(1))
    check(snapshotter.load(target), target)


@case
def the_state_may_be_donated_at_once() -> None:
    mesh = mesh_of(0, 1, 2)
    snapshotter = Snapshotter()
    state = state_on(mesh)
    params = state["params"]
    add = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    target = abstract(state, mesh)
    assert snapshotter.save(1, state)
    for _ in range(5):
        params = add(params)
    snapshotter.join(60)
    got = snapshotter.load(target)
    check(got, target)
    add(got["params"])["whole"].block_until_ready()
    check(snapshotter.load(target), target)


@case
def leaves_that_live_in_host_memory_are_no_part_of_the_snapshot() -> None:
    mesh = mesh_of(0, 1)
    sharding = NamedSharding(mesh, P(None, "model"), memory_kind="pinned_host")
    state = {"offloaded": jax.device_put(TABLE, sharding)}
    target = {"offloaded": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=sharding)}
    snapshotter = Snapshotter()
    snapshotter.save(0, state)
    snapshotter.join(60)
    state["offloaded"].delete()
    for _ in range(2):
        got = snapshotter.load(target)
        assert got["offloaded"].sharding == sharding
        assert np.array_equal(got["offloaded"], TABLE)
        got["offloaded"].delete()


@case
def other_leaves_belong_to_the_snapshot() -> None:
    snapshotter, state = saved(0, 1)
    state["iterator"]["names"].append("later")
    state["iterator"]["seen"][:] = 9
    target = abstract(state, mesh_of(0, 1))
    target["iterator"]["names"] = [0, None]
    got = snapshotter.load(target)
    check(got, target)
    got["iterator"]["names"].append("later")
    got["iterator"]["seen"][:] = 9
    check(snapshotter.load(target), target)


@case
def a_state_on_one_device_or_without_arrays() -> None:
    snapshotter = Snapshotter()
    for state in ({"count": jnp.int32(3), "key": jax.random.key(7), "name": "x"}, {"name": "x"}):
        assert snapshotter.save(3, state)
        snapshotter.join(60)
        if "count" in state:
            kill(0)
        target = jax.tree.map(
            lambda x: (
                jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(DEVICES[-1]))
                if isinstance(x, jax.Array)
                else x
            ),
            state,
        )
        got = snapshotter.load(target)
        assert got["name"] == "x"
        if "count" in state:
            assert int(got["count"]) == 3
            assert np.array_equal(np.asarray(jax.random.key_data(got["key"])), KEY)


def at_call(number: int, name: str, act: Callable[[], None]) -> Callable[[], None]:
    """Does something at the n-th call of a part of `load`; returns what undoes this."""
    stock = getattr(snapshots, name)
    calls = iter(range(1, 1000))

    def instead(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            act()
        return stock(*args, **kwargs)

    setattr(snapshots, name, instead)
    return lambda: setattr(snapshots, name, stock)


POINTS = [("_begin_hashes", 1), ("_begin_hashes", 2), ("moved", 1), ("moved", 2), ("capture", 1)]


def small_chunks() -> Iterator[None]:
    before = replicas.CHUNK_BYTES
    replicas.CHUNK_BYTES = 400  # type: ignore[misc]
    yield
    replicas.CHUNK_BYTES = before  # type: ignore[misc]


@case
def a_second_slice_may_die_at_any_point_of_load() -> None:
    chunks = small_chunks()
    next(chunks)
    for name, number in POINTS:
        whole()
        snapshotter, state = saved(0, 1, 2)
        before = snapshotter._slot.latest
        kill(1)
        undo = at_call(number, name, lambda: kill(2))
        text = raised(LOST, functools.partial(snapshotter.load, abstract(state, mesh_of(0, 2))))
        undo()
        assert "DATA_LOSS: slice 2 was lost" in text, (name, text)
        assert snapshotter._slot.latest is before, name
        target = abstract(state, mesh_of(0))
        check(snapshotter.load(target), target)
    next(chunks, None)


@case
def a_second_slice_that_is_no_target_may_die_at_any_point_of_load() -> None:
    chunks = small_chunks()
    next(chunks)
    for name, number in POINTS[1:]:
        whole()
        snapshotter, state = saved(0, 1, 2)
        kill(1)
        undo = at_call(number, name, lambda: kill(2))
        target = abstract(state, mesh_of(0))
        # It depends on how far the slice's part was whether it was still needed.
        with contextlib.suppress(LOST):
            check(snapshotter.load(target), target)
        undo()
        check(snapshotter.load(target), target)
    next(chunks, None)


def corrupt(snapshotter: Snapshotter, replica: int, path: str) -> None:
    """Changes one bit of a copy, as a fault of the memory would."""
    latest = snapshotter._slot.latest
    assert latest is not None
    step, snapshot = latest
    group = snapshot.groups[0]
    place = group.paths.index(path)
    copy = group.copies[replica][place]
    value = np.array(copy)
    value.reshape(-1).view(np.uint8)[17 % value.nbytes] ^= 1
    copies = [list(arrays) for arrays in group.copies]
    copies[replica][place] = jax.device_put(value, copy.sharding)
    group = dataclasses.replace(group, copies=tuple(map(tuple, copies)))
    snapshotter._slot.replace(step, dataclasses.replace(snapshot, groups=(group,)))


@case
def a_corrupt_replica_yields_to_another() -> None:
    for path in ("params/split", "params/half", "params/bools", "params/bytes", "key", "count"):
        snapshotter, state = saved(0, 1)
        corrupt(snapshotter, 0, path)
        target = abstract(state, mesh_of(0, 1))
        with logged() as log:
            check(snapshotter.load(target), target)
        assert f"replica 0 is corrupt at {path}; it is not used" in log.text
        check(snapshotter.load(target), target)


@case
def nothing_left_is_one_clear_error() -> None:
    snapshotter, state = saved(0, 1)
    corrupt(snapshotter, 1, "params/split")
    kill(0)
    text = raised(SnapshotError, lambda: snapshotter.load(abstract(state, mesh_of(1))))
    assert "no replica of the snapshot of step 5 is left: " in text
    assert "replica 0 is lost (slice 0, incarnation" in text
    assert "replica 1 is corrupt at params/split; it is not used" in text
    empty = raised(RuntimeError, lambda: Snapshotter().load({}))
    assert empty == "No snapshots available to restore from."


@case
def replicas_that_differ_are_told() -> None:
    mesh = mesh_of(0, 1)
    pieces = [
        jax.device_put(np.full(8, device.slice_index, np.float32), device)
        for device in mesh.devices.flat
    ]
    state = {
        "same": there(TABLE, mesh),
        "w": jax.make_array_from_single_device_arrays((8,), NamedSharding(mesh, P()), pieces),
    }
    with logged() as log:
        snapshotter = Snapshotter()
        snapshotter.save(9, state)
        snapshotter.join(60)
    assert "step 9: replicas 0 and 1 differ at w" in log.text


@case
def what_cannot_be_saved() -> None:
    mesh = mesh_of(0, 1)
    snapshotter = Snapshotter()
    deleted = there(TABLE, mesh)
    deleted.delete()
    flat = Mesh(np.asarray(DEVICES[:4]), ("model",))
    wrong = {
        "x/y: it is sharded over the replica axis 'replica'": there(TABLE, mesh, "replica"),
        "x/y: the array was donated or deleted": deleted,
        "x/y: a generator cannot be part of a snapshot": (n for n in ()),
    }
    for text, leaf in wrong.items():
        state = {"ok": there(TABLE, mesh), "x": {"y": leaf}}
        assert text in raised(UsageError, lambda state=state: snapshotter.save(1, state))
        assert snapshotter.latest is None
    assert "x: its mesh has the axes ('model',), and none of index 1" in raised(
        UsageError, lambda: Snapshotter(replica_axis_index=1).save(1, {"x": there(TABLE, flat)})
    )
    assert "replica_axis_index is 'x'" in raised(
        UsageError,
        lambda: Snapshotter(replica_axis_index="x"),  # type: ignore[arg-type]
    )
    differ = {"a": there(TABLE, mesh), "b": there(TABLE, mesh_of(0))}
    assert "differ in the number of replicas" in raised(
        UsageError, lambda: snapshotter.save(1, differ)
    )
    for step in ("last", None, float("inf")):
        assert f"the step is {step!r}; it must be a whole number" in raised(
            UsageError, lambda step=step: snapshotter.save(step, {"x": there(TABLE, mesh)})
        )
    assert snapshotter.save(1, {"x": there(TABLE, mesh)}), "a refused save does not block the next"
    snapshotter.join(60)


@case
def what_does_not_fit() -> None:
    snapshotter, state = saved(0, 1)
    target = abstract(state, mesh_of(0, 1))

    def text(**changes: Any) -> str:
        return raised(UsageError, lambda: snapshotter.load(target | changes))

    struct = jax.ShapeDtypeStruct
    assert "count: the snapshot holds int32[], the target is int32[2]" in text(
        count=struct((2,), np.int32)
    )
    assert "count: the snapshot holds int32[], the target is float32[]" in text(
        count=struct((), np.float32)
    )
    assert "count: the snapshot holds an array int32[], the target is a int" in text(count=1)
    assert "step: the snapshot holds a int, the target is an array int32[]" in text(
        step=struct((), np.int32)
    )
    assert "'more' is in the target only" in text(more=1)
    assert "'step' is in the snapshot only" in text(step=None)
    assert "in other containers" in text(iterator={"position": 1, "names": (1, None), "seen": 1})
    check(snapshotter.load(target), target)


@case
def a_save_while_one_runs_is_skipped_and_says_so() -> None:
    mesh = mesh_of(0, 1, 2)
    state = state_on(mesh)
    snapshotter, _ = saved(0, 1, 2, step=1)
    stop(1)
    assert snapshotter.save(2, state) is True
    with logged() as log:
        assert snapshotter.save(3, state) is False
        assert snapshotter.save(4, state) is False
    assert "no snapshot of step 3: that of step 2 is being made" in log.text
    assert "step 4" not in log.text
    assert snapshotter.skipped == 2
    assert snapshotter.latest is not None
    assert snapshotter.latest.step == 1
    assert "waited 0.1 s for the snapshot of step 2" in raised(
        WaitTimeout, lambda: snapshotter.join(0.1)
    )
    control("cont", index=1)
    with logged() as log:
        snapshotter.join(60)
        snapshotter.join(60)
    assert log.text.count("2 snapshots were skipped so far") == 1
    assert snapshotter.latest.step == 2
    assert snapshotter.save(4, state) is True
    snapshotter.join(60)


@case
def a_slice_lost_in_the_middle_of_a_save_leaves_the_former() -> None:
    snapshotter, state = saved(0, 1, 2, step=1)
    lost_step = there(np.int32(3), mesh_of(1))
    stop(1)
    with logged() as log:
        assert snapshotter.save(2, state)
        kill(1)
        snapshotter.join(60)
    assert "no snapshot of step 2, that of step 1 stays: slice 1, incarnation" in log.text
    assert snapshotter.latest is not None
    assert snapshotter.latest.step == 1
    target = abstract(state, mesh_of(0, 2))
    check(snapshotter.load(target), target)
    # A state with a lost slice is refused at once or fails later, and the former stays either way.
    with contextlib.suppress(LOST):
        snapshotter.save(3, state)
    snapshotter.join(60)
    assert snapshotter.latest.step == 1
    # So is a step that is an array of the lost slice.
    assert "DATA_LOSS: slice 1" in raised(LOST, lambda: snapshotter.save(lost_step, {"ok": 3}))
    snapshotter.join(60)
    assert snapshotter.latest.step == 1


@case
def a_load_drops_a_save_that_is_under_way() -> None:
    mesh = mesh_of(0, 1)
    snapshotter, state = saved(0, 1, step=1)
    stop(2)
    late = state_on(mesh_of(0, 1, 2), shift=1.0)
    assert snapshotter.save(2, late)
    target = abstract(state, mesh)
    check(snapshotter.load(target), target)
    control("cont", index=2)
    snapshotter.join(60)
    assert snapshotter.latest is not None
    assert snapshotter.latest.step == 1


@case
def any_axis_may_be_that_of_the_replicas() -> None:
    devices = np.asarray([[d for d in DEVICES if d.slice_index == i] for i in range(3)])
    for index in (1, -1):
        mesh = Mesh(devices.T, ("model", "replica"))
        state = state_on(mesh)
        snapshotter = Snapshotter(replica_axis_index=index)
        snapshotter.save(5, state)
        snapshotter.join(60)
        kill(1)
        target = abstract(state, Mesh(devices[[0, 2]].T, ("model", "replica")))
        check(snapshotter.load(target), target)
        whole()


@case
def stock_orbax_works_beside_it() -> None:
    mesh = mesh_of(0, 1, 2)
    state = {"w": there(TABLE, mesh, None, "model"), "n": there(np.int32(1), mesh)}
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh_of(0, 2), x.sharding.spec)
        ),
        state,
    )
    both = (Snapshotter(), ocp.v1.training.pathways.Snapshotter(replica_axis_index=0))
    for one in both:
        one.save(4, {"state": state, "step": 4})
        one.join()
    kill(1)
    for one in both:
        got = one.load({"state": target, "step": 0})
        assert got["step"] == 4
        assert np.array_equal(got["state"]["w"], TABLE)
        assert one.latest.step == 4
    for name in ("step", "path", "metadata"):
        assert hasattr(both[0].latest, name)
        assert hasattr(both[1].latest, name)


@case
def nothing_is_left_of_it() -> None:
    names = [thread.name for thread in threading.enumerate()]
    assert "regrow-snapshot" not in names


if __name__ == "__main__":
    sys.exit(run_cases())
