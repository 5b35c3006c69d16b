"""Startup scripts, specifications and entrypoints: what they say, and what is refused."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from regrow.cloud.bodies import NodeRequest
from regrow.cloud.names import Place
from regrow.errors import UsageError
from regrow.ray import RankJob, TpuSpec
from regrow.ray.causes import mismatch
from regrow.ray.fence import ATTEMPT_VARIABLE, AttemptId
from regrow.ray.places import SLICE_LABEL, WORKER_LABEL, lacking, selectors, shortage, slice_names
from regrow.ray.settings import health_environ
from regrow.ray.startup import AGAIN_VARIABLE, Joining, rank_resource


def joining(**fields: object) -> Joining:
    defaults: dict[str, object] = {
        "tpu": "me-tpu-ray",
        "generation": "0abc",
        "hosts_per_slice": 2,
        "head": "10.130.0.19:6379",
        "ray_version": "2.60.0",
        "local": False,
    }
    return Joining(**(defaults | fields))  # type: ignore[arg-type]


RAY = """#!/bin/bash
printf '%s\\n' "$@" > "$HOME/words"
"""
CURL = """#!/bin/bash
for word in "$@"; do
  case $word in
    *agent-worker-number) echo 1 ;;
    *tpu-env) printf "ZONE: 'z'\\nMEGASCALE_SLICE_ID: '2'\\n" ;;
    *network-interfaces*) echo 10.0.0.7 ;;
    *guest-attributes*) printf '%s\\n' "$*" >> "$HOME/told" ;;
  esac
