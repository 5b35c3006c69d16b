"""`regrow head`: a head that a manifest written for Pathways can start."""

from __future__ import annotations

from typing import Any

import click

from regrow.cli.options import cluster_options, tcp_options, to_cluster_options
from regrow.cli.report import say
from regrow.cli.up import supervise
from regrow.errors import UsageError
from regrow.suspend.storage import check_scheme, open_storage


@click.command("head")
@cluster_options
@tcp_options
@click.option(
    "--server_port",
    type=int,
    metavar="PORT",
    help="Listen for clients over TCP on every address of this machine.",
)
@click.option(
    "--worker_port",
    type=int,
    metavar="PORT",
    help="Take hosts from other machines (regrow worker) on this port; slices are local without.",
)
@click.option(
    "--resource_manager_address",
    metavar="HOST:PORT",
    help="Taken so that a Pathways manifest reads the same; slices are local.",
)
def command(
    name: str | None,
    start_timeout_s: float,
    server_port: int | None,
    resource_manager_address: str | None,
    **values: Any,
) -> int:
    """Run a head in the foreground, with the flags of Pathways' proxy server.

    The stock client of Pathways sends no token: on a closed network add --allow-no-token.
    """
    if server_port is not None:
        if values["port"] is not None:
            raise click.UsageError("--server_port and --port are two names for one thing")
        values |= {"port": server_port, "host": "0.0.0.0"}  # noqa: S104 - as Pathways does
    if resource_manager_address is not None and values["worker_port"] is None:
        say(
            f"--resource_manager_address {resource_manager_address} is not needed: slices are local"
        )
    scratch = values["gcs_scratch_location"]
    if scratch is not None:
        values |= _scratch(scratch)
    return supervise(to_cluster_options(values), name, start_timeout_s, purpose="regrow head")


def _scratch(location: str) -> dict[str, str | None]:
    """What a scratch location is good for: state, and in a directory compiled programs, too.

    A manifest may name a bucket that this machine cannot reach, which is no reason not to start.

    Raises:
        UsageError: There is no storage of such a kind.
    """
    check_scheme(location)
    if "://" not in location:
        return {"compile_cache_dir": location}
    try:
        open_storage(location)
    except UsageError as error:
        say(
            f"--gcs_scratch_location is not used, the state of suspended slices stays here: {error}"
        )
        return {"gcs_scratch_location": None}
    return {}
