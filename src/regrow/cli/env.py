"""`regrow env`: the variables of a client."""

from __future__ import annotations

import shlex
import sys

import click

from regrow.cli.options import cluster_choice
from regrow.errors import RegrowError
from regrow.home import Home
from regrow.start import client_environ


@click.command("env")
@cluster_choice
@click.option("--tcp", is_flag=True, help="For a client elsewhere, over TCP.")
def command(name: str | None, tcp: bool) -> None:
    """Print the `export` lines that make stock JAX a client of a cluster.

    Use it as: eval "$(regrow env)"
    """
    try:
        home = Home()
        variables = client_environ(home.find(name), home, tcp=tcp)
    except RegrowError:
        if not sys.stdout.isatty():
            # `eval` does not look at our exit status, only at that of what it evaluates.
            click.echo("false")
        raise
    for variable, value in variables.items():
        click.echo(f"export {variable}={shlex.quote(value)}")
