"""Manifests against the published schemas, and what is in them."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import click
import pytest
from schemas import check

from regrow.cli import _regrow
from regrow.errors import UsageError
from regrow.jobs.priorities import PriorityClass
from regrow.manifests.jobset import JobSetOptions, documents
from regrow.manifests.nodes import Nodes, cpu_nodes, gpu_nodes, tpu_nodes

NODES = {
    "tpu": tpu_nodes("v5p:2x2x2"),
    "one-host-tpu": tpu_nodes("v6e:2x2"),
    "gpu": gpu_nodes("nvidia-h100-80gb:8", 2),
    "cpu": cpu_nodes(4, 1),
}


def options(**changes: Any) -> JobSetOptions:
    values = {"name": "train", "image": "regrow:1", "nodes": NODES["tpu"], "command": ("a", "b")}
    return JobSetOptions(**values | changes)


def jobset(**changes: Any) -> dict[str, Any]:
    return documents(options(**changes))[-1]


def pod(document: dict[str, Any], job: str) -> dict[str, Any]:
    return replicated(document, job)["template"]["spec"]["template"]["spec"]


def replicated(document: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [job for job in document["spec"]["replicatedJobs"] if job["name"] == name]
    return found


def environ(container: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


# --- the schemas --------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"slices": 3, "spare_slices": 2, "priority_class": "high-prior-job", "max_restarts": 5},
        {"slices": 3, "num_elastic_instances": 3, "scratch": "gs://b/d", "secret": "token"},
        {"controller": "multi", "slices": 2, "namespace": "jobs", "grace_s": 0},
        {"controller": "multi", "spare_slices": 1, "priority_class": "high-prior-job"},
    ],
    ids=["plain", "spares", "elastic", "multi", "multi-spares"],
)
def test_every_manifest_is_what_the_schemas_say(nodes: Nodes, more: dict[str, Any]) -> None:
    for document in documents(options(nodes=nodes, **more)):
        check(document)


def test_a_priority_class_is_what_the_schema_says() -> None:
    check(PriorityClass(name="high", value=2000, description="d").to_manifest())
    check(PriorityClass(name="calm", value=-1, preemption_policy="Never").to_manifest())


def test_the_checks_would_find_a_wrong_manifest() -> None:
    wrongs: list[Callable[[dict[str, Any]], object]] = [
        lambda one: one["spec"].update(sucessPolicy={}),
        lambda one: one["spec"]["failurePolicy"].update(maxRestarts="many"),
        lambda one: one["spec"]["coordinator"].pop("replicatedJob"),
        lambda one: replicated(one, "worker").update(replica=2),
        lambda one: replicated(one, "worker")["template"]["spec"].update(paralelism=2),
        lambda one: pod(one, "worker").update(priorityClass="high"),
        lambda one: pod(one, "worker").update(terminationGracePeriodSeconds="60s"),
        lambda one: pod(one, "worker")["containers"][0].pop("name"),
        lambda one: pod(one, "worker")["containers"][0]["env"].append({"nam": "A"}),
        lambda one: pod(one, "pathways-head")["initContainers"][0].update(args="--flag"),
    ]
    for wrong in wrongs:
        document = copy.deepcopy(jobset())
        check(document)
        wrong(document)
        with pytest.raises(Exception):  # noqa: B017 - each package has its own
            check(document)
    with pytest.raises(Exception):  # noqa: B017
        check(PriorityClass(name="a", value=1).to_manifest() | {"globaldefault": True})


# --- the single controller ----------------------------------------------------------------------


def test_the_proxy_has_the_flags_of_the_page() -> None:
    document = jobset(slices=2, num_elastic_instances=2, scratch="gs://bucket", secret="t")
    (proxy,) = pod(document, "pathways-head")["initContainers"]
    assert proxy["name"] == "pathways-proxy"
    assert set(proxy["args"]) >= {
        "--server_port=29000",
        "--resource_manager_address=$(PATHWAYS_HEAD):29001",
        "--gcs_scratch_location=gs://bucket",
        "--num_elastic_instances=2",
    }
    assert proxy["restartPolicy"] == "Always"


def test_the_head_command_is_one_that_regrow_takes() -> None:
    document = jobset(slices=2, num_elastic_instances=2, scratch="/scratch")
    (proxy,) = pod(document, "pathways-head")["initContainers"]
    # With a wrong flag the answer would be about the flag, and 2 as well, but another text.
    arguments = [*proxy["command"][1:], *proxy["args"], "--slices", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "regrow", *arguments],
        env=os.environ,
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "slices is 0" in done.stderr


def test_the_program_is_a_client_of_the_proxy() -> None:
    document = jobset(secret="token")
    (main,) = pod(document, "pathways-head")["containers"]
    variables = environ(main)
    assert main["command"] == ["a", "b"]
    assert variables["JAX_PLATFORMS"] == "proxy"
    assert variables["JAX_BACKEND_TARGET"] == "grpc://$(PATHWAYS_HEAD):29000"
    # A variable in a value must be defined before it.
    assert list(variables).index("PATHWAYS_HEAD") < list(variables).index("JAX_BACKEND_TARGET")
    assert variables["REGROW_TOKEN"] == {"secretKeyRef": {"name": "token", "key": "token"}}


def test_each_slice_is_a_job_with_a_pod_for_each_host() -> None:
    document = jobset(slices=3)
    worker = replicated(document, "worker")
    assert worker["replicas"] == 3
    assert worker["template"]["spec"]["parallelism"] == 2
    assert worker["template"]["spec"]["completions"] == 2
    annotations = worker["template"]["metadata"]["annotations"]
    assert list(annotations.values()) == ["cloud.google.com/gke-nodepool"]
    spec = pod(document, "worker")
    assert spec["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "2x2x2",
    }
    assert spec["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}


def test_an_elastic_job_keeps_its_head_when_a_slice_is_preempted() -> None:
    elastic = jobset(slices=2, num_elastic_instances=1)
    spec = replicated(elastic, "worker")["template"]["spec"]
    assert spec["podFailurePolicy"]["rules"][0]["action"] == "Ignore"
    assert spec["backoffLimit"] > 0
    stiff = replicated(jobset(slices=2), "worker")["template"]["spec"]
    assert stiff["backoffLimit"] == 0
    # Its state may have been saved, and comes back with the pod.
    assert stiff["podFailurePolicy"] == spec["podFailurePolicy"]
    assert (
        "podFailurePolicy" not in replicated(jobset(slices=2), "pathways-head")["template"]["spec"]
    )


def test_priority_grace_and_restarts() -> None:
    document = jobset(priority_class="high-prior-job", grace_s=300, max_restarts=4)
    for name in ("pathways-head", "worker"):
        assert pod(document, name)["priorityClassName"] == "high-prior-job"
        assert pod(document, name)["terminationGracePeriodSeconds"] == 300
    assert "--grace=300" in pod(document, "pathways-head")["initContainers"][0]["args"]
    assert document["spec"]["failurePolicy"] == {"maxRestarts": 4}


# --- multi-controller ---------------------------------------------------------------------------


@pytest.mark.parametrize(("slice_index", "host", "rank"), [("0", "0", "0"), ("2", "1", "5")])
def test_each_process_of_a_multislice_program_has_its_rank(
    slice_index: str, host: str, rank: str
) -> None:
    script = "import os, sys; print(os.environ['JAX_PROCESS_ID'], sys.argv[1:])"
    command = (sys.executable, "-c", script, "an argument", "$HOME")
    document = jobset(controller="multi", slices=3, command=command)
    (main,) = pod(document, "worker")["containers"]
    given = environ(main)
    assert given["JAX_NUM_PROCESSES"] == "6"
    assert given["MEGASCALE_NUM_SLICES"] == "3"
    told = {
        "JAX_PARTITION_INDEX": slice_index,
        "HOST_INDEX": host,
        "HOSTS_PER_SLICE": given["HOSTS_PER_SLICE"],
    }
    done = subprocess.run(
        main["command"], env=os.environ | told, text=True, capture_output=True, timeout=60
    )
    assert done.stdout.strip() == f"{rank} ['an argument', '$HOME']", done.stderr


def test_a_program_on_cpu_or_gpu_hosts_knows_nothing_of_megascale() -> None:
    for kind in ("cpu", "gpu"):
        document = jobset(controller="multi", slices=2, nodes=NODES[kind])
        variables = environ(pod(document, "worker")["containers"][0])
        assert not any(name.startswith("MEGASCALE") for name in variables)


# --- spares -------------------------------------------------------------------------------------


def test_spares_hold_whole_slices_until_anyone_needs_them() -> None:
    priority, spares, _ = documents(options(slices=2, spare_slices=1))
    assert priority["kind"] == "PriorityClass"
    assert priority["value"] < 0
    assert priority["preemptionPolicy"] == "Never"
    spec = pod(spares, "spare")
    assert spec["priorityClassName"] == priority["metadata"]["name"]
    assert spec["nodeSelector"] == pod(jobset(), "worker")["nodeSelector"]
    assert spec["terminationGracePeriodSeconds"] == 0
    assert replicated(spares, "spare")["replicas"] == 1


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"name": "Train"}, "cannot be the name of a JobSet"),
        ({"name": "t" * 23}, "cannot be the name of a JobSet"),
        ({"image": "a b"}, "no name of an image"),
        ({"slices": 0}, "slices is 0"),
        ({"spare_slices": -1}, "spare_slices is -1"),
        ({"slices": 2, "num_elastic_instances": 3}, "from 0 to 2"),
        ({"controller": "multi", "scratch": "gs://b"}, "single controller"),
        ({"command": ()}, "no command"),
        ({"priority_class": "High"}, "cannot be the name of a priority class"),
    ],
)
def test_a_wrong_option_is_one_clear_line(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        options(**changes)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("v9:2x2", "no TPU 'v9'; there are: v4, v5e"),
        ("v5p:3x3x3", "no v5p slice of topology '3x3x3'; there are: 2x2x1"),
        ("v5p:", "no v5p slice of topology ''"),
        ("v5p", "is no accelerator type"),
        ("v5p-7", "no accelerator type v5p-7"),
        ("v3-8", "Kubernetes has no TPU v3"),
        ("v6e:2x2x2", "no v6e slice"),
    ],
)
def test_a_shape_that_does_not_exist(text: str, error: str) -> None:
    with pytest.raises(UsageError, match=error):
        tpu_nodes(text)


@pytest.mark.parametrize("text", ["nvidia-l4", "nvidia-l4:", ":8", "a b:8", "nvidia-l4:0"])
def test_gpus_that_are_none(text: str) -> None:
    with pytest.raises(UsageError):
        gpu_nodes(text, 1)


@pytest.mark.parametrize(
    ("text", "hosts", "per_host"),
    [
        ("v4:2x2x4", 4, 4),
        ("v5e:1x1", 1, 1),
        ("v5e:4x4", 4, 4),
        ("v5p-16", 2, 4),
        ("v5p:16x16x24", 1536, 4),
    ],
)
def test_hosts_of_a_tpu_slice(text: str, hosts: int, per_host: int) -> None:
    nodes = tpu_nodes(text)
    assert (nodes.hosts, nodes.per_host) == (hosts, per_host)


# --- what the containers run --------------------------------------------------------------------


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
@pytest.mark.parametrize(
    "more",
    [{}, {"slices": 3, "num_elastic_instances": 2, "scratch": "gs://b/d", "secret": "token"}],
    ids=["plain", "everything"],
)
def test_containers_name_only_commands_and_flags_that_exist(
    nodes: Nodes, more: dict[str, Any]
) -> None:
    document = jobset(nodes=nodes, **more)
    (proxy,) = pod(document, "pathways-head")["initContainers"]
    (worker,) = pod(document, "worker")["containers"]
    for container in (proxy, worker):
        program, name = container["command"]
        assert program == "regrow"
        command = _regrow.get_command(click.Context(_regrow), name)
        assert command is not None, f"there is no command {name}"
        # It raises for a flag that is not there, and for a value that is none of its type.
        command.make_context(name, list(container["args"]))


def test_the_head_is_told_what_its_hosts_are() -> None:
    (proxy,) = pod(jobset(slices=3), "pathways-head")["initContainers"]
    assert {"--slices=3", "--hosts-per-slice=2", "--devices-per-slice=8"} <= set(proxy["args"])
    (port,) = [word.partition("=")[2] for word in proxy["args"] if word.startswith("--worker_port")]
    (worker,) = pod(jobset(), "worker")["containers"]
    assert f"--resource_manager_address=$(PATHWAYS_HEAD):{port}" in worker["args"]
