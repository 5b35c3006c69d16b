"""The client's side against real clusters, each script in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import regrow

PROGRAMS = Path(__file__).parent / "programs"
SOURCES = str(Path(regrow.__file__).parents[1])
CASES = re.findall(r"^@case\ndef (\w+)", (PROGRAMS / "callbacks.py").read_text(), re.MULTILINE)
STATUS_WORDS = ("INTERNAL", "DATA_LOSS", "NOT_FOUND", "DEADLINE_EXCEEDED")
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[regrow.LocalCluster]:
    with regrow.LocalCluster(slices=2, devices_per_slice=2) as made:
        yield made


@pytest.fixture
def own_cluster() -> Iterator[regrow.LocalCluster]:
    """A cluster that the test may damage."""
    with regrow.LocalCluster(slices=2, devices_per_slice=1) as made:
        yield made


def start(cluster: regrow.LocalCluster, code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": SOURCES} | cluster.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_until(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == word:
            return
    raise AssertionError(f"the script ended before it said {word!r}: {process.communicate()[1]}")


@pytest.fixture(scope="module")
def callback_results(cluster: regrow.LocalCluster) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-u", str(PROGRAMS / "callbacks.py")],
        env=os.environ | {"PYTHONPATH": SOURCES} | cluster.env,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.mark.parametrize("name", CASES)
def test_host_callbacks(callback_results: subprocess.CompletedProcess[str], name: str) -> None:
    shown = callback_results.stdout + callback_results.stderr
    assert re.search(rf"^ok {name} ", callback_results.stdout, re.MULTILINE), shown


def test_host_callbacks_leave_no_error_behind(
    callback_results: subprocess.CompletedProcess[str],
) -> None:
    assert callback_results.returncode == 0
    assert "regrow:" not in callback_results.stderr
    assert "Exception ignored" not in callback_results.stderr


def test_arrays_with_any_strides(cluster: regrow.LocalCluster, python: Run) -> None:
    done = python(str(PROGRAMS / "strided.py"), variables=with_sources(cluster))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "ok other errors stay"


def with_sources(cluster: regrow.LocalCluster) -> dict[str, str]:
    return {**cluster.env, "PYTHONPATH": f"{cluster.env['PYTHONPATH']}:{SOURCES}"}


@pytest.mark.parametrize("first", ["import jax", "pass"])
def test_connect(cluster: regrow.LocalCluster, python: Run, first: str) -> None:
    code = f"""
        import regrow
        {first}
        regrow.connect({cluster.target!r})
        import jax, numpy as np
        regrow.connect({cluster.target!r})
        print(len(jax.devices()), jax.jit(lambda x: x + 1)(np.arange(3)[::-1]))
        jax.jit(lambda x: jax.debug.print("seen {{x}}", x=x))(np.float32(2))
        jax.devices()
        regrow.connect({cluster.target!r})
    """
    done = python("-c", textwrap.dedent(code))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["4 [3 2 1]", "seen 2.0"]
    assert done.stderr == ""


@pytest.mark.parametrize(
    "call",
    [
        "jax.debug.inspect_array_sharding(v, callback=print)",
        "partitioned(v)",
    ],
)
def test_no_address_of_a_client_without_the_hooks_is_followed(
    cluster: regrow.LocalCluster, python: Run, call: str
) -> None:
    code = f"""
        import jax, jax._src.compiler as compiler, jax._src.interpreters.mlir as mlir
        from jax.experimental.custom_partitioning import custom_partitioning
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        import numpy as np, regrow
        stock = compiler.backend_compile_and_load, mlir.ModuleContext.add_keepalive
        regrow.connect({cluster.target!r})
        compiler.backend_compile_and_load, mlir.ModuleContext.add_keepalive = stock
        partitioned = custom_partitioning(lambda v: v)
        partitioned.def_partition(partition=None, sharding_rule="i -> i")
        mesh = Mesh(np.array(jax.devices()), "x")
        x = jax.device_put(np.arange(4.0), NamedSharding(mesh, P("x")))
        def program(v):
            made = {call}
            return v if made is None else made
        try:
            jax.jit(program)(x)
        except jax.errors.JaxRuntimeError as error:
            print(error)
        print(jax.jit(lambda v: v.sum())(x))
    """
    done = python("-c", textwrap.dedent(code))
    assert done.returncode == 0, done.stderr
    refusal, total = done.stdout.splitlines()
    assert refusal.startswith("UNIMPLEMENTED: ")
    assert "`regrow run`" in refusal
    assert total == "6.0"


def test_bootstrap(cluster: regrow.LocalCluster, python: Run, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import jax; print(jax.device_count())")
    done = python(
        "-m",
        "regrow.client.bootstrap",
        "script.py",
        variables={"REGROW_TARGET": cluster.target},
    )
    assert (done.stdout, done.stderr) == ("4\n", "")


def test_a_callback_that_still_runs_at_the_exit(cluster: regrow.LocalCluster, python: Run) -> None:
    code = """
        import time, jax
        def late(x):
            time.sleep(0.5)
            print("late", x)
        jax.jit(lambda x: jax.debug.callback(late, x))(2.0)
    """
    done = python("-c", textwrap.dedent(code), variables=with_sources(cluster))
    assert (done.stdout, done.stderr, done.returncode) == ("late 2.0\n", "", 0)


def test_a_failure_at_the_exit_is_told_once(cluster: regrow.LocalCluster, python: Run) -> None:
    code = """
        import logging, time, jax
        logging.disable()
        def bad(x):
            time.sleep(0.2)
            raise ValueError("too late")
        jax.jit(lambda x: jax.debug.callback(bad, x))(2.0)
    """
    done = python("-c", textwrap.dedent(code), variables=with_sources(cluster))
    told = [line for line in done.stderr.splitlines() if line.startswith("regrow: ")]
    assert told == ["regrow: an effect of the script failed: UNKNOWN: ValueError: too late"]
    assert "Exception ignored" not in done.stderr


def test_two_clients_call_back_each_their_own(cluster: regrow.LocalCluster) -> None:
    code = """
        import jax, numpy as np, os
        f = jax.jit(lambda v: jax.pure_callback(lambda q: np.int32(os.getpid()), jax.ShapeDtypeStruct((), "int32"), v))
        print({int(f(k)) for k in range(20)} == {os.getpid()})
    """
    both = [start(cluster, code) for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=60)
        assert out == "True\n", err


IN_A_CALLBACK = """
    import time, jax, numpy as np
    def wait(x):
        print("inside")
        time.sleep(100)
    jax.jit(lambda x: jax.debug.callback(wait, x))(2.0)
    jax.effects_barrier()
