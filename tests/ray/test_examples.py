"""The programs of examples/ray, run as a user runs them: a real Ray cluster, a local Cloud TPU, real losses."""

from __future__ import annotations

import csv
import importlib.util
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from cloud_server import LocalCloud
from rays import LONG, raylet_at

from regrow.cloud.client import CloudClient
from regrow.cloud.names import Place
from regrow.cloud.nodes import delete_node
from regrow.errors import UsageError
from regrow.ray import RayCluster
from regrow.ray.head import RayHead
from running import RunningProgram

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "ray"
PLACE = Place("p", "us-central2-b")
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed"
)
needs_search = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("ray", "flax", "sklearn", "matplotlib")),
    reason="the extras ray, search and plots are not installed",
)


class Examples:
    """The programs against one cluster and one Cloud TPU."""

    def __init__(self, head: RayHead, cloud: LocalCloud, cwd: Path) -> None:
        endpoint = cloud.directory.server().endpoint
        self.client = CloudClient(endpoint, token=cloud.directory.token())
        self.cluster = RayCluster(head.address)
        self.cwd = cwd
        self.where = ["--tpu=t", "--project=p", f"--zone={PLACE.zone}", f"--endpoint={endpoint}"]
        self.where.append(f"--address={head.address}")
        self.running: list[RunningProgram] = []

    def start(self, name: str, *arguments: str) -> RunningProgram:
        program = RunningProgram(
            EXAMPLES / name, *self.where, *arguments, cwd=self.cwd, timeout_s=LONG
        )
        self.running.append(program)
        return program


@pytest.fixture(scope="module")
def world(
    head: RayHead, cloud: LocalCloud, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Examples]:
    world = Examples(head, cloud, tmp_path_factory.mktemp("examples"))
    yield world
    delete_node(world.client, PLACE, "t", timeout_s=LONG)
    world.client.close()


@pytest.fixture
def examples(world: Examples) -> Iterator[Examples]:
    yield world
    while world.running:
        world.running.pop().close()


@pytest.mark.slow
@needs_ray
@pytest.mark.timeout(900)
def test_each_host_counts_all_devices(examples: Examples) -> None:
    text = examples.start("run_basic_jax.py").succeeds()
    assert "TPU is not found, create tpu..." in text
    assert "Detected 0 of 2 hosts of t" in text
    assert sorted(re.findall(r"^\[rank (\d)\] 8$", text, re.MULTILINE)) == ["0", "1"]


@pytest.mark.slow
@needs_ray
@pytest.mark.timeout(900)
def test_training_whose_tpu_is_deleted_ends_with_the_same_loss(
    examples: Examples, tmp_path: Path
) -> None:
    def train(name: str) -> RunningProgram:
        return examples.start(
            "run_autoresume.py",
            f"--checkpoint-dir={tmp_path / name}",
            "--steps=120",
            "--checkpoint-every=20",
        )

    undisturbed = train("undisturbed").succeeds()
    disturbed = train("disturbed")
    disturbed.wait_for(r"\[rank 0\] checkpoint at step 40$")
    assert delete_node(examples.client, PLACE, "t", timeout_s=LONG)
    text = disturbed.succeeds()
    starts = re.findall(r"from step: (\d+) across 8 devices", text)
    assert starts[0] == "0"
    assert 40 <= int(starts[1]) < 120
    assert int(starts[1]) % 20 == 0
    losses = [re.findall(r"final loss: .*", one) for one in (undisturbed, text)]
    assert len(losses[0]) == 1
    assert losses[0] == losses[1]


