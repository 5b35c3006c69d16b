"""`regrow ray`: the head of a Ray cluster, jobs on the hosts of TPUs, and a coordinator VM."""

from __future__ import annotations

import dataclasses
import getpass
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from regrow.cli import complain
from regrow.cli.options import seconds
from regrow.cli.ray_coordinator import coordinator
from regrow.cli.ray_options import address_option, parse_resources
from regrow.cli.report import count, say
from regrow.cli.tpu_options import at_place, duration, ended_by_sigterm
from regrow.cloud.bodies import NodeRequest, parse_pairs
from regrow.errors import RayJobError, UsageError

if TYPE_CHECKING:
    from regrow.cloud.client import CloudClient
    from regrow.cloud.names import Place
    from regrow.ray.head import HeadEntry

JOB_FAILED_STATUS: Final = 1
_MANY: Final = 100


@click.group("ray")
def command() -> None:
    """Ray: a head, jobs on the hosts of TPUs that join it, a coordinator VM."""


command.add_command(coordinator)

# --- the head ---


@command.group("head")
def head() -> None:
    """The head of a Ray cluster on this machine."""


def _node_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--node-cpus", type=click.IntRange(0), default=1, show_default=True),
        click.option(
            "--resources",
            default='{"tpu_host": 1}',
            show_default=True,
            metavar="JSON",
            help="What each further node has.",
        ),
    ):
        function = option(function)
    return function


def _node_resources(text: str) -> dict[str, float]:
    """What a further node has: refused before anything is started."""
    from regrow.ray.settings import check_node_resources

    resources = parse_resources(text)
    check_node_resources(resources)
    return resources


def _add_node(entry: HeadEntry, resources: dict[str, float], node_cpus: int) -> None:
    address = entry.add_node(resources, node_cpus)
    say(f"a node with {json.dumps(resources)} is up at {address}")


@head.command("add-node")
@_node_options
def add_node(resources: str, node_cpus: int) -> None:
    """Start a further node on this machine."""
    from regrow.ray.head import HeadEntry

    _add_node(HeadEntry(), _node_resources(resources), node_cpus)


@head.command("up")
@click.option("--host", default="", metavar="ADDRESS", help="Its address.  [default: Ray's choice]")
@click.option("--port", type=click.IntRange(0, 65535), default=6379, show_default=True)
@click.option(
    "--dashboard-port",
    type=click.IntRange(0, 65535),
    default=8265,
    show_default=True,
    help="Of 127.0.0.1; jobs go there; 0: any.",
)
@click.option(
    "--num-cpus", type=click.IntRange(0), default=0, show_default=True, help="For work on its node."
)
@click.option(
    "--hang-after",
    "hang_after_s",
    type=seconds,
    default="5",
    metavar="SECONDS",
    help="A node that is silent for so long is dead; a killed one after a second.  [default: 5]",
)
@click.option(
    "--nodes", type=click.IntRange(0), default=0, show_default=True, help="Further ones, here."
)
@_node_options
def up(nodes: int, resources: str, node_cpus: int, **values: Any) -> None:
    """Start it; it goes on until `regrow ray head down`."""
    from regrow.ray.head import HeadEntry

    wanted = _node_resources(resources)
    entry = HeadEntry()
    # What is under way would stay without anybody who knows of it.
    with ended_by_sigterm():
        started = entry.up(**values)
    say(f"a Ray head is up at {started.address}, its dashboard at {started.dashboard}")
    for _ in range(nodes):
        _add_node(entry, wanted, node_cpus)
    say(f"further nodes: ray start --address={started.address}; its end: regrow ray head down")


@head.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print it for programs.")
def status(as_json: bool) -> None:
    """Show it, its nodes and its jobs."""
    from regrow.ray.cluster import RayCluster
    from regrow.ray.head import HeadEntry

    found = HeadEntry().find()
    cluster = RayCluster(found.address)
    nodes, jobs = cluster.nodes(), [job for job in cluster.jobs() if job.runs]
    if as_json:
        told = dataclasses.asdict(found) | {
            "version": cluster.version,
            "nodes": [dataclasses.asdict(node) for node in nodes],
            "jobs": [dataclasses.asdict(job) for job in jobs],
        }
        click.echo(json.dumps(told, indent=1))
        return
    click.echo(
        f"{found.address} (Ray {cluster.version}, dashboard {found.dashboard}): "
        f"{count(len(nodes), 'node')} alive, {count(len(jobs), 'job')} running"
    )
    for node in nodes:
        own = {
            name: number
            for name, number in node.resources.items()
            if not name.startswith(("node:", "memory", "object_store_memory"))
        }
        click.echo(f"  {node.address}{' (head)' if node.is_head else ''}: {json.dumps(own)}")


@head.command("down")
def down() -> None:
    """End it, and the nodes that were started from it."""
    from regrow.ray.head import HeadEntry

    ended = HeadEntry().down()
    say(f"the Ray head at {ended.address} is down")


# --- jobs ---


