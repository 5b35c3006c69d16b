"""`regrow ray coordinator`: a VM that is the head of a Ray cluster, made with gcloud."""

from __future__ import annotations

import functools
import getpass
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import click

from regrow.cli.report import say
from regrow.cli.tpu_options import duration
from regrow.cloud.defaults import Defaults
from regrow.errors import ClusterStartError, UnsupportedError, UsageError, WaitTimeout
from regrow.ray.coordinator import ACCOUNT, Command, Coordinator, ended_with, shown

_POLL_S: Final = 15.0
_SSH_S: Final = 60.0


@click.group("coordinator")
def coordinator() -> None:
    """A coordinator VM, with gcloud; --dry-run only prints its commands."""


def _of_vm(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def command(name: str | None, project: str | None, zone: str | None, **values: Any) -> Any:
        defaults = Defaults().all()
        vm = Coordinator(
            name=name or f"{getpass.getuser()}-admin",
            project=project or defaults.get("project", ""),
            zone=zone or defaults.get("zone", ""),
            account=values.pop("service_account", None) or "",
        )
        return function(vm=vm, **values)

    decorated: Any = command
    for option in (
        click.option("--dry-run", is_flag=True, help="Only print the commands."),
        click.option("--zone", metavar="ZONE", help="[default: regrow config, or gcloud's]"),
        click.option("--project", metavar="ID", help="[default: regrow config, or gcloud's]"),
        click.option("--name", metavar="VM", help="[default: $USER-admin]"),
    ):
        decorated = option(decorated)
    wrapped: Callable[..., Any] = decorated
    return wrapped


def _run(commands: Sequence[Command], *, dry_run: bool) -> None:
    for words in commands:
        if dry_run:
            click.echo(shown(words))
            continue
        _require_gcloud()
        status = subprocess.run(words, check=False).returncode
        if status != 0:
            raise ClusterStartError(f"{' '.join(words[:4])} failed: exit status {status}")


def _require_gcloud() -> None:
    if shutil.which("gcloud") is None:
        raise UnsupportedError("gcloud is not installed; --dry-run prints what would be run")


@coordinator.command("service-account")
@click.option("--account", default=ACCOUNT, show_default=True, metavar="NAME")
@_of_vm
def service_account(vm: Coordinator, account: str, dry_run: bool) -> None:
    """Make a service account that may manage TPUs; needed once for a project."""
    if not vm.project:
        raise UsageError("no project: give --project")
    _run(vm.make_account(account, vm.project), dry_run=dry_run)


@coordinator.command("create")
@click.option("--service-account", metavar="EMAIL", help="Whose rights it has.")
@click.option("--ray-version", metavar="VERSION", help="[default: that of this machine]")
@click.option("--timeout", "timeout_s", type=duration, default="15m", show_default=True)
@_of_vm
def create(vm: Coordinator, ray_version: str | None, timeout_s: float, dry_run: bool) -> None:
    """Make the VM and wait until its startup script has ended."""
    from regrow.ray.cluster import require_ray

    _run([vm.create(ray_version or require_ray())], dry_run=dry_run)
    if dry_run:
        click.echo(shown(vm.script_status()))
        click.echo(shown(vm.connect()))
        return
    _wait_for_script(vm, timeout_s)
    say(f"{vm.name} is ready; connect with: {shown(vm.connect())}")


def _wait_for_script(vm: Coordinator, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            told = subprocess.run(
                vm.script_status(), capture_output=True, text=True, timeout=_SSH_S, check=False
            )
        except subprocess.TimeoutExpired:
            continue
        status = ended_with(told.stdout)
        if status == 0:
            return
        if status is not None:
            raise ClusterStartError(f"the startup script of {vm.name} failed: exit status {status}")
        say(f"Waiting for the startup script of {vm.name}...")
        time.sleep(_POLL_S)
    raise WaitTimeout(f"the startup script of {vm.name} to end", timeout_s)


@coordinator.command("deploy")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE…")
@_of_vm
def deploy(vm: Coordinator, sources: tuple[str, ...], dry_run: bool) -> None:
    """Copy files and directories to the VM's home directory."""
    missing = [source for source in sources if not Path(source).exists()]
    if missing:
        raise UsageError(f"there is no {missing[0]} to copy")
    _run([vm.deploy(sources)], dry_run=dry_run)
