"""`regrow config`: project and zone for commands that are given none."""

from __future__ import annotations

import click

from regrow.cli.report import say
from regrow.cloud.defaults import Defaults, property_name
from regrow.errors import UsageError


@click.group("config")
def command() -> None:
    """Project and zone that queued-resources and tpu-vm take when they are given none."""


@command.command("set")
@click.argument("name", metavar="project|zone")
@click.argument("value")
def set_(name: str, value: str) -> None:
    """Set a property; core/project and compute/zone are other names for them."""
    if not value:
        raise UsageError(f"{name} cannot be empty; unset it with: regrow config unset {name}")
    Defaults().set(property_name(name), value)
    say(f"updated property [{property_name(name)}]")


@command.command("get")
@click.argument("name", metavar="project|zone")
def get(name: str) -> int:
    """Print a property; exit status 1 if it is not set."""
    value = Defaults().all().get(property_name(name))
    if value is None:
        say(f"{property_name(name)} is not set")
        return 1
    click.echo(value)
    return 0


@command.command("unset")
@click.argument("name", metavar="project|zone")
def unset(name: str) -> None:
    """Forget a property."""
    Defaults().set(property_name(name), None)
    say(f"unset property [{property_name(name)}]")


@command.command("list")
def list_() -> None:
    """Print all properties that are set."""
    for name, value in Defaults().all().items():
        click.echo(f"{name} = {value}")
