"""What stock JAX can do through Regrow, as a client of a cluster of 2 slices of 4 devices."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from cases import case, run_cases
from jax import export
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

DEVICES = jax.devices()
FIRST, SECOND = DEVICES[:4], DEVICES[4:]
MESH = Mesh(np.array(DEVICES).reshape(2, 4), ("slice", "device"))
EACH = NamedSharding(MESH, P(("slice", "device")))
GRID = NamedSharding(MESH, P("slice", "device"))
WHOLE = NamedSharding(MESH, P())
TABLE = np.arange(64, dtype=np.float32).reshape(8, 8)
DTYPES = (
    *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32"),
    *("complex64", "bfloat16", "int4", "uint4", "int2", "uint2", "float4_e2m1fn"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e5m2fnuz"),
    *("float8_e4m3fnuz", "float8_e4m3", "float8_e3m4", "float8_e8m0fnu"),
)
WIDE_DTYPES = ("int64", "uint64", "float64", "complex128")


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def same(got: Any, wanted: Any) -> None:
    """The same shape, dtype and bits."""
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert got.dtype == wanted.dtype, (got.dtype, wanted.dtype)
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    assert got.tobytes() == wanted.tobytes(), (got, wanted)


def error_of(function: Callable[[], Any], kind: type[Exception]) -> str:
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError("no error came")


# --- devices ---


@case
def devices_and_their_attributes() -> None:
    assert [d.id for d in DEVICES] == list(range(8))
    assert [d.slice_index for d in DEVICES] == [0] * 4 + [1] * 4
    assert {d.platform for d in DEVICES} == {"cpu"}
    assert len({tuple(d.coords) for d in FIRST}) == 4
    assert {d.process_index for d in DEVICES} == {0}
    assert jax.device_count() == jax.local_device_count() == 8
    assert jax.process_count() == 1


@case
def memories_of_a_device() -> None:
    for device in DEVICES:
        kinds = {memory.kind for memory in device.addressable_memories()}
        assert kinds == {"device", "pinned_host", "unpinned_host"}
        assert device.default_memory().kind == "device"
    assert len({id(m) for d in DEVICES for m in d.addressable_memories()}) == 24


# --- arrays to and fro ---


@case
def arrays_of_every_dtype() -> None:
    for name in DTYPES:
        value = np.ones((3, 4), dtype_of(name))
        x = jax.device_put(value, DEVICES[5])
        same(x, value)
        same(jax.jit(lambda v: v)(x), value)
        same(jax.device_put(np.ones((8, 2), value.dtype), EACH), np.ones((8, 2), value.dtype))


@case
def values_of_small_dtypes() -> None:
    for name in ("int4", "uint4", "int2", "uint2"):
        dtype = dtype_of(name)
        info = ml_dtypes.iinfo(dtype)
        value = np.arange(info.min, info.max + 1).astype(dtype)
        x = jax.device_put(value)
        same(x, value)
        same(jax.jit(lambda v: v[::-1])(x), value[::-1])


@case
def x64() -> None:
    jax.config.update("jax_enable_x64", True)
    try:
        for name in WIDE_DTYPES:
            value = (np.arange(8) + (1 << 40)).astype(dtype_of(name))
            same(jax.device_put(value, EACH), value)
            same(jax.jit(lambda v: v + 1)(value), value + 1)
    finally:
        jax.config.update("jax_enable_x64", False)


@case
def shapes_and_strides() -> None:
    for value in (
        np.float32(3),
        np.zeros((0, 3), np.float32),
        np.zeros((4, 0), np.int8),
        TABLE.T,
        np.asfortranarray(TABLE),
        TABLE[::2, 1::3],
        TABLE[::-1],
        np.broadcast_to(np.float32(7), (5, 2)),
        TABLE.astype(">f4").astype("<f4"),
    ):
        x = jax.device_put(value, DEVICES[6])
        assert x.devices() == {DEVICES[6]}
        same(x, value)


@case
def sharded_arrays() -> None:
    for spec in (
        P("slice", "device"),
        P("device", "slice"),
        P(("slice", "device")),
        P(("device", "slice")),
        P(None, "slice"),
        P("device"),
        P(),
    ):
        x = jax.device_put(TABLE, NamedSharding(MESH, spec))
        same(x, TABLE)
        for shard in x.addressable_shards:
            same(shard.data, TABLE[shard.index])


@case
def arrays_made_of_parts() -> None:
    x = jax.make_array_from_callback((8, 8), GRID, lambda index: TABLE[index])
    same(x, TABLE)
    parts = [shard.data for shard in x.addressable_shards]
    same(jax.make_array_from_single_device_arrays((8, 8), GRID, parts), TABLE)
    same(jax.make_array_from_process_local_data(GRID, TABLE), TABLE)


@case
def indexing_and_updates() -> None:
    x = jax.device_put(TABLE, GRID)
    assert float(x[5, 3]) == 43
    assert float(x.at[0, 0].set(9)[0, 0]) == 9
    same(x[2:5, ::2], TABLE[2:5, ::2])
    same(jnp.array(x, copy=True), TABLE)
    x.copy_to_host_async()
    same(x, TABLE)
    same(jax.device_get({"a": [x]})["a"][0], TABLE)


@case
def the_life_of_arrays() -> None:
    gc.collect()
    before = len(jax.live_arrays())
    x, y = jnp.ones(3), jnp.zeros(3)
    assert len(jax.live_arrays()) == before + 2
    x.delete()
    assert x.is_deleted()
    assert "deleted" in error_of(partial(np.asarray, x), RuntimeError)
    del x, y
    gc.collect()
    assert len(jax.live_arrays()) == before


# --- programs ---


@case
def jit_on_one_device_and_on_all() -> None:
    a, b = np.float32(np.arange(128).reshape(16, 8)), np.float32(np.arange(128).reshape(8, 16))
    left = jax.device_put(a, GRID)
    right = jax.device_put(b, NamedSharding(MESH, P("device", None)))
    f = jax.jit(lambda u, v: u @ v, out_shardings=GRID)
    for _ in range(3):
        same(f(left, right), a @ b)
    same(jax.jit(lambda u: u + 1)(jax.device_put(a, DEVICES[7])), a + 1)
    assert jax.jit(lambda u: u + 1)(jax.device_put(a, DEVICES[7])).devices() == {DEVICES[7]}


@case
def training_with_donation() -> None:
    def loss(params: Any, x: Any, y: Any) -> Any:
        return ((jax.nn.relu(x @ params["a"]) @ params["b"] - y) ** 2).mean()

    @partial(jax.jit, donate_argnums=0)
    def step(params: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "a": jax.random.normal(keys[0], (16, 32)) / 4,
        "b": jax.random.normal(keys[1], (32, 4)) / 6,
    }
    params = jax.device_put(params, WHOLE)
    x = jax.device_put(jax.random.normal(keys[2], (32, 16)), EACH)
    y = jax.device_put(jax.random.normal(keys[3], (32, 4)), EACH)
    losses = []
    for _ in range(10):
        former = params
        params, value = step(params, x, y)
        losses.append(float(value))
        assert former["a"].is_deleted()
    assert losses[-1] < 0.9 * losses[0], losses


@case
def shard_map_with_collectives() -> None:
    def mapped(function: Any, out: Any) -> Any:
        return jax.jit(
            jax.shard_map(function, mesh=MESH, in_specs=P(("slice", "device")), out_specs=out)
        )

    x = jnp.arange(8.0)
    both = ("slice", "device")
    same(mapped(lambda v: jax.lax.psum(v, both), P())(x), np.float32([28]))
    ring = [(i, (i + 1) % 4) for i in range(4)]
    shifted = mapped(lambda v: jax.lax.ppermute(v, "device", ring), P(both))(x)
    same(shifted, np.float32([3, 0, 1, 2, 7, 4, 5, 6]))
    swapped = mapped(lambda v: jax.lax.ppermute(v, "slice", [(0, 1), (1, 0)]), P(both))(x)
    same(swapped, np.float32([4, 5, 6, 7, 0, 1, 2, 3]))
    gathered = mapped(
        lambda v: jax.lax.all_gather(v, both, tiled=True).sum(keepdims=True), P(both)
    )(x)
    same(gathered, np.full(8, 28, np.float32))
    turned = jax.jit(
        jax.shard_map(
            lambda v: jax.lax.all_to_all(v, both, 1, 0, tiled=True),
            mesh=MESH,
            in_specs=P(both, None),
            out_specs=P(None, both),
        )
    )(TABLE)
    same(turned, TABLE)
    scattered = mapped(lambda v: jax.lax.psum_scatter(jnp.tile(v, 8), both, tiled=True), P(both))(x)
    same(scattered, np.full(8, 28, np.float32))


@case
def pmap_on_all_and_on_subsets() -> None:
    total = jax.pmap(lambda v: jax.lax.psum(v, "i"), axis_name="i")
    same(total(np.arange(8.0, dtype=np.float32)), np.full(8, 28, np.float32))
    for devices in (FIRST, SECOND, DEVICES[2:6], [DEVICES[6], DEVICES[1]], DEVICES[3:4]):
        x = np.zeros(len(devices), np.float32) + 99
        got = jax.pmap(lambda v: v + 1, devices=devices)(x)
        same(got, x + 1)
        assert [shard.device for shard in got.addressable_shards] == list(devices)


@case
def random_keys() -> None:
    key = jax.random.key(7)
    keys = jax.device_put(jax.random.split(key, 8), EACH)
    wanted = np.stack([np.asarray(jax.random.uniform(k, (3,))) for k in jax.random.split(key, 8)])
    same(jax.jit(jax.vmap(lambda k: jax.random.uniform(k, (3,))))(keys), wanted)
    same(jax.random.key_data(keys), jax.random.key_data(jax.random.split(key, 8)))


@case
def control_flow_and_numerics() -> None:
    total, steps = jax.lax.scan(lambda c, v: (c + v, c), 0.0, jnp.arange(5.0))
    assert float(total) == 10
    same(steps, np.float32([0, 0, 1, 3, 6]))
    assert int(jax.lax.while_loop(lambda i: i < 10, lambda i: i + 3, 0)) == 12
    assert float(jax.jit(lambda v: jax.lax.cond(v > 0, jnp.sin, jnp.cos, v))(0.0)) == 1
    np.testing.assert_allclose(jnp.fft.fft(jnp.arange(8.0)), np.fft.fft(np.arange(8)), atol=1e-5)
    same(jnp.sort(jnp.array([3.0, 1.0, 2.0])), np.float32([1, 2, 3]))
    m = jnp.eye(4) * 2 + 0.1
    q, r = jnp.linalg.qr(m)
    np.testing.assert_allclose(q @ r, m, atol=1e-5)
    w, v = jnp.linalg.eigh(m)
    np.testing.assert_allclose((v * w) @ v.T, m, atol=1e-5)
    u, s, vt = jnp.linalg.svd(m)
    np.testing.assert_allclose((u * s) @ vt, m, atol=1e-5)
    np.testing.assert_allclose(m @ jnp.linalg.solve(m, jnp.ones(4)), np.ones(4), atol=1e-5)
    np.testing.assert_allclose(jnp.linalg.cholesky(m) @ jnp.linalg.cholesky(m).T, m, atol=1e-5)


@case
def what_is_known_of_a_program() -> None:
    for x in (jnp.ones((8, 8)), jax.device_put(TABLE, GRID)):
        lowered = jax.jit(lambda v: v @ v).lower(x)
        assert lowered.cost_analysis()["flops"] > 0
        compiled = lowered.compile()
        costs = compiled.cost_analysis()
        assert costs["flops"] > 0, costs
        memory = compiled.memory_analysis()
        assert memory.argument_size_in_bytes >= x.addressable_shards[0].data.nbytes
        assert memory.output_size_in_bytes > 0
        assert "ENTRY" in compiled.as_text()
        assert compiled.input_shardings[0][0].device_set == x.sharding.device_set
        same(compiled(x), np.asarray(x) @ np.asarray(x))
        compiled.output_shardings  # noqa: B018


@case
def exported_programs() -> None:
    x = jax.device_put(TABLE, GRID)
    doubled = jax.jit(lambda v: v * 2, in_shardings=x.sharding, out_shardings=x.sharding)
    exported = export.export(doubled)(x)
    assert exported.nr_devices == len(x.sharding.device_set)
    same(jax.jit(exported.call)(x), TABLE * 2)


@case
def errors_of_programs() -> None:
    one, other = jax.device_put(TABLE, DEVICES[0]), jax.device_put(TABLE, DEVICES[1])
    assert "device" in error_of(lambda: jax.jit(jnp.add)(one, other), ValueError)
    assert "shape" in error_of(lambda: jax.jit(jnp.add)(one, one[:3]), TypeError)


@case
def functions_that_take_part_in_a_compilation() -> None:
    seen: list[Any] = []

    @jax.jit
    def inspected(v: Any) -> Any:
        jax.debug.inspect_array_sharding(v * 2, callback=seen.append)
        jax.debug.callback(lambda total: seen.append(float(total)), v.sum())
        return v + 1

    x = jax.device_put(TABLE, GRID)
    same(inspected(x), TABLE + 1)
    jax.effects_barrier()
    assert seen[0].spec == GRID.spec, seen
    assert seen[1:] == [TABLE.sum()], seen

    @custom_partitioning
    def triple(v: Any, w: Any) -> Any:
        return v * 3, w

    def partition(mesh: Mesh, args: Any, results: Any) -> Any:
        def lowered(v: Any, w: Any) -> Any:
            return jax.jit(lambda u: u * 3)(v), w

        return mesh, lowered, jax.tree.map(of_one, results), jax.tree.map(of_one, args)

    def of_one(shaped: Any) -> Any:
        return shaped.sharding

    triple.def_partition(partition=partition, sharding_rule="i j, k -> i j, k")
    first, second = jax.jit(triple)(x, jax.device_put(TABLE[0], EACH))
    same(first, TABLE * 3)
    same(second, TABLE[0])
    assert first.sharding == GRID

    @custom_partitioning
    def total(v: Any) -> Any:
        return v.sum()

    def by_parts(mesh: Mesh, args: Any, result: Any) -> Any:
        def lowered(v: Any) -> Any:
            return jax.lax.psum(v.sum(), mesh.axis_names)

        return mesh, lowered, NamedSharding(mesh, P()), (args[0].sharding,)

    total.def_partition(partition=by_parts, sharding_rule="i j -> ")
    same(jax.jit(total)(x), TABLE.sum())

    @custom_partitioning
    def fails(v: Any) -> Any:
        return v

    def refuse(mesh: Mesh, args: Any, results: Any) -> Any:
        raise ValueError("not that way")

    fails.def_partition(partition=refuse, sharding_rule="i j -> i j")
    text = error_of(lambda: jax.jit(fails)(x), jax.errors.JaxRuntimeError)
    assert "not that way" in text, text
    assert "INTERNAL" not in text, text


# --- memory kinds ---


@case
def pinned_host() -> None:
    x = jax.device_put(TABLE, GRID)
    for kind in ("pinned_host", "unpinned_host"):
        host = jax.device_put(x, GRID.with_memory_kind(kind))
        assert host.sharding.memory_kind == kind
        same(host, TABLE)
        back = jax.device_put(host, GRID)
        assert back.sharding.memory_kind == "device"
        same(back, TABLE)
        same(jax.device_put(TABLE, GRID.with_memory_kind(kind)), TABLE)
    f = jax.jit(lambda v: v * 2, out_shardings=GRID.with_memory_kind("pinned_host"))
    for _ in range(2):
        y = f(x)
        assert y.sharding.memory_kind == "pinned_host"
        same(y, TABLE * 2)


@case
def rematerialisation_with_offload() -> None:
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["y"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def plain(v: Any) -> Any:
        return jnp.sin(checkpoint_name(jnp.cos(v), "y")).sum()

    x = jax.device_put(TABLE, GRID)
    wanted = jax.jit(jax.grad(plain))(x)
    got = jax.jit(jax.grad(jax.checkpoint(plain, policy=policy)))(x)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


# --- other devices ---


def meshes() -> list[Any]:
    first, second = Mesh(np.array(FIRST), "x"), Mesh(np.array(SECOND), "x")
    square = Mesh(np.array(SECOND).reshape(2, 2), ("a", "b"))
    turned = Mesh(np.array(DEVICES[::-1]).reshape(2, 4), ("a", "b"))
    return [
        NamedSharding(first, P(None, "x")),
        NamedSharding(second, P("x")),
        NamedSharding(second, P(None, "x")),
        NamedSharding(square, P("a", "b")),
        NamedSharding(square, P(("b", "a"))),
        GRID,
        WHOLE,
        NamedSharding(turned, P("b", "a")),
        NamedSharding(turned, P()),
        SingleDeviceSharding(DEVICES[7]),
        SingleDeviceSharding(DEVICES[2], memory_kind="pinned_host"),
    ]


@case
def resharding_across_meshes() -> None:
    for source in (NamedSharding(Mesh(np.array(FIRST), "x"), P("x")), GRID):
        x = jax.device_put(TABLE, source)
        for sharding in meshes():
            y = jax.device_put(x, sharding)
            assert y.sharding == sharding
            same(y, TABLE)
            same(jax.device_put(y, source), TABLE)
        same(x, TABLE)


@case
def resharding_with_donation() -> None:
    for sharding in meshes():
        x = jax.device_put(TABLE, NamedSharding(Mesh(np.array(FIRST), "x"), P("x")))
        y = jax.device_put(x, sharding, donate=True)
        same(y, TABLE)
        del x


@case
def copies_to_and_from_the_local_cpu() -> None:
    cpu = jax.devices("cpu")[0]
    local = Mesh(np.array([cpu]), "x")
    for source in (DEVICES[1], GRID, WHOLE):
        x = jax.device_put(TABLE, source)
        for target in (cpu, NamedSharding(local, P())):
            y = jax.device_put(x, target)
            assert y.devices() == {cpu}
            same(y, TABLE)
            same(jax.device_put(y, source), TABLE)
    same(jax.random.key_data(jax.device_put(jax.random.key(3), cpu)), np.uint32([0, 3]))


@case
def resharding_inside_a_program() -> None:
    x = jax.device_put(TABLE, GRID)

    def turn(v: Any) -> Any:
        v = jax.lax.with_sharding_constraint(v, NamedSharding(MESH, P("device", "slice")))
        return (v + 1).T

    f = jax.jit(turn, out_shardings=NamedSharding(MESH, P(None, ("device", "slice"))))
    same(f(x), (TABLE + 1).T)


@case
def many_arrays_at_once() -> None:
    tree = {str(i): np.full((8, 4), i, np.float32) for i in range(40)}
    there = jax.device_put(tree, GRID)
    moved = jax.device_put(
        there, NamedSharding(Mesh(np.array(DEVICES[::-1]).reshape(2, 4), ("a", "b")), P("a", "b"))
    )
    for name, value in jax.device_get(moved).items():
        same(value, tree[name])


@case
def large_arrays() -> None:
    value = np.arange(3 << 20, dtype=np.float32).reshape(1 << 10, 3 << 10)
    for sharding in (GRID, SingleDeviceSharding(DEVICES[1])):
        x = jax.device_put(value, sharding)
        y = jax.device_put(x, NamedSharding(MESH, P("device", "slice")))
        same(jax.jit(lambda v: v + 1)(y), value + 1)


if __name__ == "__main__":
    sys.exit(run_cases())
