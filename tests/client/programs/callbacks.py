"""Host callbacks inside jit, as a script: every case prints `ok NAME` or a traceback and `bad NAME`.

Runs alike on the plain CPU backend and as a client of a cluster.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental import checkify, io_callback
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

N = len(jax.devices())
MESH = Mesh(np.array(jax.devices()), "x")
SPLIT = NamedSharding(MESH, P("x"))
WHOLE = NamedSharding(MESH, P())
X = jnp.arange(4.0)
F32 = jax.ShapeDtypeStruct((), "float32")
CASES: list[Callable[[], None]] = []
STATUS_WORDS = ("INTERNAL", "DATA_LOSS", "NOT_FOUND", "DEADLINE_EXCEEDED")


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES.append(function)
    return function


def like(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def pure(function: Callable[..., Any], x: Any, **kwargs: Any) -> Any:
    return jax.pure_callback(function, like(x), x, **kwargs)


def error_of(function: Callable[[], Any]) -> str:
    """The text of the error that `function`, or the barrier after it, ends with."""
    try:
        jax.block_until_ready(function())
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    raise AssertionError("no error came")


@case
def debug_print_and_callback() -> None:
    seen: list[Any] = []

    @jax.jit
    def f(x: Any) -> Any:
        jax.debug.callback(lambda a: seen.append(np.array(a)), x)
        jax.debug.print("printed {x} {y}", x=x, y=x.sum())
        return x + 1

    f(f(X))
    jax.effects_barrier()
    assert sorted(a.tolist() for a in seen) == [[0, 1, 2, 3], [1, 2, 3, 4]], seen


@case
def ordered_effects_keep_their_order() -> None:
    seen: list[int] = []

    @jax.jit
    def f(x: Any) -> Any:
        for i in range(3):
            jax.debug.callback(lambda a, i=i: seen.append(i), x.sum() + i, ordered=True)
        return x

    for k in range(4):
        f(X + k)
    jax.effects_barrier()
    assert seen == [0, 1, 2] * 4, seen


@case
def every_element_type() -> None:
    extra = [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4]
    for dtype in ["bool", "int8", "uint16", "int32", "float16", "float32", "complex64", *extra]:
        a = np.array([[0, 1, 1], [1, 0, 3]]).astype(dtype)
        r = jax.jit(lambda v: pure(lambda q: np.asarray(q)[::-1], v))(a)
        assert r.dtype == a.dtype
        assert np.array_equal(np.asarray(r), a[::-1]), dtype


@case
def trees_scalars_and_empty_results() -> None:
    def function(p: Any, q: Any) -> Any:
        return {"s": np.float32(p.sum() + q), "e": np.zeros((0, 3), np.float32)}

    shape = {"s": F32, "e": jax.ShapeDtypeStruct((0, 3), "float32")}
    r = jax.jit(lambda a, b: jax.pure_callback(function, shape, a, b))(X, 2.0)
    assert float(r["s"]) == 8
    assert r["e"].shape == (0, 3)


@case
def inside_vmap_scan_cond_while_and_grad() -> None:
    def sine(v: Any, method: str = "sequential") -> Any:
        return pure(np.sin, v, vmap_method=method)

    expected = np.sin(np.arange(4.0))
    assert np.allclose(jax.jit(jax.vmap(sine))(X), expected)
    assert np.allclose(jax.jit(jax.vmap(lambda v: sine(v, "expand_dims")))(X), expected)
    last, _ = jax.jit(lambda v: jax.lax.scan(lambda c, e: (sine(c) + e, c), v, jnp.ones(5)))(1.0)
    c = np.float32(1)
    for _ in range(5):
        c = np.sin(c) + 1
    assert np.allclose(last, c)
    assert np.allclose(
        jax.jit(lambda v: jax.lax.cond(v[0] > 5, sine, lambda v: v * 3, v))(X), X * 3
    )
    seven = jax.jit(
        lambda v: jax.lax.while_loop(
            lambda c: c < 20, lambda c: pure(lambda q: q + np.float32(7), c), v
        )
    )
    assert float(seven(jnp.float32(0))) == 21

    @jax.custom_jvp
    def s(v: Any) -> Any:
        return sine(v)

    @s.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return s(primals[0]), pure(np.cos, primals[0], vmap_method="sequential") * tangents[0]

    assert np.allclose(jax.jit(jax.grad(lambda v: s(v).sum()))(X), np.cos(np.arange(4.0)))


@case
def io_callbacks_ordered_and_not() -> None:
    log: list[int] = []

    def function(i: Any, v: Any) -> Any:
        log.append(int(i))
        return np.float32(v * 2)

    for ordered in (True, False):
        log.clear()

        @jax.jit
        def f(v: Any, ordered: bool = ordered) -> Any:
            a = io_callback(function, F32, 0, v, ordered=ordered)
            return io_callback(function, F32, 1, a, ordered=ordered) + 1

        assert [float(r) for r in [f(jnp.float32(k)) for k in range(5)]] == [
            4 * k + 1 for k in range(5)
        ]
        assert len(log) == 10
        assert not ordered or log == [0, 1] * 5
    log.clear()
    loop = jax.jit(
        lambda v: jax.lax.fori_loop(
            0, 4, lambda i, c: io_callback(function, F32, i, c, ordered=True), v
        )
    )
    assert float(loop(jnp.float32(1))) == 16
    assert log == list(range(4))


@case
def ordered_on_all_devices_and_on_one() -> None:
    log: list[Any] = []
    y = jax.device_put(np.arange(8.0), SPLIT)
    f = jax.jit(
        lambda v: (io_callback(lambda q: log.append(np.array(q)), None, v, ordered=True), v + 1)[1]
    )
    f(f(y))
    jax.effects_barrier()
    assert len(log) == 2
    assert np.array_equal(log[1], np.arange(8.0) + 1)
    f(X)
    f(y)
    backwards = Mesh(np.array(jax.devices()[::-1]), "x")
    f(jax.device_put(np.arange(8.0), NamedSharding(backwards, P("x"))))
    jax.effects_barrier()
    assert len(log) == 5


@case
def sharded_whole_and_by_device() -> None:
    log: list[Any] = []
    y = jax.device_put(np.arange(2.0 * N).reshape(N, 2), SPLIT)
    host = np.arange(2.0 * N).reshape(N, 2)

    def double(q: Any) -> Any:
        log.append(np.asarray(q).shape)
        return np.asarray(q) * 2

    assert np.array_equal(
        np.asarray(jax.jit(lambda v: pure(double, v) + 1, out_shardings=SPLIT)(y)), host * 2 + 1
    )
    assert log == [(N, 2)], log
    log.clear()
    mapped = jax.shard_map(
        lambda v: pure(double, v) + jax.lax.psum(v, "x"),
        mesh=MESH,
        in_specs=P("x"),
        out_specs=P("x"),
    )
    assert np.array_equal(np.asarray(jax.jit(mapped)(y)), host * 2 + host.sum(0))
    assert log == [(1, 2)] * N, log
    log.clear()
    jax.jit(
        lambda v: (jax.debug.callback(lambda q: log.append(q.shape), v, partitioned=True), v * 2)[1]
    )(y)
    jax.effects_barrier()
    assert log == [(1, 2)] * N, log


@case
def shards_that_wait_for_each_other_in_their_callbacks() -> None:
    meeting = threading.Barrier(N, timeout=30)

    def meet(q: Any) -> Any:
        meeting.wait()
        return np.asarray(q)

    f = jax.jit(
        jax.shard_map(lambda v: pure(meet, v), mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    )
    y = jax.device_put(np.arange(float(N)), SPLIT)
    assert np.array_equal(np.asarray(f(y)), np.arange(float(N)))


@case
def pmapped() -> None:
    f = jax.pmap(lambda v: pure(lambda q: np.asarray(q) + 1, v))
    assert np.array_equal(np.asarray(f(np.arange(float(N)))), np.arange(float(N)) + 1)


@case
def exceptions_are_the_users_own() -> None:
    def bad(q: Any) -> Any:
        raise ValueError("my message 42")

    kinds = {
        "pure": lambda v: pure(bad, v),
        "io": lambda v: (io_callback(bad, None, v), v)[1],
        "ordered": lambda v: (io_callback(bad, None, v, ordered=True), v)[1],
        "debug": lambda v: (jax.debug.callback(bad, v), v)[1],
    }
    for name, f in kinds.items():
        jitted = jax.jit(f)
        for _ in range(2):
            text = error_of(lambda jitted=jitted: jitted(X))
            assert "ValueError: my message 42" in text, (name, text)
            assert "raise ValueError" in text, (name, text)
            assert not any(word in text for word in STATUS_WORDS), (name, text)
    jax.jit(lambda v: v + 1)(X).block_until_ready()
    called: list[int] = []
    f = jax.jit(lambda v: io_callback(lambda q: called.append(1), None, v, ordered=True))
    for _ in range(3):
        try:
            f(X)
            jax.effects_barrier()
            break
        except jax.errors.JaxRuntimeError:
            continue
    assert called == [1], "a failed ordered callback poisons the later ones"


@case
def wrong_results_are_told() -> None:
    text = error_of(lambda: jax.jit(lambda v: pure(lambda q: np.zeros(3, np.float32), v))(X))
    assert "Incorrect output shape" in text
    assert "INTERNAL" not in text


@case
def callbacks_that_use_the_cluster() -> None:
    w = X * 5
    d0 = jax.devices()[0]

    def local(q: Any) -> Any:
        return np.asarray(jnp.sin(q) + jax.jit(lambda a: a * 2)(q))

    def fetch(q: Any) -> Any:
        return np.asarray(w) + np.asarray(q)

    def run(q: Any) -> Any:
        with jax.default_device(d0):
            return np.asarray(jax.jit(lambda a: a * 2)(jax.device_put(np.asarray(q), d0)))

    inner = jax.jit(lambda v: pure(lambda q: np.asarray(q) + 1, v))

    def nest(q: Any) -> Any:
        with jax.default_device(d0):
            return np.asarray(inner(jax.device_put(np.asarray(q), d0)))

    a = np.arange(4.0)
    for function, expected in (
        (local, np.sin(a) + 2 * a),
        (fetch, 6 * a),
        (run, 2 * a),
        (nest, a + 1),
    ):
        r = jax.jit(lambda v, function=function: pure(function, v))(X)
        assert np.allclose(r, expected), function


@case
def slow_callbacks_hold_up_nobody() -> None:
    def slow(q: Any) -> Any:
        time.sleep(0.3)
        return np.asarray(q)

    f = jax.jit(lambda v: pure(slow, v))
    f(X).block_until_ready()
    begin = time.monotonic()
    r = f(X)
    assert time.monotonic() - begin < 0.25, "the dispatch waited for the callback"
    uses = [
        np.asarray,
        lambda r: r + 1,
        lambda r: float(r[0]),
        lambda r: jax.device_put(r, jax.devices()[1]),
    ]
    for use in uses:
        use(f(X))
    del r


@case
def donation_while_a_callback_runs() -> None:
    out: list[float] = []

    def function(q: Any) -> None:
        time.sleep(0.05)
        out.append(float(np.asarray(q).sum()))

    f = jax.jit(lambda v: (io_callback(function, None, v), v.sum())[1])
    g = jax.jit(lambda v: v * 2, donate_argnums=0)
    for place in (jax.devices()[0], SPLIT):
        w = jax.device_put(np.arange(8.0), place)
        out.clear()
        sums = []
        for _ in range(4):
            sums.append(f(w))
            w = g(w)
        assert [float(s) for s in sums] == [28.0 * 2**k for k in range(4)]
        jax.effects_barrier()
        assert sorted(out) == [28.0 * 2**k for k in range(4)], out
    h = jax.jit(lambda v: pure(lambda q: np.asarray(q) + 1, v), donate_argnums=0)
    assert float(h(h(jnp.zeros(4)))[0]) == 2


@case
def many_threads() -> None:
    f = jax.jit(lambda v: pure(lambda q: np.asarray(q) * 2, v))
    f(X).block_until_ready()
    wrong: list[Any] = []

    def work(k: int) -> None:
        wrong.extend(i for i in range(10) if float(f(X + (k * 100 + i))[0]) != 2 * (k * 100 + i))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@case
def ahead_of_time_training_step_remat_and_checkify() -> None:
    compiled = (
        jax.jit(lambda v: (jax.debug.callback(lambda q: None, v), v + 1)[1]).lower(X).compile()
    )
    assert float(compiled(X)[0]) == 1

    def loss(p: Any, v: Any) -> Any:
        h = jnp.tanh(v @ p)
        jax.debug.callback(lambda q: None, h.sum())
        return (h**2).sum()

    step = jax.jit(
        lambda p, v: p - 0.1 * jax.grad(loss)(p, v),
        donate_argnums=0,
        in_shardings=(WHOLE, SPLIT),
        out_shardings=WHOLE,
    )
    p = jax.device_put(np.ones((4, 4), np.float32), WHOLE)
    for _ in range(3):
        p = step(p, jax.device_put(np.ones((N, 4), np.float32), SPLIT))
    jax.effects_barrier()
    checked = checkify.checkify(jax.jit(lambda v: (checkify.check(v[0] > 0, "neg"), v)[1]))
    assert "neg" in str(checked(X)[0].get())
    again = jax.checkpoint(lambda v: (jax.debug.callback(lambda q: None, v), jnp.sin(v).sum())[1])
    jax.jit(jax.grad(again))(X)


@case
def a_large_array() -> None:
    a = jnp.ones((500, 1000))
    r = jax.jit(lambda v: pure(lambda q: np.asarray(q) * 2, v))(a)
    assert float(r.sum()) == 1e6


@case
def what_cannot_be_done_is_refused_in_one_line() -> None:
    if not ON_CLUSTER:
        return
    from jax.experimental.buffer_callback import buffer_callback

    sine = partitioned_by_hand(jnp.sin)

    def sine_and_callback(v: Any) -> Any:
        jax.debug.callback(lambda total: None, v.sum())
        return sine(v)

    hand_over = buffer_callback(lambda context, out, a: None, like(X))
    for function, argument, name in (
        (hand_over, X, "buffer_callback"),
        (sine_and_callback, jax.device_put(np.arange(float(N)), SPLIT), "custom_partitioning"),
    ):
        text = error_of(lambda f=function, a=argument: jax.jit(f)(a))
        assert text.startswith("UNIMPLEMENTED"), text
        assert name in text, text
        assert "\n" not in text, text


def partitioned_by_hand(function: Callable[[Any], Any]) -> Any:
    """An elementwise function of vectors, with a partitioning of its own."""
    from jax.experimental.custom_partitioning import custom_partitioning

    made = custom_partitioning(function)
    made.def_partition(
        partition=lambda mesh, args, result: (
            mesh,
            function,
            result.sharding,
            (args[0].sharding,),
        ),
        sharding_rule="i -> i",
    )
    return made


@case
def functions_that_take_part_in_a_compilation() -> None:
    seen: list[Any] = []
    y = jax.device_put(np.arange(float(N)), SPLIT)
    sine = partitioned_by_hand(jnp.sin)

    def inspected(v: Any) -> Any:
        jax.debug.inspect_array_sharding(v, callback=seen.append)
        return sine(v)

    assert np.allclose(jax.jit(inspected)(y), np.sin(np.arange(float(N))))
    assert [sharding.spec for sharding in seen] == [SPLIT.spec]
    replicated = jax.device_put(y, WHOLE)
    jax.jit(lambda v: (jax.debug.inspect_array_sharding(v, callback=seen.append), v))(replicated)
    assert seen.pop().is_fully_replicated
    # Nobody holds the functions but the lowered program.
    lowered = jax.jit(lambda v: inspected(v) + 1).lower(y)
    gc.collect()
    lowered.compile()
    assert len(seen) == 2

    def refuse(_: Any) -> Any:
        raise ValueError("not that way")

    def refused(v: Any) -> Any:
        jax.debug.inspect_array_sharding(v, callback=refuse)
        return v + 1

    text = error_of(lambda: jax.jit(refused)(y))
    assert "not that way" in text, text
    assert not ON_CLUSTER or "INTERNAL" not in text, text


@case
def functions_are_freed() -> None:
    if not ON_CLUSTER:
        return
    from regrow.client import backend

    host = backend.host_of(jax.devices()[0].client)
    assert host is not None
    end = time.monotonic() + 15
    while host.registered():
        jax.clear_caches()
        gc.collect()
        # A worker lets go of a program that was dropped when it does something else.
        jax.jit(lambda v: v + 1)(X).block_until_ready()
        assert time.monotonic() < end, f"{host.registered()} programs keep their functions"
        time.sleep(0.05)


def main() -> int:
    failed = 0
    chosen = [c for c in CASES if not sys.argv[1:] or c.__name__ in sys.argv[1:]]
    for function in chosen:
        begin = time.monotonic()
        try:
            function()
        except Exception:
            traceback.print_exc(file=sys.stdout)
            failed += 1
            print("bad", function.__name__, flush=True)
        else:
            print("ok", function.__name__, round(time.monotonic() - begin, 2), flush=True)
    return 1 if failed else 0


ON_CLUSTER = type(jax.devices()[0]).__name__ != "CpuDevice" and "proxy" in (
    jax.config.jax_platforms or ""
)

if __name__ == "__main__":
    sys.exit(main())