@pytest.mark.slow
@needs_search
@pytest.mark.timeout(900)
def test_a_search_loses_a_node_and_one_epoch_at_most(examples: Examples, tmp_path: Path) -> None:
    search = examples.start(
        "run_hp_search.py",
        "--data=digits",
        "--trials=3",
        "--epochs=40",
        "--concurrent=2",
        f"--out={tmp_path}",
    )
    search.wait_for("The data is digits")
    deadline = time.monotonic() + LONG
    while not (rows := rows_of(tmp_path)):
        assert time.monotonic() < deadline, search.seen
        time.sleep(0.2)
    os.kill(raylet_at(rows[-1]["node_ip"]), signal.SIGKILL)
    text = search.succeeds()
    assert "Number of trials: 3/3 (3 TERMINATED)" in text
    assert re.search(r"Best trial: .*learning_rate.*momentum.* with accuracy 0\.\d+", text)
    assert (tmp_path / "search.png").stat().st_size > 10_000
    rows = rows_of(tmp_path)
    for trial in {row["trial_id"] for row in rows}:
        check_epochs([row for row in rows if row["trial_id"] == trial])
    assert {row["began_at_epoch"] for row in rows} != {"1"}
    assert len({(row["trial_id"], row["pid"]) for row in rows}) > 3


def check_epochs(rows: list[dict[str, str]]) -> None:
    """None is left out; only a trial that was begun again tells one twice, with the same numbers."""
    epochs = [int(row["epoch"]) for row in rows]
    assert sorted(set(epochs)) == list(range(1, max(epochs) + 1))
    for before, row in itertools.pairwise(rows):
        if int(row["epoch"]) != int(before["epoch"]) + 1:
            assert row["epoch"] == before["epoch"] == row["began_at_epoch"], epochs
            assert row["pid"] != before["pid"]
            assert row["mean_loss"] == before["mean_loss"]


def rows_of(out: Path) -> list[dict[str, str]]:
    """What trials have told of their epochs."""
    paths = sorted(out.glob("digits/*/progress.csv"))
    return [row for path in paths for row in csv.DictReader(path.read_text().splitlines())]


# --- without a cluster ---


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@needs_ray
def test_the_usual_tpu_and_others(importable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "me")
    from tpu_flags import parser_of, spec_of

    parser = parser_of("", "ray-test")
    usual = spec_of(parser.parse_args([]))
    assert (usual.name, usual.accelerator.name, usual.hosts) == ("me-ray-test", "v4-16", 2)
    assert (usual.node.type, usual.node.topology) == ("V4", "2x2x2")
    other = spec_of(parser.parse_args(["--tpu=x", "--accelerator-type=v5litepod-8", "--spot"]))
    assert (other.name, other.hosts, other.node.spot) == ("x", 1, True)
    with pytest.raises(UsageError):
        spec_of(parser.parse_args(["--type=V4", "--topology=9x9x9"]))


@pytest.mark.slow
@needs_search
def test_both_hyperparameters_are_used(importable: None) -> None:
    import numpy as np
    from digit_trial import optimizer_of

    optimizer = optimizer_of({"learning_rate": 0.5, "momentum": 0.25})
    weight, gradient = np.float32(0), np.float32(1)
    first, state = optimizer.update(gradient, optimizer.init(weight))
    second, _ = optimizer.update(gradient, state)
    assert (float(first), float(second)) == (-0.5, -0.5 * 1.25)


@pytest.mark.slow
@needs_search
def test_an_epoch_that_was_told_twice_is_shown_once(importable: None) -> None:
    import pandas as pd
    from run_hp_search import history_of

    told = pd.DataFrame({"epoch": [1, 2, 2, 3], "mean_accuracy": [0.1, 0.2, 0.2, 0.3]})
    shown = history_of(SimpleNamespace(metrics_dataframe=told))
    assert list(shown["epoch"]) == [1, 2, 3]
    assert list(shown["mean_accuracy"]) == [0.1, 0.2, 0.3]


@needs_ray
@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["--project=p", "--address=127.0.0.1:1"], 3, "no Ray head answers at 127.0.0.1:1"),
        (["--project=p", "--accelerator-type=v4-7"], 2, "there is no accelerator 'v4-7'"),
        ([], 2, "no project: give --project"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(arguments: list[str], status: int, told: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "run_basic_jax.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert done.stderr.startswith(f"run_basic_jax.py: {told}")
    assert done.stderr.count("\n") == 1
