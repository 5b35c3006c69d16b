"""`regrow tpu-vm`: single slices, as `gcloud compute tpus tpu-vm` has them."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, Final

import click

from regrow.cli.report import say
from regrow.cli.tables import Column, filtered, print_list, print_one
from regrow.cli.tpu_options import (
    async_option,
    at_place,
    at_places,
    confirm,
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
from regrow.cloud.names import Place, base
from regrow.errors import RegrowError, UsageError

if TYPE_CHECKING:
    from regrow.cloud.client import CloudClient


@click.group("tpu-vm")
def command() -> None:
    """Single slices."""


_COLUMNS: Final[list[Column]] = [
    ("NAME", lambda one: base(one["name"])),
    ("ZONE", lambda one: Place.of(one["name"]).zone),
    ("ACCELERATOR_TYPE", lambda one: one.get("acceleratorType")),
    ("NETWORK", lambda one: base(one.get("networkConfig", {}).get("network", ""))),
    ("RANGE", lambda one: one.get("cidrBlock")),
    ("STATUS", lambda one: one.get("state")),
]


@command.command("create")
@click.argument("name", metavar="TPU")
@click.option("--version", "runtime_version", required=True, help="Software of the slice.")
@node_options
@click.option("--spot", is_flag=True, help="It may be preempted.")
@click.option("--preemptible", is_flag=True, help="The same, as it was called earlier.")
@click.option("--reserved", is_flag=True, help="From a reservation.")
@async_option
@timeout_option
@at_place
def create(
    name: str, client: CloudClient, place: Place, is_async: bool, timeout_s: float, **values: Any
) -> None:
    """Make a slice of what is free now; who gives up waiting deletes it."""
    node = dataclasses.replace(take_node(values), **values)
    if node.reserved and (node.spot or node.preemptible):
        raise UsageError("--reserved and --spot exclude each other")
    if node.is_alpha:
        client.version = "v2alpha1"
    operation = client.create_node(place, name, node.body())
    try:
        with ended_by_sigterm():
            finish(
                client,
                operation,
                f"create request issued for [{name}]",
                f"created tpu [{name}]",
                is_async=is_async,
                timeout_s=timeout_s,
            )
    except BaseException:
        with contextlib.suppress(RegrowError):
            client.delete_node(place, name)
        raise


@command.command("list")
@filter_option
@format_option("table")
@at_places
def list_(client: CloudClient, place: Place, filter_: str | None, form: str) -> None:
    """List slices of a zone; without one, or with --zone=-, of all."""
    items = filtered(client.list_nodes(place), _COLUMNS, filter_)
    print_list(items, _COLUMNS, form)
    if any(str(one.get("healthDescription")).startswith("Simulated:") for one in items):
        say("these slices are simulated, without processes")


@command.command("describe")
@click.argument("name", metavar="TPU")
@format_option("yaml")
@at_place
def describe(name: str, client: CloudClient, place: Place, form: str) -> None:
    """Show all of a slice."""
    print_one(client.node(place, name), form)


@command.command("delete")
@click.argument("name", metavar="TPU")
@quiet_option
@async_option
@timeout_option
@at_place
def delete(
    name: str, client: CloudClient, place: Place, quiet: bool, is_async: bool, timeout_s: float
) -> None:
    """Delete a slice."""
    client.node(place, name)
    confirm(f"You are about to delete tpu [{name}].", quiet=quiet)
    operation = client.delete_node(place, name)
    if operation is None:
        say(f"[{name}] is gone already")
        return
    doing, done = f"delete request issued for [{name}]", f"deleted tpu [{name}]"
    finish(client, operation, doing, done, is_async=is_async, timeout_s=timeout_s)


@command.command("stop")
@click.argument("name", metavar="TPU")
@async_option
@timeout_option
@at_place
def stop(name: str, client: CloudClient, place: Place, is_async: bool, timeout_s: float) -> None:
    """Stop a slice of one host; its disk stays."""
    operation = client.stop_node(place, name)
    doing, done = f"stop request issued for [{name}]", f"stopped tpu [{name}]"
    finish(client, operation, doing, done, is_async=is_async, timeout_s=timeout_s)


@command.command("start")
@click.argument("name", metavar="TPU")
@async_option
@timeout_option
@at_place
def start(name: str, client: CloudClient, place: Place, is_async: bool, timeout_s: float) -> None:
    """Start a slice that was stopped."""
    operation = client.start_node(place, name)
    doing, done = f"start request issued for [{name}]", f"started tpu [{name}]"
    finish(client, operation, doing, done, is_async=is_async, timeout_s=timeout_s)


@command.command("get-guest-attributes")
@click.argument("name", metavar="TPU")
@click.option("--query-path", default="", metavar="NAMESPACE[/KEY]", help="Only these.")
@at_place
def guest_attributes(name: str, client: CloudClient, place: Place, query_path: str) -> None:
    """Show what the hosts of a slice have written: the status of their startup script, say."""
    told = client.guest_attributes(place, name, query_path)
    rows = [
        {"worker": worker, "attribute": key, "value": value}
        for worker, values in enumerate(told)
        for key, value in values.items()
    ]
    columns: list[Column] = [
        ("WORKER_ID", lambda one: one["worker"]),
        ("ATTRIBUTE", lambda one: one["attribute"]),
        ("VALUE", lambda one: one["value"]),
    ]
    print_list(rows, columns, "table")


@command.command("simulate-maintenance-event")
@click.argument("name", metavar="TPU")
@click.option("--workers", default="0", show_default=True, metavar="INDEX,…")
@async_option
@timeout_option
@at_place
def simulate_maintenance(
    name: str, client: CloudClient, place: Place, workers: str, is_async: bool, timeout_s: float
) -> None:
    """Have a slice meet a maintenance event (v2alpha1)."""
    client.version = "v2alpha1"
    ids = [one.strip() for one in workers.split(",") if one.strip()]
    operation = client.simulate_maintenance(place, name, ids)
    doing, done = f"maintenance of [{name}] requested", f"maintenance of [{name}] done"
    finish(client, operation, doing, done, is_async=is_async, timeout_s=timeout_s)


add_remote_commands(command, "TPU", batch_size="all", of_queued=False)
