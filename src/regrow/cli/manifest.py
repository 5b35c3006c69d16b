"""`regrow manifest`: what Kubernetes is told."""

from __future__ import annotations

from typing import Any

import click
import yaml

from regrow.cli.report import say
from regrow.jobs.priorities import PriorityClass
from regrow.manifests.jobset import JobSetOptions, documents
from regrow.manifests.nodes import Nodes, cpu_nodes, gpu_nodes, tpu_nodes


@click.group("manifest")
def command() -> None:
    """Print manifests for Kubernetes, for kubectl apply -f -."""


@command.command("jobset")
@click.argument("name")
@click.argument("program", nargs=-1, required=True, metavar="-- COMMAND [ARGS]...")
@click.option("--image", required=True, metavar="IMAGE", help="Made by the Containerfile.")
@click.option("--tpu", metavar="TYPE", help="Slices of TPUs, such as v5p-16 or v5p:2x2x2.")
@click.option("--gpu", metavar="MODEL:NUMBER", help="Hosts with GPUs: nvidia-h100-80gb:8.")
@click.option("--cpu", type=int, metavar="CORES", help="Hosts with so many CPU devices each.")
@click.option(
    "--hosts-per-slice", type=int, metavar="N", help="With --gpu and --cpu.  [default: 1]"
)
@click.option(
    "--controller",
    type=click.Choice(["single", "multi"]),
    default="single",
    show_default=True,
    help="One program for all slices, or one on every host (Multislice).",
)
@click.option("--slices", type=int, default=1, show_default=True, help="Number of slices.")
@click.option(
    "--spare-slices",
    type=int,
    default=0,
    show_default=True,
    help="Slices that are held for one that fails, by pods of the lowest priority.",
)
@click.option(
    "--num_elastic_instances",
    "--num-elastic-instances",
    "num_elastic_instances",
    type=int,
    metavar="N",
    help="How many slices may come and go.  [default: the job is not elastic]",
)
@click.option(
    "--gcs_scratch_location",
    "--gcs-scratch-location",
    "scratch",
    metavar="URL",
    help="Where state is kept that outlives the pods, such as gs://bucket/dir.",
)
@click.option("--priority", "priority_class", metavar="NAME", help="PriorityClass of the pods.")
@click.option(
    "--grace-period",
    "grace_s",
    type=int,
    default=120,
    show_default=True,
    metavar="SECONDS",
    help="Between the notice that a pod is to end and its end.",
)
@click.option(
    "--max-restarts",
    type=int,
    default=0,
    show_default=True,
    help="How often the JobSet is started anew as a whole.",
)
@click.option("--token-secret", "secret", metavar="NAME", help="Secret that holds `token`.")
@click.option(
    "--allow-no-token", is_flag=True, help="Let everyone in who reaches the port (closed network)."
)
@click.option("--namespace", metavar="NAME")
def jobset(
    program: tuple[str, ...],
    tpu: str | None,
    gpu: str | None,
    cpu: int | None,
    hosts_per_slice: int | None,
    allow_no_token: bool,
    **values: Any,
) -> None:
    """Print a JobSet that runs COMMAND over slices, and what it needs beside it."""
    nodes = _nodes(tpu, gpu, cpu, hosts_per_slice)
    if values["controller"] == "single" and (values["secret"] is None) != allow_no_token:
        raise click.UsageError(
            "clients and workers present a token: name the secret with --token-secret, "
            "or, on a closed network, say --allow-no-token"
        )
    if values["controller"] == "single" and nodes.platform != "cpu":
        say(
            f"hosts compute on CPU devices only as yet, also on nodes with {nodes.platform.upper()}s"
        )
    _print(documents(JobSetOptions(nodes=nodes, command=program, **values)))


@command.command("priorityclass")
@click.argument("name")
@click.option("--value", type=int, required=True, help="A greater one goes first.")
@click.option("--global-default", is_flag=True, help="For pods that name no class.")
@click.option("--description", default="", metavar="TEXT")
@click.option("--never-preempt", is_flag=True, help="Its pods wait, and take no other's place.")
def priorityclass(
    name: str, value: int, global_default: bool, description: str, never_preempt: bool
) -> None:
    """Print a PriorityClass; Regrow's resource manager reads it as well."""
    one = PriorityClass(
        name=name,
        value=value,
        global_default=global_default,
        description=description,
        preemption_policy="Never" if never_preempt else "PreemptLowerPriority",
    )
    _print([one.to_manifest()])


def _nodes(tpu: str | None, gpu: str | None, cpu: int | None, hosts: int | None) -> Nodes:
    if [tpu, gpu, cpu].count(None) != 2:
        raise click.UsageError("say what a slice is made of: one of --tpu, --gpu and --cpu")
    if tpu is not None:
        if hosts is not None:
            raise click.UsageError("the hosts of a TPU slice follow from its topology")
        return tpu_nodes(tpu)
    per_slice = 1 if hosts is None else hosts
    return gpu_nodes(gpu, per_slice) if gpu is not None else cpu_nodes(cpu or 0, per_slice)


def _print(manifests: list[dict[str, Any]]) -> None:
    click.echo(yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False), nl=False)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        """Every value stands where it belongs: an anchor is no help to who edits the manifest."""
        return True
