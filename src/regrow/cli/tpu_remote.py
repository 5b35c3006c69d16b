"""`ssh` and `scp` of `regrow queued-resources` and `regrow tpu-vm`."""

from __future__ import annotations

import getpass
import select
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import click

from regrow.cli.report import count, say
from regrow.cli.tpu_options import at_place, ended_by_sigterm
from regrow.cloud.names import Place
from regrow.errors import CloudApiError, Code, UsageError

if TYPE_CHECKING:
    from regrow.cloud.client import CloudClient
    from regrow.cloud.remote.fanout import Launch, Result
    from regrow.cloud.remote.sessions import LocalShell, SshShell
    from regrow.cloud.remote.targets import Host

_MANY: Final = 100


def add_remote_commands(
    group: click.Group, metavar: str, *, batch_size: str, of_queued: bool
) -> None:
    """Adds ssh and scp to a group.

    Args:
        group: It.
        metavar: What its resources are called.
        batch_size: On how many hosts at once, by default.
        of_queued: Whether its resources are queued ones.
    """

    @group.command("ssh")
    @click.argument("resource", metavar=f"[USER@]{metavar}")
    @click.option("--command", "command", default="", help="What to run.  [default: a shell]")
    @_choice_options(batch_size)
    @click.option(
        "--output-directory",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="Keep the output of each host here: NODE-worker-W.log.",
    )
    @click.option("--background", is_flag=True, help="Leave the command behind on the hosts.")
    @click.option(
        "--independent", is_flag=True, help="The hosts do not wait for each other: no refusal."
    )
    @click.option("--ssh-flag", "flags", multiple=True, metavar="FLAG", help="A flag for ssh.")
    @click.argument("ssh_args", nargs=-1)
    @at_place
    def ssh(resource: str, ssh_args: tuple[str, ...], **values: Any) -> int:
        """Run a command on hosts of slices, or a shell on one.

        Lines are marked by slice and worker. When a host of a batch fails, the batch goes on to its
        end and no further one begins; the exit status is the first that is not 0.
        """
        user, _, name = resource.rpartition("@")
        values["flags"] += ssh_args
        return _ssh(user, name, of_queued=of_queued, **values)

    @group.command("scp")
    @click.argument("sources", nargs=-1, required=True, metavar=f"[[USER@]{metavar}:]SOURCE…")
    @click.argument("target", metavar=f"[[USER@]{metavar}:]TARGET")
    @_choice_options(batch_size)
    @click.option("--recurse", is_flag=True, help="Directories, too.")
    @click.option("--compress", is_flag=True, help="On the way.")
    @click.option("--scp-flag", "flags", multiple=True, metavar="FLAG", help="A flag for scp.")
    @at_place
    def scp(sources: tuple[str, ...], target: str, **values: Any) -> int:
        """Copy files to hosts of slices, or from one of them."""
        return _scp(sources, target, of_queued=of_queued, **values)


def _choice_options(batch_size: str) -> Callable[[Any], Any]:
    options = [
        click.option("--node", "nodes", default="0", show_default=True, help="Which slices."),
        click.option(
            "--worker",
            "workers",
            default="0",
            show_default=True,
            help="Which hosts of each: 0, 1,4,6, 1-3 or all.",
        ),
        click.option(
            "--batch-size",
            default=batch_size,
            show_default=True,
            metavar="N|all",
            help="Hosts at once.",
        ),
        click.option("--dry-run", is_flag=True, help="Only print what would be run."),
    ]

    def add(function: Any) -> Any:
        function = ssh_options(function)
        for option in reversed(options):
            function = option(function)
        return function

    return add


