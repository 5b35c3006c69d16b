from __future__ import annotations

import json
import subprocess
import sys

import pytest

SMALL = ["--batch_size", "16", "--embedding_dimension", "32", "--num_layers", "1", "--steps", "2"]
FUNCTION = """
import jax
import jax.numpy as jnp


def make(devices):
    assert len(devices) == 2
    assert len({device.slice_index for device in devices}) == 1
    weights = jax.device_put(jnp.ones((64, 32)), devices[0])
    rows = jax.device_put(jnp.ones((16, 64)), devices[0])
    return (lambda weights, rows: jnp.mean(jnp.tanh(rows @ weights["w"]))), {"w": weights}, rows
"""


@pytest.fixture
def four_devices(regrow):
    """The `regrow` command in a process with four CPU devices."""
    regrow.environ |= {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    return regrow


def test_shardings_alone(four_devices):
    result = four_devices("bench", "shardings", "--peak-tflops", "0.5", *SMALL)
    assert result.returncode == 0, result.stderr
    mesh, memory, times, speed = result.stdout.splitlines()
    assert "fsdp 4 x tensor 1 over 1 slice of 4 devices (cpu)" in mesh
    assert "8,192 parameters" in memory
    assert times.startswith("average time: ")
    assert "of the peak of 0.5 TFLOP/s" in speed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--ici_fsdp_parallelism 2", "1 * 2 * 1 = 2, but a slice has 4 chips"),
        ("--dcn_data_parallelism 2", "2 * 1 * 1 = 2, but there is 1 slice"),
        ("--batch_size 1_000_000_000", "make batch_size or embedding_dimension smaller"),
        ("--embedding_dimension 30", "embedding_dimension 30 does not divide by the 4 ways"),
    ],
)
def test_wrong_shardings_are_one_line(four_devices, one_line, arguments, words):
    assert words in one_line(four_devices("bench", "shardings", *arguments.split()), 2)


def test_one_slice_has_no_network(four_devices, one_line):
    assert "there is one slice" in one_line(four_devices("bench", "dcn"), 2)


def test_an_error_of_jax_is_one_line(four_devices, one_line, tmp_path):
    function = tmp_path / "full.py"
    function.write_text(
        "import jax\ndef make(devices):\n"
        "    raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: full\\nand more')\n"
    )
    result = four_devices("bench", "dcn", "--function", f"{function}:make")
    assert one_line(result, 1) == (
        "the benchmark failed: RESOURCE_EXHAUSTED: full; take smaller arrays (see --help)"
    )


def test_both_on_two_slices(regrow, tmp_path):
    function = tmp_path / "function.py"
    function.write_text(FUNCTION)
    command = f"{sys.executable} -m regrow bench"
    shardings = f"{command} shardings --json --dcn_data_parallelism 2 --ici_tensor_parallelism 2"
    dcn = f"{command} dcn --json --steps 2 --function {function}:make"
    both = f"{shardings} {' '.join(SMALL)} > shardings.json && {dcn} > dcn.json"
    result = subprocess.run(
        [sys.executable, "-m", "regrow", "run", "--slices", "2", "--", "sh", "-c", both],
        env=regrow.environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    sharded = json.loads((tmp_path / "shardings.json").read_text())
    assert (sharded["slices"], sharded["devices_per_slice"]) == (2, 2)
    assert (sharded["mesh"]["dcn"], sharded["mesh"]["ici"]) == ([2, 1, 1], [1, 1, 2])
    assert len(sharded["times_s"]) == 2
    assert sharded["device_flop"] == 6 * 8192 * 16
    assert sharded["share_of_peak"] is None
    network = json.loads((tmp_path / "dcn.json").read_text())
    assert network["slices"] == 2
    assert network["gradient_bytes"] == network["array_bytes"] == 4 * 64 * 32
    # Two slices: all of the array goes out of each, and as much comes in.
    assert network["dcn_gbits_per_slice"] == pytest.approx(
        8 * network["array_bytes"] / network["all_reduce_s"] / 1e9
    )
    assert network["headroom"] == network["backward_s"] / network["all_reduce_s"]


@pytest.mark.slow
def test_one_program_on_every_host(four_devices):
    """Processes that JAX finds to belong together are joined; the first one speaks for all."""
    slurm = {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
    }
    hosts = []
    for index in range(2):
        four_devices.environ |= slurm | {
            "SLURM_PROCID": f"{index}",
            "SLURM_LOCALID": f"{index}",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        }
        hosts.append(four_devices.start("bench", "shardings", *SMALL))
    said = []
    for host in hosts:
        output, errors = host.communicate(timeout=100)
        assert host.returncode == 0, errors
        said.append([line for line in output.splitlines() if not line.startswith("[Gloo]")])
    assert "over 1 slice of 4 devices" in said[0][0]
    assert said[1] == []
