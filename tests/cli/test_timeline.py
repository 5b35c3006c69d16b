"""A slice is killed under a training: its timeline in all its forms, and budgets."""

from __future__ import annotations

import json
import re

import pytest

TRAINING = """
import json, os, sys, time, urllib.request
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from regrow.control import request
from regrow.elastic import at_step
from regrow.home import Home

@jax.jit
def train_step(state, batch):
    return jax.tree.map(lambda leaf: leaf + batch.mean(), state), batch.sum()

def place(slices, number, value):
    devices = [device for device in jax.devices() if device.slice_index in slices]
    spread = PartitionSpec("x") if number == 1 else PartitionSpec()
    return jax.device_put(value, NamedSharding(Mesh(np.array(devices), ("x",)), spread))

def state_on(slices):
    return {name: place(slices, 0, np.zeros((64, 64), np.float32)) for name in "abcd"}

def batch_on(slices):
    return place(slices, 1, np.ones(12, np.float32))

def next_batch():
    time.sleep(5)

def status():
    return request(Home().find().control_socket, "status")

def wait_for_the_loss():
    while status()["slices"][1]["state"] == "up":
        time.sleep(0.01)

FATAL = 17
slices, step, last = {0, 1, 2}, 0, 30
state = state_on(slices)
while step < last:
    try:
        at_step(step)
        state, loss = train_step(state, batch_on(slices))
        if step == FATAL and 1 in slices:
            wait_for_the_loss()
        jax.block_until_ready(state)
        step += 1
    except jax.errors.JaxRuntimeError as error:
        assert str(error).startswith("DATA_LOSS"), error
        slices.discard(1)
        step -= step % 5
        state = state_on(slices)
next_batch()
at_step(last)
train_step(state, batch_on(slices))[1].block_until_ready()
if status()["metrics_port"]:
    url = f"http://127.0.0.1:{status()['metrics_port']}/metrics"
    print(urllib.request.urlopen(url, timeout=10).read().decode())
print(json.dumps(status()["timeline"]["goodput"]))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAINING)
    return str(path)


def test_a_loss_in_a_training(regrow, script, tmp_path):
    out = tmp_path / "timeline.json"
    result = regrow(
        "run", "--slices", "3", "--devices-per-slice", "1", "--restore-after", "never",
        "--chaos", "kill:1@step=17", "--budget", "recover=1ms,scale-up=1s",
        "--timeline", str(out), "--metrics-port", "0", script,
    )  # fmt: skip
    assert result.returncode == 5, result.stderr
    lines = result.stderr.splitlines()
    [block] = [number for number, line in enumerate(lines) if "elastic event 1" in line]
    assert "slice 1 lost (SIGKILL), training goes on after" in lines[block]
    parts = [re.sub(r" +-?[0-9.]+ s.*", "", line) for line in lines[block + 1 : block + 9]]
    assert [part.removeprefix("regrow:   ") for part in parts] == [
        "detect", "drain", "decide", "load", "reshard", "compile", "first step", "in no part",
    ]  # fmt: skip
    assert "steps 15 to 17 lost to slice 1, SIGKILL" in result.stderr
    assert re.search(r"asked for nothing for .* at \S+train.py:\d+ \(next_batch\)", result.stderr)
    assert "the budget is recover=0.001s" in lines[-1]
    check(json.loads(out.read_text()))
    assert 'regrow_elastic_events_total{kind="loss"} 1.0' in result.stdout
    assert 'regrow_slices{state="up"} 2.0' in result.stdout
    regrow.nothing_left()


def check(timeline) -> None:
    [event] = timeline["events"]
    total = sum(event["parts"].values()) - event["overlap_s"] + event["rest_s"]
    assert total == pytest.approx(event["wall_s"])
    assert event["parts"]["first step"] > 0
    assert event["parts"]["compile"] > 0
    assert event["parts"]["load"] > 0
    assert event["ended"] == "recovered"
    lost = event["lost"]
    assert (lost["first"], lost["last"], lost["counted"]) == (15, 17, False)
    assert lost["slices"] == [1]
    assert sum(timeline["buckets"].values()) == pytest.approx(timeline["elapsed_s"])
    assert timeline["buckets"]["WASTED_PROGRESS_FROM_DISRUPTION"] > 0
    assert timeline["program"] == "jit_train_step"
    assert timeline["steps_lost"] == 3


def test_what_is_wrong_is_said_before_anything_is_started(regrow, one_line, script):
    said = one_line(regrow("run", "--budget", "recover=soon", script), 2)
    assert said == "'recover=soon' is no budget; write NAME=TIME, with a time such as 2s or 600ms"
    said = one_line(regrow("run", "--timeline", "/proc/none/timeline.json", script), 2)
    assert said.startswith("the timeline cannot be written to /proc/none/timeline.json: ")
    said = one_line(regrow("run", "--timeline", "/tmp/timeline.txt", script), 2)
    assert said == "/tmp/timeline.txt is no name for a timeline; it ends in .json or .png"
    said = one_line(regrow("run", "--metrics-port", "70000", script), 2)
    assert said == "metrics port 70000 is no TCP port"


def test_the_timeline_of_a_cluster(regrow, tmp_path):
    assert regrow("up", "--detach", "--slices", "1", "--devices-per-slice", "1").returncode == 0
    text = regrow("timeline")
    assert text.stdout.startswith("goodput 0.0% of ")
    told = json.loads(regrow("timeline", "--json").stdout)
    assert told["events"] == []
    picture = tmp_path / "timeline.png"
    assert regrow("timeline", "--out", str(picture)).returncode == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert regrow("down").returncode == 0