def ssh_options(function: Any) -> Any:
    """Adds the flags that say how real hosts are reached."""
    options = [
        click.option("--internal-ip", "internal", is_flag=True, help="Reach hosts from inside."),
        click.option(
            "--ssh-key-file", "key_file", default="~/.ssh/google_compute_engine", show_default=True
        ),
        click.option(
            "--strict-host-key-checking",
            type=click.Choice(["yes", "no", "ask", "accept-new"]),
            default="accept-new",
            show_default=True,
        ),
        click.option(
            "--plain", is_flag=True, help="Do not add the public key to the hosts' metadata."
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def shell_of(client: CloudClient, user: str, values: dict[str, Any]) -> LocalShell | SshShell:
    """Takes the settings of ssh out of a command's values; local hosts need none."""
    from regrow.cloud.remote.sessions import LocalShell, SshShell

    names = ("internal", "key_file", "strict_host_key_checking")
    settings = {name: values.pop(name) for name in names}
    if urlsplit(client.endpoint).scheme == "https":
        return SshShell(user or getpass.getuser(), **settings)
    return LocalShell()


def let_in(
    client: CloudClient, place: Place, hosts: Sequence[Host], shell: LocalShell | SshShell
) -> None:
    """Has real hosts know the caller's key."""
    from regrow.cloud.remote.keys import propagate, public_key
    from regrow.cloud.remote.sessions import SshShell

    if isinstance(shell, SshShell):
        nodes = sorted({host.node for host in hosts})
        changed = propagate(client, place, nodes, shell.user, public_key(shell.key_file))
        if changed:
            say(f"public key given to {', '.join(changed)}; hosts may take a moment to see it")


def _hosts(
    client: CloudClient, place: Place, name: str, nodes: str, workers: str, *, of_queued: bool
) -> list[Host]:
    """The chosen hosts; the name of a queued resource is taken for that of a slice as well."""
    from regrow.cloud.remote.targets import chosen, hosts_of_node, hosts_of_queued

    if not of_queued:
        try:
            node = client.node(place, name)
        except CloudApiError as error:
            if error.code is not Code.NOT_FOUND or not _is_queued(client, place, name):
                raise
        else:
            chosen("--node", nodes, 1)
            return hosts_of_node(node, name, 0, workers)
    return hosts_of_queued(client, place, name, nodes, workers)


def _is_queued(client: CloudClient, place: Place, name: str) -> bool:
    try:
        client.queued(place, name)
    except CloudApiError as error:
        if error.code is Code.NOT_FOUND:
            return False
        raise
    return True


def _batch(text: str, hosts: int) -> int:
    if text == "all":
        if hosts > _MANY:
            say(f"{hosts} connections at once may be too many for this machine: see --batch-size")
        return hosts
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"--batch-size={text}: give a number of hosts, or all")
    return min(int(text), hosts)


def _ssh(
    user: str,
    name: str,
    *,
    of_queued: bool,
    client: CloudClient,
    place: Place,
    command: str,
    nodes: str,
    workers: str,
    batch_size: str,
    output_directory: Path | None,
    background: bool,
    independent: bool,
    flags: tuple[str, ...],
    dry_run: bool,
    plain: bool,
    **values: Any,
) -> int:
    from regrow.cloud.remote.commands import in_background
    from regrow.cloud.remote.sessions import SshShell

    shell = shell_of(client, user, values)
    if isinstance(shell, SshShell):
        shell = SshShell(
            shell.user, shell.internal, shell.key_file, flags, shell.strict_host_key_checking
        )
    hosts = _hosts(client, place, name, nodes, workers, of_queued=of_queued)
    batch = _batch(batch_size, len(hosts))
    if not command and (len(hosts) > 1 or background):
        raise UsageError("give a --command: a shell is for one host, and for you")
    if background:
        command = in_background(command)
    elif batch < len(hosts) and not independent:
        _refuse_deadlock(command, batch, len(hosts))
    if dry_run:
        for host in hosts:
            click.echo(shell.describe(host, command))
        return 0
    if not plain:
        let_in(client, place, hosts, shell)
    if len(hosts) == 1 and output_directory is None:
        return _attached(shell, hosts[0], command)
    return _everywhere(
        hosts, lambda host, streams: shell.start(host, command, streams), batch, output_directory
    )


def _refuse_deadlock(command: str, batch: int, hosts: int) -> None:
    """A program that waits for all ranks never ends where some of them only begin after its end."""
    from regrow.cloud.remote.commands import may_wait_for_others

    if may_wait_for_others(command):
        raise UsageError(
            f"a batch of {batch} of {hosts} hosts would wait for ever if the command waits for the "
            "other hosts, as distributed training does: leave it behind on each with --background, "
            "or give --batch-size=all, or --independent if the hosts do not wait for each other"
        )


def _attached(shell: LocalShell | SshShell, host: Host, command: str) -> int:
    """Runs a command, or a shell, on one host with our own input and output."""
    from regrow.cloud.remote.sessions import LOST_STATUS, SshShell

    if isinstance(shell, SshShell):
        return subprocess.run(shell.argv(host, command), check=False).returncode % 256
    session = shell.start(host, command, [0, 1, 2])
    try:
        with ended_by_sigterm():
            select.select([session], [], [])
    except BaseException:
        session.end()
        raise
    status = session.finish()
    return LOST_STATUS if status is None else status


def _everywhere(hosts: Sequence[Host], launch: Launch, batch: int, directory: Path | None) -> int:
    from regrow.cloud.remote.fanout import Printer, exit_status, run_everywhere

    streams = (sys.stdout.buffer, sys.stderr.buffer)
    printer = Printer(streams, marked=len(hosts) > 1, directory=directory)
    with ended_by_sigterm(), printer.opened(hosts) as tell:
        results = run_everywhere(hosts, launch, batch, tell)
    if len(hosts) > 1:
        _print_summary(results)
    for one in results:
        if one.trouble:
            say(one.trouble)
    left = sum(one.status is None for one in results)
    if left:
        say(f"{count(left, 'host')} not started, because a batch before has failed")
    return exit_status(results)


def _print_summary(results: Sequence[Result]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("slice", "worker", "node", "address", "status", "seconds"):
        table.add_column(title)
    for one in results:
        host = one.host
        status = "not started" if one.status is None else str(one.status)
        table.add_row(
            str(host.slice_index),
            str(host.worker),
            host.node,
            host.external or host.address,
            status,
            f"{one.duration_s:.1f}",
            style="red" if one.status else "",
        )
    Console(stderr=True, highlight=False).print(table)


def _scp(
    sources: tuple[str, ...],
    target: str,
    *,
    of_queued: bool,
    client: CloudClient,
    place: Place,
    nodes: str,
    workers: str,
    batch_size: str,
    recurse: bool,
    compress: bool,
    flags: tuple[str, ...],
    dry_run: bool,
    plain: bool,
    **values: Any,
) -> int:
    from regrow.cloud.remote.copying import RemotePath, Transfer

    ends = tuple(RemotePath.of(text) for text in sources)
    transfer = Transfer(ends, RemotePath.of(target), recurse, compress, flags)
    remote = transfer.remote
    shell = shell_of(client, remote.user, values)
    hosts = _hosts(client, place, remote.name, nodes, workers, of_queued=of_queued)
    if transfer.is_download and len(hosts) > 1:
        raise UsageError("files are copied from one host: choose it with --node and --worker")
    if dry_run:
        for host in hosts:
            click.echo(transfer.describe(shell, host))
        return 0
    if not plain:
        let_in(client, place, hosts, shell)
    batch = _batch(batch_size, len(hosts))
    return _everywhere(
        hosts, lambda host, streams: transfer.start(shell, host, streams), batch, None
    )
