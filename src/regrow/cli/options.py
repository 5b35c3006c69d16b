"""Options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from regrow.cli.ray_options import LAUNCHER_OPTIONS, to_ray_config
from regrow.cli.tpu_slices import queued_resource_option, take_tpu
from regrow.cluster import START_DEADLINE_S
from regrow.config import DEFAULT_HOST, ClusterOptions

_Function = TypeVar("_Function", bound=Callable[..., Any])

DEFAULT_RESTORE_AFTER_S: Final = 1.0


def seconds(value: object) -> float:
    """Parses a number of seconds."""
    try:
        parsed = float(str(value).removesuffix("s"))
    except ValueError:
        parsed = math.nan
    if math.isnan(parsed):
        raise click.BadParameter(f"{value!r} is no number of seconds")
    return parsed


def some_seconds(value: object) -> float:
    """Parses a number of seconds above 0."""
    parsed = seconds(value)
    if not 0 < parsed < math.inf:
        raise click.BadParameter(f"{value!r} must be more than 0 seconds")
    return parsed


def seconds_or_never(value: object) -> float | None:
    """Parses a number of seconds, or "never" (None)."""
    if value is None or value == "never":
        return None
    try:
        return seconds(value)
    except click.BadParameter as error:
        raise click.BadParameter(f"{error.message}, nor 'never'") from None


_OPTIONS: Final = [
    click.option("--slices", type=int, default=2, show_default=True, help="Number of slices."),
    click.option(
        "--devices-per-slice", type=int, default=2, show_default=True, help="Devices of each slice."
    ),
    click.option(
        "--hosts-per-slice",
        type=int,
        default=1,
        show_default=True,
        help="Host processes of each slice.",
    ),
    click.option(
        "--restore-after",
        "restore_after_s",
        type=seconds_or_never,
        default=str(DEFAULT_RESTORE_AFTER_S),
        metavar="SECONDS|never",
        help="When a lost slice is relaunched.  [default: 1]",
    ),
    click.option(
        "--num_elastic_instances",
        "--num-elastic-instances",
        "num_elastic_instances",
        type=int,
        metavar="N",
        help="How many slices may come and go; the loss of more ends the job.  [default: all]",
    ),
    click.option(
        "--gcs_scratch_location",
        "--gcs-scratch-location",
        "gcs_scratch_location",
        metavar="URL",
        help="Where the state of suspended slices goes: a path, or what fsspec knows (gs://, s3://).  "
        "[default: in REGROW_HOME]",
    ),
    click.option(
        "--grace",
        "grace_s",
        type=seconds,
        default="30",
        metavar="SECONDS",
        help="How long a host has after a SIGTERM until it is ended.  [default: 30]",
    ),
    click.option(
        "--resume-after",
        "resume_after_s",
        type=seconds_or_never,
        default=str(DEFAULT_RESTORE_AFTER_S),
        metavar="SECONDS|never",
        help="When a slice that a SIGTERM suspended is rescheduled.  [default: 1]",
    ),
    click.option("--name", metavar="NAME", help="Name of the cluster in REGROW_HOME."),
    click.option(
        "--hang-after",
        "hang_after_s",
        type=seconds,
        default="5",
        metavar="SECONDS",
        help="A host that is silent for so long is lost.  [default: 5]",
    ),
    click.option(
        "--reconnect",
        "reconnect_s",
        type=seconds,
        default="3",
        metavar="SECONDS",
        help="A break of a host's connection shorter than this is no loss.  [default: 3]",
    ),
    click.option(
        "--no-colocated-python",
        "allow_colocated_python",
        flag_value=False,
        default=True,
        help="Refuse to run the client's own Python (colocated_python) on the hosts.",
    ),
    click.option(
        "--start-timeout",
        "start_timeout_s",
        type=some_seconds,
        default=str(START_DEADLINE_S),
        metavar="SECONDS",
        help=f"How long the slices may take to be up.  [default: {START_DEADLINE_S:g}]",
    ),
    click.option(
        "--log-dir",
        metavar="DIR",
        type=click.Path(file_okay=False, resolve_path=True),
        help="Keep the logs of the cluster's processes here.",
    ),
    click.option(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help="Serve metrics for Prometheus on this port of 127.0.0.1; 0: any.",
    ),
    click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        help="How much the head logs.  [default: info]",
    ),
]

_TCP_OPTIONS: Final = [
    click.option("--port", type=int, metavar="PORT", help="Listen for clients over TCP; 0: any."),
    click.option(
        "--host",
        default=DEFAULT_HOST,
        show_default=True,
        metavar="ADDRESS",
        help="Address to listen on with --port.",
    ),
    click.option(
        "--token",
        envvar="REGROW_TOKEN",
        metavar="TOKEN",
        help="What clients over TCP must present.  [default: a random one]",
    ),
    click.option(
        "--allow-no-token",
        is_flag=True,
        help="Let everyone in who reaches the port (for a closed network).",
    ),
]


_RUN_OPTIONS: Final = [
    click.option(
        "--budget",
        metavar="NAME=TIME,...",
        help="How long an elastic event may take, such as recover=2s; a breach is exit status 5.",
    ),
    click.option(
        "--timeline",
        type=click.Path(dir_okay=False, path_type=Path, resolve_path=True),
        metavar="FILE",
        help="Write elastic events and goodput to a .json or .png file at the end.",
    ),
    click.option("-v", "--verbose", is_flag=True, help="Say more about what happens."),
]


def cluster_options(function: _Function) -> _Function:
    """Adds the options that say what a cluster is to be like."""
    return _add([*_OPTIONS, queued_resource_option, *LAUNCHER_OPTIONS], function)


def tcp_options(function: _Function) -> _Function:
    """Adds the options for clients over TCP."""
    return _add(_TCP_OPTIONS, function)


def run_options(function: _Function) -> _Function:
    """Adds the options of commands that run a script."""
    return _add(_RUN_OPTIONS, function)


def cluster_choice(function: _Function) -> _Function:
    """Adds `--cluster NAME`."""
    option = click.option(
        "--cluster",
        "name",
        metavar="NAME",
        help="Which cluster.  [default: REGROW_CLUSTER, or the only one]",
    )
    return option(function)


def to_cluster_options(values: dict[str, Any]) -> ClusterOptions:
    """Takes what says how a cluster is to be out of a command's values."""
    take_tpu(values)
    fields = ClusterOptions.__dataclass_fields__
    options = {name: value for name, value in values.items() if name in fields}
    names = ("launcher", "address", "resources", "ray_strategy", "other_machines", "ray_spares")
    return ClusterOptions(**options, ray=to_ray_config(*(values[name] for name in names)))


def _add(options: Sequence[Callable[[Any], Any]], function: _Function) -> _Function:
    decorated: Any = function
    for option in reversed(options):
        decorated = option(decorated)
    wrapped: _Function = decorated
    return wrapped
