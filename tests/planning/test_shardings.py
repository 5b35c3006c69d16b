from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from regrow.errors import UsageError
from regrow.planning.mesh import HybridMesh
from regrow.planning.shardings import Result, Workload

PROGRAM = Path(__file__).parent / "programs" / "layouts.py"
PAGE = Workload()


def test_every_layout_takes_the_same_step():
    environ = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    done = subprocess.run(
        [sys.executable, PROGRAM],
        env=environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [one["shard"] for one in told] == [[128, 8], [32, 32], [64, 16]]
    assert all(max(one["errors"]) < 0.05 for one in told), told
    ratios = [ratio for one in told for ratio in one["memory"]]
    assert len(ratios) == 6
    assert 0.6 < min(ratios) <= max(ratios) < 1.6, ratios


def test_the_command_of_the_page():
    """Four chips of v4 at 260 TFLOP/s are more than 90 % of the peak."""
    assert PAGE.parameters == 134_217_728
    assert PAGE.device_flop == pytest.approx(105.55e12, rel=1e-3)
    result = Result(PAGE, HybridMesh((1, 4, 1), (1, 1, 1)), 1, 4, "TPU v4", [0.406] * 5, 275e12)
    assert result.flops_per_s == pytest.approx(260e12, rel=1e-3)
    assert result.share_of_peak == pytest.approx(0.945, abs=1e-3)


def test_numbers_that_cannot_be():
    with pytest.raises(UsageError, match="num_layers is 0"):
        Workload(num_layers=0)


def test_the_batch_of_the_page_is_near_what_the_memory_holds():
    memory = PAGE.memory(HybridMesh((1, 4, 1), (1, 1, 1))).total_bytes
    assert 0.4 * 32 * 2**30 < memory < 32 * 2**30


def test_sharding_frees_memory():
    layouts = ((4, 1, 1), (1, 4, 1), (1, 1, 4))
    plain, spread, split = (PAGE.memory(HybridMesh(ici, (1, 1, 1))).state_bytes for ici in layouts)
    assert split < spread < plain
