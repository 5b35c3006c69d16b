"""`regrow queued-resources`: requests for slices, as `gcloud compute tpus queued-resources` has them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import click

from regrow.cli.report import count, say
from regrow.cli.tables import Column, filtered, print_list, print_one
from regrow.cli.tpu_options import (
    async_option,
    at_place,
    at_places,
    confirm,
    duration,
    ended_by_sigterm,
    filter_option,
    finish,
    format_option,
    node_options,
    quiet_option,
    take_node,
    timeout_option,
)
from regrow.cli.tpu_remote import add_remote_commands
from regrow.cloud.bodies import QueuedRequest
from regrow.cloud.names import Place, base
from regrow.errors import CloudApiError, Code, RegrowError, WaitTimeout

if TYPE_CHECKING:
    from regrow.cloud.client import CloudClient
    from regrow.cloud.waiting import Progress

_SIMULATED: Final = "Simulated:"


@click.group("queued-resources")
def command() -> None:
    """Requests for slices that wait until they can be served whole."""


def _specs(queued: dict[str, Any]) -> list[dict[str, Any]]:
    specs: list[dict[str, Any]] = queued.get("tpu", {}).get("nodeSpec", [])
    return specs


def _node(queued: dict[str, Any]) -> dict[str, Any]:
    return next((dict(spec.get("node", {})) for spec in _specs(queued)), {})


def _accelerator(queued: dict[str, Any]) -> object:
    node = _node(queued)
    config = node.get("acceleratorConfig", {})
    return node.get("acceleratorType") or f"{config.get('type')} {config.get('topology')}"


def _state(queued: dict[str, Any]) -> object:
    return queued.get("state", {}).get("state")


_COLUMNS: Final[list[Column]] = [
    ("NAME", lambda one: base(one["name"])),
    ("ZONE", lambda one: Place.of(one["name"]).zone),
    ("NODE_COUNT", lambda one: len(_specs(one))),
    ("ACCELERATOR_TYPE", _accelerator),
    ("STATE", _state),
]


@command.command("create")
@click.argument("name", metavar="QUEUED_RESOURCE")
@click.option("--runtime-version", required=True, metavar="VERSION", help="Software of a slice.")
@node_options
@click.option("--node-id", metavar="ID", help="Of the only slice.")
@click.option("--node-count", type=int, metavar="N", help="Number of slices.")
@click.option("--node-prefix", metavar="PREFIX", help="Of their ids.  [default: the name]")
@click.option("--spot", is_flag=True, help="Slices that may be preempted.")
@click.option("--reserved", is_flag=True, help="Slices of a reservation.")
@click.option("--reservation", metavar="ID", help="Which.  [default: any]")
@click.option("--reservation-host-project", metavar="ID", help="Whose reservation; a project's.")
@click.option("--reservation-host-folder", metavar="ID", help="A folder's.")
@click.option("--reservation-host-organization", metavar="ID", help="An organization's.")
@click.option("--guaranteed", is_flag=True)
@click.option("--best-effort", is_flag=True, help="v2alpha1: slices that go before all others.")
@click.option(
    "--provisioning-model",
    type=click.Choice(["standard", "spot", "reservation-bound", "flex-start"]),
    help="v2alpha1.",
)
@click.option("--max-run-duration", metavar="DURATION", help="v2alpha1: how long to have slices.")
@click.option(
    "--workload-type",
    type=click.Choice(["throughput-optimized", "availability-optimized"]),
    help="v2alpha1: training or serving.",
)
@click.option("--valid-after-duration", metavar="DURATION", help="Not before 6h from now, say.")
@click.option("--valid-after-time", metavar="TIME", help="Not before 2030-01-01T00:00:00Z, say.")
@click.option("--valid-until-duration", metavar="DURATION")
@click.option("--valid-until-time", metavar="TIME")
@async_option
@timeout_option
@click.option(
    "--wait",
    "wait",
    is_flag=True,
    help="Wait until the slices are there and healthy; who gives up deletes the request.",
)
@click.option(
    "--assign-timeout",
    "assign_s",
    type=duration,
    default="24h",
    show_default=True,
    metavar="DURATION",
    help="With --wait: until there is capacity.",
)
@click.option(
    "--provision-timeout",
    "provision_s",
    type=duration,
    default="30m",
    show_default=True,
    metavar="DURATION",
    help="With --wait: from then until the slices are there.",
)
@click.option(
    "--ready-timeout",
    "ready_s",
    type=duration,
    default="10m",
    show_default=True,
    metavar="DURATION",
    help="With --wait: from then until their hosts are healthy.",
)
@click.option(
    "--startup-timeout",
    "startup_s",
    type=duration,
    metavar="DURATION",
    help="With --wait, on a local server: from then until the startup script has ended well.",
)
@at_place
def create(
    name: str,
    client: CloudClient,
    place: Place,
    is_async: bool,
    timeout_s: float,
    wait: bool,
    assign_s: float,
    provision_s: float,
    ready_s: float,
    startup_s: float | None,
    **values: Any,
) -> None:
    """Ask for slices: one with --node-id, or --node-count of them, all or none.

    It returns when the request is stored; --wait waits for the slices.
    """
    from regrow.cloud.waiting import Deadlines, wait_ready, wait_startup

    if wait and is_async:
        raise click.UsageError("--wait and --async exclude each other")
    if startup_s is not None:
        _check_startup(client, wait=wait)
    request = QueuedRequest(node=take_node(values), **values)
    body = request.body(place)
    if request.is_alpha:
        client.version = "v2alpha1"
    with _dead_named(client, place):
        operation = client.create_queued(place, name, body)
        with _taken_back(client, place, name):
            finish(
                client,
                operation,
                f"create request issued for [{name}]",
                f"created queued resource [{name}]",
                is_async=is_async,
                timeout_s=timeout_s,
            )
            if wait:
                deadlines = Deadlines(assign_s, provision_s, ready_s)
                wait_ready(client, place, name, deadlines, tell=lambda one: _tell(name, one))
            if startup_s is not None:
                wait_startup(client, place, name, startup_s)


def _check_startup(client: CloudClient, *, wait: bool) -> None:
    if not wait:
        raise click.UsageError("--startup-timeout needs --wait")
    if client.endpoint.startswith("https:"):
        raise click.UsageError("--startup-timeout: real hosts do not tell how a script has ended")


def _tell(name: str, progress: Progress) -> None:
    nodes = f": {progress.ready} of {count(progress.nodes, 'slice')} ready"
    say(f"[{name}] is {progress.state}{nodes if progress.state == 'ACTIVE' else ''}")


@contextlib.contextmanager
def _taken_back(client: CloudClient, place: Place, name: str) -> Iterator[None]:
    """Deletes the request if the block fails or is interrupted, and says so."""
    from regrow.cloud.waiting import given_up_deleted

    try:
        with ended_by_sigterm(), given_up_deleted(client, place, name):
            yield
    except BaseException:
        say(f"nobody waits for [{name}] any more: it is being deleted")
        raise


@contextlib.contextmanager
def _dead_named(client: CloudClient, place: Place) -> Iterator[None]:
    """Names the dead that hold quota or a name, if that may be why the block fails."""
    try:
        yield
    except (CloudApiError, WaitTimeout) as error:
        codes = (Code.RESOURCE_EXHAUSTED, Code.ALREADY_EXISTS)
        if isinstance(error, WaitTimeout) or error.code in codes:
            with contextlib.suppress(RegrowError):
                _name_dead(client, place)
        raise


def _name_dead(client: CloudClient, place: Place) -> None:
    from regrow.cloud.waiting import dead

    if names := dead(client, place):
        say(
            f"dead, and holding quota and names until they are deleted: {', '.join(names)}; "
            "delete them with: regrow queued-resources reap"
        )


@command.command("list")
@filter_option
@format_option("table")
@at_places
def list_(client: CloudClient, place: Place, filter_: str | None, form: str) -> None:
    """List queued resources of a zone; without one, or with --zone=-, of all."""
    from regrow.cloud.waiting import DEAD

    items = filtered(client.list_queued(place), _COLUMNS, filter_)
    print_list(items, _COLUMNS, form)
    if any(_state(one) in DEAD for one in items):
        say("FAILED and SUSPENDED ones hold quota until they are deleted: see reap")
    if any(str(_node(one).get("healthDescription")).startswith(_SIMULATED) for one in items):
        say("these slices are simulated, without processes")


@command.command("describe")
@click.argument("name", metavar="QUEUED_RESOURCE")
@format_option("yaml")
@at_place
def describe(name: str, client: CloudClient, place: Place, form: str) -> None:
    """Show all of a queued resource."""
    print_one(client.queued(place, name), form)


@command.command("delete")
@click.argument("name", metavar="QUEUED_RESOURCE")
@click.option("--force", is_flag=True, help="Its slices, too.")
@quiet_option
@async_option
@timeout_option
@at_place
def delete(
    name: str,
    client: CloudClient,
    place: Place,
    force: bool,
    quiet: bool,
    is_async: bool,
    timeout_s: float,
) -> None:
    """Delete a queued resource; with --force, its slices first."""
    client.queued(place, name)
    confirm(f"You are about to delete queued_resource [{name}].", quiet=quiet)
    _delete(client, place, name, force=force, is_async=is_async, timeout_s=timeout_s)


def _delete(
    client: CloudClient, place: Place, name: str, *, force: bool, is_async: bool, timeout_s: float
) -> None:
    operation = client.delete_queued(place, name, force=force)
    if operation is None:
        say(f"[{name}] is gone already")
        return
    doing, done = f"delete request issued for [{name}]", f"deleted queued resource [{name}]"
    finish(client, operation, doing, done, is_async=is_async, timeout_s=timeout_s)


@command.command("reset")
@click.argument("name", metavar="QUEUED_RESOURCE")
@quiet_option
@async_option
@timeout_option
@at_place
def reset(
    name: str, client: CloudClient, place: Place, quiet: bool, is_async: bool, timeout_s: float
) -> None:
    """Restart all hosts of an ACTIVE one: memory is cleared, disks stay, startup scripts run."""
    confirm(f"You are about to reset queued_resource [{name}].", quiet=quiet)
    operation = client.reset_queued(place, name)
    doing, done = f"reset request issued for [{name}]", f"reset queued resource [{name}]"
    finish(client, operation, doing, done, is_async=is_async, timeout_s=timeout_s)


@command.command("perform-maintenance")
@click.argument("name", metavar="QUEUED_RESOURCE")
@click.option("--node-names", required=True, metavar="NODE,…", help="Which slices.")
@async_option
@timeout_option
@at_place
def perform_maintenance(
    name: str, client: CloudClient, place: Place, node_names: str, is_async: bool, timeout_s: float
) -> None:
    """Have the upcoming maintenance of slices done now (v2alpha1)."""
    client.version = "v2alpha1"
    operation = client.maintain_queued(place, name, [one.strip() for one in node_names.split(",")])
    doing, done = f"maintenance of [{name}] requested", f"maintenance of [{name}] done"
    finish(client, operation, doing, done, is_async=is_async, timeout_s=timeout_s)


@command.command("reap")
@click.option("--dry-run", is_flag=True, help="Only name them.")
@async_option
@timeout_option
@at_places
def reap(
    client: CloudClient, place: Place, dry_run: bool, is_async: bool, timeout_s: float
) -> None:
    """Delete the dead: FAILED and SUSPENDED ones hold quota and will never have slices again."""
    from regrow.cloud.waiting import DEAD

    dead = [one["name"] for one in client.list_queued(place) if _state(one) in DEAD]
    for full in dead:
        if dry_run:
            click.echo(base(full))
        else:
            where = Place.of(full)
            _delete(client, where, base(full), force=True, is_async=is_async, timeout_s=timeout_s)
    if not dead:
        say("there are no dead queued resources")


add_remote_commands(command, "QUEUED_RESOURCE", batch_size="64", of_queued=True)