"""


def test_a_client_that_is_killed_inside_a_callback(
    cluster: regrow.LocalCluster, python: Run
) -> None:
    killed = start(cluster, IN_A_CALLBACK)
    read_until(killed, "inside")
    killed.kill()
    killed.communicate()
    code = """
        import jax, numpy as np
        jax.jit(lambda x: jax.debug.print("{x}", x=x))(3.0)
    """
    done = python("-c", textwrap.dedent(code), variables=with_sources(cluster))
    assert (done.stdout, done.returncode) == ("3.0\n", 0), done.stderr


@pytest.mark.parametrize("what", ["idle", "inside a callback"])
def test_a_dead_head_is_one_clear_error(own_cluster: regrow.LocalCluster, what: str) -> None:
    idle = """
        import time, jax, numpy as np
        x = jax.numpy.arange(3)
        print("idle")
        time.sleep(1)
        print(x + 1)
    """
    process = start(own_cluster, idle if what == "idle" else IN_A_CALLBACK)
    read_until(process, "idle" if what == "idle" else "inside")
    os.kill(own_cluster.head_pid, signal.SIGKILL)
    begin = time.monotonic()
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - begin < 10
    assert process.returncode == 1, (out, err)
    assert err.count(f"the head at {own_cluster.target} is gone") == 1, err
    assert err.count("JaxRuntimeError: UNAVAILABLE") == 1, err
    assert "rpc_helper" not in err


def test_a_lost_slice_met_by_a_callback(own_cluster: regrow.LocalCluster) -> None:
    code = """
        import sys, jax, numpy as np
        a, b = jax.devices()
        x = jax.device_put(np.arange(3.0), a)
        y = jax.device_put(np.arange(3.0), b)
        def function(q):
            print("inside")
            sys.stdin.readline()
            return np.asarray(y)
        f = jax.jit(lambda v: jax.pure_callback(function, jax.ShapeDtypeStruct((3,), v.dtype), v))
        try:
            print(np.asarray(f(x)))
        except jax.errors.JaxRuntimeError as error:
            print(str(error).splitlines()[0])
    """
    process = start(own_cluster, code)
    read_until(process, "inside")
    own_cluster.kill(1)
    out, err = process.communicate("go\n", timeout=60)
    assert out.startswith("DATA_LOSS: slice 1"), (out, err)


def test_a_slice_that_dies_inside_a_callback(own_cluster: regrow.LocalCluster) -> None:
    code = """
        import sys, jax, numpy as np
        x = jax.device_put(np.arange(3.0), jax.devices()[1])
        def function(q):
            print("inside")
            sys.stdin.readline()
            return np.asarray(q)
        f = jax.jit(lambda v: jax.pure_callback(function, jax.ShapeDtypeStruct((3,), v.dtype), v))
        r = f(x)
        try:
            print(np.asarray(r))
        except jax.errors.JaxRuntimeError as error:
            print(str(error).splitlines()[0])
        y = jax.device_put(np.arange(3.0), jax.devices()[0])
        g = jax.jit(lambda v: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((3,), v.dtype), v))
        assert np.allclose(g(y), np.sin(np.arange(3.0)))
    """
    process = start(own_cluster, code)
    read_until(process, "inside")
    own_cluster.kill(1)
    out, err = process.communicate("go\n", timeout=60)
    assert out.startswith("DATA_LOSS: slice 1"), (out, err)
    assert process.returncode == 0, err


def test_callbacks_go_on_after_a_slice_returned(own_cluster: regrow.LocalCluster) -> None:
    code = """
        import gc, sys, time, jax, numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        from regrow.client import backend
        split = NamedSharding(Mesh(np.array(jax.devices()), "x"), P("x"))
        calls = []
        def function(q):
            calls.append(1)
            return np.asarray(q) * 2
        f = jax.jit(lambda v: jax.pure_callback(function, jax.ShapeDtypeStruct((2,), "float32"), v) + v)
        ones = [jax.jit(lambda v, d=d: jax.pure_callback(function, jax.ShapeDtypeStruct((), "float32"), v))
                for d in jax.devices()]
        def once():
            y = jax.device_put(np.arange(2, dtype=np.float32), split)
            assert np.array_equal(np.asarray(f(y)), [0, 3])
            for g, d in zip(ones, jax.devices()):
                assert float(g(jax.device_put(np.float32(4), d))) == 8
        once()
        print("once")
        sys.stdin.readline()
        once()
        gc.collect()
        time.sleep(1)
        once()
        print("again", len(calls))
        host = backend.host_of(jax.devices()[0].client)
        assert host.registered() == 3, host.registered()
        del f, ones
        end = time.monotonic() + 10
        while host.registered():
            jax.clear_caches()
            gc.collect()
            assert time.monotonic() < end, host.registered()
            time.sleep(0.05)
        print("freed")
    """
    process = start(own_cluster, code)
    read_until(process, "once")
    own_cluster.kill(1)
    own_cluster.restore(1)
    own_cluster.wait_healthy(60)
    out, err = process.communicate("go\n", timeout=60)
    assert out.splitlines() == ["again 9", "freed"], (out, err)


@pytest.fixture(scope="module")
def tcp_cluster() -> Iterator[regrow.LocalCluster]:
    with regrow.LocalCluster(slices=1, devices_per_slice=1, port=0) as made:
        yield made


CLIENT_OVER_TCP = """
    import sys
    import regrow
    regrow.connect(sys.argv[1])
    if "pathways" in sys.argv:
        import pathwaysutils
        pathwaysutils.initialize()
    import jax
    jax.jit(lambda x: jax.debug.print("seen {x}", x=x))(3.0)
    print(jax.device_count())