@command.command("job", context_settings={"ignore_unknown_options": False})
@click.option("--tpu", metavar="NAME", help="The TPU.  [default: $USER-tpu-ray]")
@click.option("--accelerator-type", metavar="TYPE", help="v4-16, say.")
@click.option("--type", "kind", metavar="GENERATION", help="With --topology: V4, say.")
@click.option("--topology", metavar="AxBxC", help="With --type: 2x2x2, say.")
@click.option("--runtime-version", metavar="VERSION", help="Software of a host.  [default: usual]")
@click.option("--slices", type=int, default=1, show_default=True)
@click.option("--spot", is_flag=True, help="Slices that may be preempted.")
@click.option("--reserved", is_flag=True, help="Slices of a reservation.")
@click.option("--queued", is_flag=True, help="Ask for it as a queued resource.")
@click.option(
    "--startup-script",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A shell script that hosts run before they join.",
)
@address_option
@click.option("--name", metavar="NAME", help="Of the job.  [default: that of the TPU]")
@click.option("--working-dir", default="", metavar="DIR", help="Uploaded, and where it is run.")
@click.option("--pip", multiple=True, metavar="REQUIREMENT", help="Installed for it.")
@click.option(
    "--setup-timeout",
    "setup_s",
    type=duration,
    default="10m",
    show_default=True,
    help="How long a host may take to install it and to unpack what is uploaded.",
)
@click.option("--env", multiple=True, metavar="KEY=VALUE", help="Variables for it.")
@click.option(
    "--checkpoint-dir",
    "directory",
    metavar="DIR",
    help="Where it writes: ranks of an attempt that is over are kept from it.",
)
@click.option("--autoresume", is_flag=True, help=f"Try again after lost hosts, {_MANY} times.")
@click.option("--preemptions", type=int, metavar="N", help="So often.  [default: 0]")
@click.option("--failures", type=int, default=0, show_default=True, metavar="N")
@click.option("--backoff", "backoff_s", type=seconds, default="1", metavar="SECONDS")
@click.option("--deadline", "deadline_s", type=duration, metavar="DURATION", help="2d, say.")
@click.option(
    "--join-timeout",
    "join_s",
    type=duration,
    default="150s",
    show_default=True,
    help="How long hosts may take to join; then the TPU is made anew.",
)
@click.option("--recreations", type=int, default=3, show_default=True, metavar="N")
@click.option(
    "--ready-timeout",
    "ready_s",
    type=duration,
    default="1h",
    show_default=True,
    help="How long the TPU and its hosts may take in all, for each attempt.",
)
@click.option("--delete", "delete_after", is_flag=True, help="Delete the TPU at the end.")
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("regrow-ray-logs"),
    show_default=True,
    help="Logs of ranks are kept here.",
)
@click.argument("words", nargs=-1, required=True, metavar="-- COMMAND")
@at_place
def job(
    client: CloudClient,
    place: Place,
    words: tuple[str, ...],
    tpu: str | None,
    address: str | None,
    name: str | None,
    delete_after: bool,
    startup_script: Path | None,
    join_s: float,
    recreations: int,
    ready_s: float,
    log_dir: Path,
    **values: Any,
) -> int:
    """Run a command on every host of a TPU, which is made if there is none.

    With --autoresume a TPU that is lost is made again, and the command begins again: it is to go
    on from its own checkpoints. The exit status is 0 if all ranks ended well, 1 if the job failed, 2 for
    wrong usage, 3 when hosts or the Ray cluster are not there in time.
    """
    from regrow.ray import JoinPolicy, RankJob, RayCluster, RayTpuController
    from regrow.ray.directories import require_writable
    from regrow.ray.head import head_address

    tpu = f"{getpass.getuser()}-tpu-ray" if tpu is None else tpu
    spec = _spec(tpu, values)
    policy = _policy(values)
    rank_job = RankJob(
        name=tpu if name is None else name,
        command=words,
        working_dir=values["working_dir"],
        pip=values["pip"],
        setup_s=values["setup_s"],
        env=parse_pairs("--env", values["env"]),
        directory=values["directory"],
    )
    script = _text_of(startup_script) if startup_script else ""
    rank_job.prepare()
    require_writable(log_dir, "logs")
    controller = RayTpuController(
        client,
        place,
        spec,
        RayCluster(head_address(address)),
        startup_script=script,
        policy=JoinPolicy(join_s=join_s, recreations=recreations),
        log_dir=log_dir,
        say=say,
    )

    def tell(rank: int, line: str) -> None:
        click.echo(f"[rank {rank}] {line}")

    try:
        with ended_by_sigterm():
            controller.run(rank_job, restarts=policy, tell=tell, ready_timeout_s=ready_s)
    except RayJobError as error:
        return complain(str(error), JOB_FAILED_STATUS)
    finally:
        if delete_after:
            controller.delete()
    return 0


def _text_of(script: Path) -> str:
    try:
        return script.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"--startup-script {script} is no text") from None


def _policy(values: dict[str, Any]) -> Any:
    from regrow.ray import RestartPolicy

    preemptions = values["preemptions"]
    if preemptions is None:
        preemptions = _MANY if values["autoresume"] else 0
    return RestartPolicy(
        preemptions=preemptions,
        failures=values["failures"],
        backoff_s=values["backoff_s"],
        deadline_s=math.inf if values["deadline_s"] is None else values["deadline_s"],
    )


def _spec(tpu: str, values: dict[str, Any]) -> Any:
    from regrow.ray import TpuSpec

    kind, topology = values["kind"], values["topology"]
    accelerator_type = values["accelerator_type"]
    if accelerator_type is None and kind is None and topology is None:
        kind, topology = "V4", "2x2x2"
    node = NodeRequest(
        runtime_version="",
        accelerator_type=accelerator_type,
        type=kind,
        topology=topology,
        spot=values["spot"],
        reserved=values["reserved"],
    )
    spec = TpuSpec(name=tpu, node=node, slices=values["slices"], queued=values["queued"])
    usual = spec.accelerator.generation.runtime_version
    node = dataclasses.replace(node, runtime_version=values["runtime_version"] or usual)
    return dataclasses.replace(spec, node=node)
