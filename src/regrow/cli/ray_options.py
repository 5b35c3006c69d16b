"""What commands that use a Ray cluster share."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from regrow.config import RayConfig, RayStrategy
from regrow.errors import UsageError

_Function = TypeVar("_Function", bound=Callable[..., Any])
_STRATEGIES: Final = ("STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK")


def address_option(function: _Function) -> _Function:
    """`--address`."""
    option = click.option(
        "--address",
        metavar="HOST:PORT",
        help="Head of the Ray cluster.  [default: RAY_ADDRESS, or that of regrow ray head up]",
    )
    return option(function)


def parse_resources(text: str) -> dict[str, float]:
    """Resources of Ray, as JSON: {"TPU": 4}.

    Raises:
        UsageError: If they are none.
    """
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise UsageError(f"--resources {text}: give JSON such as '{{\"TPU\": 4}}'")
    return values


def to_ray_config(
    launcher: str,
    address: str | None,
    resources: str | None,
    strategy: RayStrategy,
    other_machines: bool,
    spares: int,
) -> RayConfig | None:
    """Where slices come from; None: this machine.

    Raises:
        UsageError: If the flags do not go together.
        NoClusterError: If no Ray head answers.
    """
    if launcher != "ray":
        given = {
            "--address": address,
            "--resources": resources,
            "--other-machines": other_machines or None,
            "--ray-spares": spares or None,
        }
        wrong = [flag for flag, value in given.items() if value is not None]
        if wrong:
            raise UsageError(f"{' and '.join(wrong)} need --launcher ray")
        return None
    from regrow.ray.cluster import require_ray
    from regrow.ray.head import head_address
    from regrow.ray.knock import knock

    require_ray()
    config = RayConfig(
        head_address(address),
        parse_resources(resources or '{"CPU": 1}'),
        strategy,
        other_machines,
        spares,
    )
    knock(config.address)
    return config


LAUNCHER_OPTIONS: Final[list[Callable[[Any], Any]]] = [
    click.option(
        "--launcher",
        type=click.Choice(["local", "ray"]),
        default="local",
        show_default=True,
        help="Where slices come from: this machine, or a Ray cluster.",
    ),
    address_option,
    click.option(
        "--resources",
        metavar="JSON",
        help="What a host needs of a node of the Ray cluster, "
        '\'{"TPU": 4}\' say.  [default: {"CPU": 1}]',
    ),
    click.option(
        "--ray-strategy",
        type=click.Choice(_STRATEGIES),
        default=_STRATEGIES[0],
        show_default=True,
        help="How the hosts of a slice are laid out over nodes.",
    ),
    click.option(
        "--other-machines",
        is_flag=True,
        help="Nodes may be other machines: hosts reach the head over TCP, and share no memory.",
    ),
    click.option(
        "--ray-spares",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        metavar="N",
        help="Hold places for so many more slices, with warm hosts, for those that are lost.",
    ),
]
"""The flags that say where slices come from (`to_ray_config`)."""