"""


@pytest.mark.parametrize("who", ["plain", "pathways"])
def test_the_token_over_tcp(tcp_cluster: regrow.LocalCluster, python: Run, who: str) -> None:
    assert tcp_cluster.token
    assert tcp_cluster.tcp_target
    done = python(
        "-c",
        textwrap.dedent(CLIENT_OVER_TCP),
        tcp_cluster.tcp_target,
        who,
        variables={"REGROW_TOKEN": tcp_cluster.token},
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["1", "seen 3.0"]


@pytest.mark.parametrize(("token", "told"), [(None, "wants a token"), ("wrong", "not that of")])
def test_tcp_without_the_token(
    tcp_cluster: regrow.LocalCluster, python: Run, token: str | None, told: str
) -> None:
    assert tcp_cluster.tcp_target
    done = python(
        "-c",
        textwrap.dedent(CLIENT_OVER_TCP),
        tcp_cluster.tcp_target,
        variables={"REGROW_TOKEN": token} if token else {},
    )
    assert done.returncode == 1
    assert told in done.stderr, done.stderr
    assert done.stderr.count("\nRuntimeError: ") == 1, done.stderr


STOCK_CLIENT = """
    import os, sys
    os.environ.update(
        JAX_PLATFORMS="proxy",
        JAX_BACKEND_TARGET=sys.argv[1],
        IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS="true",
    )
    import jax
    from jax._src import xla_bridge
    from jaxlib import _ifrt_proxy as proxy
    options = proxy.ClientConnectionOptions()
    options.connection_timeout_in_seconds = 3
    xla_bridge.register_backend_factory("proxy", lambda: proxy.get_client(sys.argv[1], options))
    jax.devices()
