"""`--queued-resource`: a cluster whose slices are those of queued resources of the local Cloud TPU."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import click

from regrow.config import TpuConfig
from regrow.errors import UsageError

if TYPE_CHECKING:
    from regrow.cloud.accelerators import Accelerator

_SIZES: Final = ("slices", "devices_per_slice", "hosts_per_slice")

queued_resource_option: Final = click.option(
    "--queued-resource",
    "queued_resources",
    multiple=True,
    metavar="NAME",
    help="Take the slices of this queued resource of the local Cloud TPU; may be given again.",
)


def take_tpu(values: dict[str, Any]) -> None:
    """Turns the names of queued resources among a command's values into what a cluster is made of.

    Their number of slices, and the hosts and devices of each, become those of the cluster.

    Raises:
        UsageError: If they are of several shapes, or sizes are given as well.
        CloudApiError: If there is no such queued resource.
    """
    names: tuple[str, ...] = values.pop("queued_resources", ())
    if not names:
        return
    context = click.get_current_context()
    for size in _SIZES:
        if context.get_parameter_source(size) is click.core.ParameterSource.COMMANDLINE:
            flag = f"--{size.replace('_', '-')}"
            raise UsageError(f"{flag}: the queued resources tell how many there are")
    config, accelerator = _looked_up(names)
    values["tpu"] = config
    values["slices"] = sum(slices for _, slices in config.queued)
    values["hosts_per_slice"] = accelerator.hosts
    values["devices_per_slice"] = accelerator.hosts * accelerator.devices_per_host


def _looked_up(names: tuple[str, ...]) -> tuple[TpuConfig, Accelerator]:
    from regrow.cloud.accelerators import ACCELERATORS
    from regrow.cloud.defaults import Defaults
    from regrow.cloud.local import connect
    from regrow.cloud.names import Place

    defaults = Defaults()
    place = Place(defaults.require("project", None), defaults.require("zone", None))
    shapes, queued = set(), []
    with contextlib.closing(connect()) as client:
        for name in names:
            specs = client.queued(place, name)["tpu"]["nodeSpec"]
            queued.append((name, len(specs)))
            shapes.add(str(specs[0]["node"].get("acceleratorType")))
        endpoint = client.endpoint
    if len(shapes) != 1 or not shapes <= set(ACCELERATORS):
        raise UsageError(
            f"slices of one known shape are needed, not of {', '.join(sorted(shapes))}"
        )
    return TpuConfig(endpoint, place.project, place.zone, queued), ACCELERATORS[shapes.pop()]