done
"""


def run_on_a_host(path: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Runs a script where ray, curl, mount and pip are only noted."""
    programs = path / "bin"
    programs.mkdir()
    for name, text in (("ray", RAY), ("curl", CURL), ("mount", "#!/bin/sh"), ("pip3", "#!/bin/sh")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environ = {"HOME": str(path), "PATH": f"{programs}:/usr/bin:/bin"}
    return subprocess.run(
        ["/bin/bash", "-c", script], env=environ, capture_output=True, text=True, check=False
    )


def test_a_host_joins_with_its_rank_over_all_slices(tmp_path: Path) -> None:
    done = run_on_a_host(tmp_path, joining(script="echo 'hello world'").text())
    assert done.returncode == 0, done.stdout
    assert "hello world" in done.stdout
    words = (tmp_path / "words").read_text().splitlines()
    assert words[0] == "start"
    assert "--address=10.130.0.19:6379" in words
    assert "--node-ip-address=10.0.0.7" in words
    resources = next(word for word in words if word.startswith("--resources="))
    assert json.loads(resources.partition("=")[2]) == {
        "me-tpu-ray_tpu_host": 1,
        rank_resource("me-tpu-ray", "0abc", 5): 1,
    }
    assert re.search(r"--data 0 ", (tmp_path / "told").read_text().splitlines()[-1])


def test_only_a_host_that_boots_tells_that_something_is_under_way(tmp_path: Path) -> None:
    for path, before in ((tmp_path / "boots", ""), (tmp_path / "again", f"{AGAIN_VARIABLE}=1\n")):
        path.mkdir()
        run_on_a_host(path, before + joining().text())
    assert "--data running " in (tmp_path / "boots" / "told").read_text()
    told = (tmp_path / "again" / "told").read_text()
    assert "running" not in told
    assert "--data 0 " in told


def test_a_script_that_fails_does_not_join_and_tells_why(tmp_path: Path) -> None:
    script = "echo 'Error: no disk' >&2; echo bye; exit 3"
    done = run_on_a_host(tmp_path, joining(script=script).text())
    assert done.returncode == 3
    assert not (tmp_path / "words").exists()
    assert "--data 3 Error: no disk " in (tmp_path / "told").read_text().splitlines()[-1]


def test_which_versions_differ_is_told_in_one_line(tmp_path: Path) -> None:
    told = [
        "RuntimeError: Version mismatch: The cluster was started with:",
        "    Ray: 2.60.0",
        "    Python: 3.11.7",
        "This process on node 10.0.0.7 was started with:",
        "    Ray: 2.59.0",
        "    Python: 3.10.12",
        "",
        "Error: and more",
    ]
    script = "printf '%s\\n' " + " ".join(shlex.quote(line) for line in told) + "; exit 1"
    run_on_a_host(tmp_path, joining(script=script).text())
    result = (tmp_path / "told").read_text().splitlines()[-1]
    assert f"--data 1 {' '.join(' '.join(told[:6]).split())} " in result
    assert mismatch("\n".join(told)) == " ".join(" ".join(told[:6]).split()).partition(" ")[2]
    assert not mismatch("Python patch version mismatch: The cluster was started with:")


def test_the_ranks_of_local_hosts_find_tpus(tmp_path: Path) -> None:
    text = joining(local=True, chips=4).text()
    assert '"TPU": 4' in text
    assert "TPU" not in joining(chips=4).text().partition("--resources=")[2]


@pytest.mark.parametrize(
    "wrong", [{"head": "nowhere"}, {"head": "a:1; rm -rf /"}, {"tpu": "a b"}, {"tpu": "x" * 60}]
)
def test_what_cannot_be_joined(wrong: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        joining(**wrong).text()


def node(**fields: object) -> NodeRequest:
    return NodeRequest(runtime_version="v", **fields)  # type: ignore[arg-type]


def test_specifications() -> None:
    one = TpuSpec(name="t", node=node(type="V4", topology="2x2x2"))
    assert (one.hosts, one.is_queued, one.node_ids) == (2, False, ["t"])
    many = TpuSpec(name="t", node=node(accelerator_type="v5litepod-16", spot=True), slices=3)
    assert (many.hosts, many.is_queued, many.node_ids) == (12, True, ["t-0", "t-1", "t-2"])
    body = many.queued_body(Place("p", "z"))
    assert body["spot"] == {}
    assert "schedulingConfig" not in body["tpu"]["nodeSpec"][0]["node"]
    assert one.with_metadata({"a": "b"}).node.metadata == {"a": "b"}
    with pytest.raises(UsageError, match="there is no accelerator 'v4-7'"):
        _ = TpuSpec(name="t", node=node(accelerator_type="v4-7")).hosts
    with pytest.raises(UsageError, match="at least one"):
        TpuSpec(name="t", node=node(accelerator_type="v4-8"), slices=0)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a~b", "-a", "a.", "é", "x" * 49])
def test_what_cannot_name_a_tpu(name: str) -> None:
    with pytest.raises(UsageError, match="cannot name a TPU on a Ray cluster: use letters"):
        TpuSpec(name=name, node=node(accelerator_type="v4-8"))


def test_jobs(tmp_path: Path) -> None:
    job = RankJob(
        name="j", command=["echo", "a b"], working_dir=str(tmp_path), pip=["x"], env={"A": "1"}
    )
    assert job.entrypoint() == "exec python3 -m regrow.ray.rank -- echo 'a b'"
    attempt = AttemptId(job="j", token="t", number=1, rank=0, ranks=2)
    env = job.runtime_env(attempt, {"A": "0", "B": "2"})
    assert env["env_vars"] == {"A": "1", "B": "2", ATTEMPT_VARIABLE: attempt.to_json()}
    assert env["pip"] == ["x"]
    assert env["config"] == {"setup_timeout_seconds": 600}
    assert env["working_dir"] == str(tmp_path)
    for wrong in (
        {"name": "a/b", "command": ["x"]},
        {"name": "j", "command": []},
        {"name": "j", "command": ["x"], "working_dir": str(tmp_path / "none")},
        {"name": "j", "command": ["x"], "directory": "gs://bucket/x"},
        {"name": "j", "command": ["x"], "setup_s": 0},
    ):
        with pytest.raises(UsageError):
            RankJob(**wrong)  # type: ignore[arg-type]


def test_health_settings() -> None:
    environ = health_environ(5)
    period, timeout, threshold = (
        int(environ[f"RAY_health_check_{name}"])
        for name in ("period_ms", "timeout_ms", "failure_threshold")
    )
    assert threshold * period < 1000, "a refusal is believed within a second"
    assert abs(threshold * (period + timeout) - 5000) < 5
    with pytest.raises(UsageError):
        health_environ(1)


def ray_node(resources: dict[str, float], slice_name: str = "", alive: bool = True) -> dict:
    labels = {"ray.io/tpu-slice-name": slice_name} if slice_name else {}
    return {"Alive": alive, "Resources": resources, "Labels": labels}


def test_places() -> None:
    nodes = [
        ray_node({"TPU": 4}, "a"),
        ray_node({"TPU": 4}, "a"),
        ray_node({"TPU": 4}, "b"),
        ray_node({"TPU": 4}, "b", alive=False),
        ray_node({"CPU": 8}),
    ]
    assert lacking(nodes, {"TPU": 4}, 2, "STRICT_SPREAD") == ""
    assert slice_names(nodes, {"TPU": 4}, 2) == ["a"]
    assert slice_names(nodes, {"TPU": 4}, 1) == ["a", "b"]
    assert slice_names(nodes, {"CPU": 1}, 1) == []
    told = lacking(nodes, {"TPU": 8}, 1, "PACK")
    assert told == (
        'a slice needs a node with {"TPU": 8}, but only 0 of the 4 nodes of the Ray cluster could '
        "serve; the nodes offer CPU, TPU"
    )
    assert lacking(nodes, {"TPU": 4}, 4, "STRICT_SPREAD")
    assert not lacking(nodes, {"TPU": 4}, 4, "PACK")


def test_what_a_cluster_lacks_for_a_slice() -> None:
    total, free = {"TPU": 8.0, "CPU": 2.0}, {"CPU": 1.5}
    assert shortage({"TPU": 4, "CPU": 1}, total, free) == (
        'the Ray cluster has {"TPU": 8, "CPU": 2}, of which {"TPU": 0, "CPU": 1.5} is free'
    )


def test_hosts_are_where_they_are_in_their_tpu_slice() -> None:
    def host(worker: str) -> dict[str, object]:
        return {"Alive": True, "Labels": {SLICE_LABEL: "a", WORKER_LABEL: worker}}

    nodes = [host("1"), host("0"), {"Alive": True, "Labels": {SLICE_LABEL: "b"}}]
    assert selectors(nodes, "a", 2) == [
        {SLICE_LABEL: "a", WORKER_LABEL: "0"},
        {SLICE_LABEL: "a", WORKER_LABEL: "1"},
    ]
    assert selectors(nodes, "b", 1) == [{SLICE_LABEL: "b"}], "Ray does not tell its place"
    assert selectors([host("1")], "a", 1) == [{SLICE_LABEL: "a"}], "the first is taken"