"""


def test_a_stock_client_without_the_token_is_told_why(
    tcp_cluster: regrow.LocalCluster, python: Run
) -> None:
    assert tcp_cluster.tcp_target
    done = python("-c", textwrap.dedent(STOCK_CLIENT), tcp_cluster.tcp_target)
    assert done.returncode == 1
    assert "this cluster wants a token over TCP" in done.stderr, done.stderr


FORKING = """
    import os, signal, time
    import jax, numpy as np
    x = jax.device_put(np.ones(4), jax.devices()[0])
    child = os.fork()
    if not child:
        jax.device_put(np.ones(4), jax.devices()[0]).block_until_ready()
        os._exit(0)
    time.sleep(1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print("parent", float((x + 1).sum()))
"""


def test_a_forked_child_that_uses_jax_does_not_disturb_its_parent(
    cluster: regrow.LocalCluster, python: Run
) -> None:
    done = python("-W", "ignore", "-c", textwrap.dedent(FORKING), variables=cluster.env)
    assert done.stdout == "parent 8.0\n", done.stderr
    assert done.returncode == 0


def test_many_arrays_at_once_do_not_take_a_thread_each(cluster: regrow.LocalCluster) -> None:
    process = start(
        cluster,
        """
        import os
        import jax
        import numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        mesh = Mesh(np.array(jax.devices()), ("x",))
        sharding = NamedSharding(mesh, PartitionSpec("x"))
        arrays = [jax.device_put(np.full(1 << 16, k, np.float32), sharding) for k in range(600)]
        assert [float(array[-1]) for array in arrays[::50]] == list(range(0, 600, 50))
        print(len(os.listdir("/proc/self/task")))
        """,
    )
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert int(output) < 1000  # 2400 shards were sent.
