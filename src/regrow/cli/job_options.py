"""The options of `regrow run` for a job of a shared cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM
from typing import Any, Final, TypeVar, final

import click
from click.core import ParameterSource

from regrow.cli.options import seconds_or_never

_Function = TypeVar("_Function", bound=Callable[..., Any])
_WAIT_S: Final = 3600.0
# Well done, wrong usage, a budget that was broken; or whoever sent us a signal wants an end.
FINAL: Final = frozenset(
    {0, 2, 5, *(128 + int(signum) for signum in (SIGINT, SIGTERM, SIGHUP, SIGQUIT))}
)
"""Exit statuses after which a job is not run anew."""

_OPTIONS: Final = [
    click.option(
        "--cluster",
        metavar="ADDRESS|NAME",
        help="Lease the slices from this shared cluster (regrow up --spares N).",
    ),
    click.option("--priority", metavar="CLASS", help="Priority class of the job, with --cluster."),
    click.option(
        "--wait",
        "wait_s",
        type=seconds_or_never,
        metavar="SECONDS|never",
        help="How long the job waits for slices, with --cluster.  [default: 3600]",
    ),
    click.option(
        "--spare-snapshots",
        is_flag=True,
        help="Keep a replica of the latest snapshot for spares that take a place, with --cluster.",
    ),
]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """What a job asks of a shared cluster.

    Attributes:
        cluster: Its name, or the path of its socket.
        name: The job's name; None: any.
        slices: How many slices it wants.
        devices: Of each slice; None: as the cluster has them.
        hosts: Of each slice; None: as the cluster has them.
        elastic: How many of its slices may come and go; None: it runs on all or not at all.
        priority: Its priority class; None: the cluster's default.
        restart: Whether it is started anew when it fails or its slices are taken.
        max_restarts: How often after a failure of its own.
        wait_s: How long it waits for its slices; None: without end.
        spare_snapshots: Whether a replica of its latest snapshot is kept for spares.
    """

    cluster: str
    name: str | None
    slices: int
    devices: int | None
    hosts: int | None
    elastic: int | None
    priority: str | None
    restart: str
    max_restarts: int
    wait_s: float | None
    spare_snapshots: bool

    @property
    def least(self) -> int:
        """The fewest slices that it can run on."""
        return max(1, self.slices - (self.elastic or 0))

    def spec(self, name: str, shape: dict[str, Any]) -> dict[str, Any]:
        """What the manager is told."""
        least = self.least if self.elastic else None
        spec = {
            "name": name,
            "slices": self.slices,
            "shape": shape,
            "min_slices": least,
            # Its head refuses when it comes to it and cannot.
            "suspendable": True,
            "restart": self.restart,
            "max_restarts": self.max_restarts,
        }
        return spec if self.priority is None else spec | {"priority_class": self.priority}


_SHARED_ONLY: Final = ("priority", "wait_s", "spare_snapshots")
_OWN_ONLY: Final = ("restore_after_s",)


def job_options(function: _Function) -> _Function:
    """Adds them."""
    decorated: Any = function
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    wrapped: _Function = decorated
    return wrapped


def take_job_options(
    context: click.Context, values: dict[str, Any], restart: str, max_restarts: int
) -> JobOptions | None:
    """Takes them out of a command's values; None: the cluster is the command's own.

    Raises:
        click.UsageError: If some do not go together.
    """

    def given(name: str) -> bool:
        return context.get_parameter_source(name) is ParameterSource.COMMANDLINE

    def flag(name: str) -> str:
        return next(one.opts[0] for one in context.command.params if one.name == name)

    cluster = values.pop("cluster")
    asked = {name: values.pop(name) for name in _SHARED_ONLY}
    wrong = _SHARED_ONLY if cluster is None else _OWN_ONLY
    for name in filter(given, wrong):
        other = "without" if cluster is None else "with"
        raise click.UsageError(f"{flag(name)} means nothing {other} --cluster", context)
    if cluster is None:
        return None
    return JobOptions(
        cluster=cluster,
        name=values.pop("name"),
        slices=values["slices"],
        devices=values["devices_per_slice"] if given("devices_per_slice") else None,
        hosts=values["hosts_per_slice"] if given("hosts_per_slice") else None,
        elastic=values["num_elastic_instances"],
        priority=asked["priority"],
        restart=restart,
        max_restarts=max_restarts,
        wait_s=asked["wait_s"] if given("wait_s") else _WAIT_S,
        spare_snapshots=asked["spare_snapshots"],
    )
