"""`regrow worker`: a host that joins a head on another machine."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Final

import click

from regrow.cli.options import seconds
from regrow.cli.report import say
from regrow.errors import ChannelError, ClusterError, UsageError
from regrow.scratch import scratch

_JOIN_S: Final = 600.0


@click.command("worker")
@click.option(
    "--resource_manager_address",
    required=True,
    metavar="HOST:PORT",
    help="Where the head listens for hosts (regrow head --worker_port PORT).",
)
@click.option(
    "--slice",
    "slice_index",
    type=click.IntRange(min=0),
    envvar="JAX_PARTITION_INDEX",
    default=0,
    metavar="I",
    help="Its slice.  [default: JAX_PARTITION_INDEX, or 0]",
)
@click.option(
    "--host",
    "host_index",
    type=click.IntRange(min=0),
    envvar="HOST_INDEX",
    default=0,
    metavar="I",
    help="Its place in the slice.  [default: HOST_INDEX, or 0]",
)
@click.option(
    "--token",
    envvar="REGROW_TOKEN",
    metavar="TOKEN",
    help="That of the head.  [default: REGROW_TOKEN, or none]",
)
@click.option(
    "--join-timeout",
    "wait_s",
    type=seconds,
    default=str(_JOIN_S),
    metavar="SECONDS",
    help=f"How long to try to reach the head.  [default: {_JOIN_S:g}]",
)
@click.option(
    "--log-dir",
    metavar="DIR",
    type=click.Path(file_okay=False, resolve_path=True, path_type=Path),
    help="Keep the logs of its processes here.",
)
@click.option(
    "--server_port",
    type=int,
    metavar="PORT",
    help="Taken so that a Pathways manifest reads the same: it is the host that connects.",
)
@click.option(
    "--gcs_scratch_location",
    metavar="URL",
    help="Taken so that a Pathways manifest reads the same: the head tells its hosts.",
)
def command(
    resource_manager_address: str,
    slice_index: int,
    host_index: int,
    token: str | None,
    wait_s: float,
    log_dir: Path | None,
    server_port: int | None,
    gcs_scratch_location: str | None,
) -> int:
    """Be a host of a slice, for a head on another machine.

    It joins the head, starts a worker when that asks for one, and joins the next head when that is
    gone. It ends on Ctrl-C, and on SIGTERM when its worker has left, whose state the head may save first.
    """
    from regrow.launchers.joined import worker_secret
    from regrow.launchers.joiner import Joiner, JoinOptions

    options = JoinOptions(
        head=_address(resource_manager_address),
        secret=worker_secret(token),
        slice_index=slice_index,
        host_index=host_index,
        wait_s=wait_s,
    )
    with contextlib.ExitStack() as stack:
        if log_dir is None:
            log_dir = stack.enter_context(scratch("worker"))
        directory = log_dir

        async def run() -> int:
            return await Joiner(options, directory, say).run()

        try:
            return asyncio.run(run())
        except ChannelError as error:
            raise ClusterError(f"{resource_manager_address}: {error}") from None


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"{text!r} is no HOST:PORT of a head")
    return host.strip("[]"), int(port)
