"""A cluster whose slices are queued resources of the local Cloud TPU."""

from __future__ import annotations

import json
import os
import signal
import textwrap
from pathlib import Path

import pytest

from regrow.processes import is_running
from waiting import until

PROGRAM = """
    import pathlib, sys, time
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    def spread(devices):
        mesh = Mesh(np.array(devices), ("x",))
        return jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("x")))

    here = pathlib.Path(sys.argv[1])
    devices = jax.devices()
    everywhere, on_slice_0 = spread(devices), spread(devices[:4])
    print(len(devices), jax.jit(jnp.sum)(everywhere), flush=True)
    (here / "ready").touch()
    while True:
        try:
            jax.block_until_ready(everywhere + 1)
        except jax.errors.JaxRuntimeError as error:
            print(str(error).partition(":")[0], flush=True)
            break
        time.sleep(0.05)
    print(jax.jit(jnp.sum)(on_slice_0), flush=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            print(jax.jit(jnp.sum)(spread(devices)), flush=True)
            break
        except jax.errors.JaxRuntimeError:
            time.sleep(0.1)
"""


@pytest.fixture
def tpu(real_tpu):
    for name in ("e0", "e1"):
        made = real_tpu.create(name, "--wait", shape="v4-8")
        assert made.returncode == 0, made.stderr
    yield real_tpu
    for name in ("e0", "e1"):
        real_tpu.good("queued-resources", "delete", name, "--force", "--quiet")


def agent_of(tpu, node: str) -> int:
    (uid,) = tpu.good("tpu-vm", "describe", node, "--format", "value(id)").split()
    (path,) = tpu.home.glob(f"cloud/hosts/{uid}/*/0/agent.json")
    return int(json.loads(path.read_text())["process"]["pid"])


def workers_of(agent: int) -> list[int]:
    children = Path(f"/proc/{agent}/task").glob("*/children")
    return [int(pid) for path in children for pid in path.read_text().split()]


@pytest.mark.slow
def test_a_slice_dies_with_its_host_and_returns_with_it(tpu, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    slices = ("--queued-resource", "e0", "--queued-resource", "e1")
    with tpu.commands.start("run", *slices, str(program), str(tmp_path)) as process:
        until(lambda: (tmp_path / "ready").exists() or process.poll() is not None)
        agents = {name: agent_of(tpu, f"{name}-node") for name in ("e0", "e1")}
        workers = {name: workers_of(agent) for name, agent in agents.items()}
        assert all(len(several) == 1 for several in workers.values())
        os.kill(agents["e1"], signal.SIGKILL)
        output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert output.splitlines() == ["8 28.0", "DATA_LOSS", "28.0", "28.0"]
    assert "slice 1 is lost: " in errors
    assert "slice 1 is back" in errors
    # The hosts stay; what ran on them for the cluster does not.
    assert agent_of(tpu, "e0-node") == agents["e0"]
    for pid in (*workers["e0"], *workers["e1"]):
        assert not is_running(pid)


@pytest.mark.parametrize(
    ("flags", "status", "text"),
    [
        (("--queued-resource", "nobody"), 1, "NOT_FOUND"),
        (("--queued-resource", "e", "--slices", "3"), 2, "the queued resources tell how many"),
    ],
)
def test_bad_input(simulated_tpu, one_line, flags, status, text):
    assert text in one_line(simulated_tpu("run", *flags, "train.py"), status)


def test_slices_of_several_shapes(simulated_tpu, one_line):
    for name, shape in (("a", "v4-8"), ("b", "v4-16")):
        assert simulated_tpu.create(name, shape=shape).returncode == 0
    flags = ("--queued-resource", "a", "--queued-resource", "b")
    assert "slices of one known shape" in one_line(simulated_tpu("run", *flags, "train.py"), 2)
