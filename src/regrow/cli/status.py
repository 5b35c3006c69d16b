"""`regrow status`: a cluster and its slices."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Final

import click

from regrow.cli.manager_requests import ask_manager
from regrow.cli.options import cluster_choice
from regrow.cli.report import count, duration, say
from regrow.cli.shared_status import print_shared
from regrow.control import request
from regrow.errors import ControlError, NoClusterError
from regrow.home import ClusterState, Home

_STYLES: Final = {
    "up": "green",
    "suspect": "yellow",
    "starting": "cyan",
    "suspended": "blue",
    "lost": "red",
}


@click.command("status")
@cluster_choice
@click.option("--json", "as_json", is_flag=True, help="Print it for programs.")
@click.option("--all", "everything", is_flag=True, help="Every cluster in REGROW_HOME.")
def command(name: str | None, as_json: bool, everything: bool) -> None:
    """Show a cluster and its slices."""
    home = Home()
    states = home.clusters() if everything else [home.find(name)]
    statuses = [_status(state) for state in states]
    if as_json:
        click.echo(json.dumps(statuses if everything else statuses[0], indent=1))
        return
    for status in statuses:
        if status["shared"] and status["answers"]:
            print_shared(status)
        else:
            _print(status)
    if not statuses:
        say(f"no cluster runs in {home.path}")


def _status(state: ClusterState) -> dict[str, Any]:
    """What the home and the head know."""
    known = dataclasses.asdict(state)
    del known["token"]
    try:
        ask = ask_manager if state.shared else request
        told: dict[str, Any] = ask(state.control_socket, "status")
        return known | {"answers": True} | told
    except (ControlError, NoClusterError) as error:
        return known | {"answers": False, "error": str(error), "slices": []}


def _print(status: dict[str, Any]) -> None:
    # Rich takes long to import, and only this needs it.
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"[bold]{escape(status['name'])}[/]: {escape(_headline(status))}", soft_wrap=True)
    if status.get("ended"):
        console.print(f"[red]the job has ended:[/] {escape(status['ended'])}")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("slice", "state", "incarnation", "hosts", "pids", "since", "last event"):
        table.add_column(title, justify="right" if title == "since" else "left")
    for one in status["slices"]:
        style = _STYLES.get(one["state"], "default")
        index, state, *rest = _row(one)
        table.add_row(index, f"[{style}]{state}[/]", *(escape(text) for text in rest))
    if status["slices"]:
        console.print(table)


def _headline(status: dict[str, Any]) -> str:
    if not status["answers"]:
        return str(status["error"])
    live = sum(one["state"] in ("up", "suspect") for one in status["slices"])
    parts = [
        f"{live} of {count(len(status['slices']), 'slice')} up",
        count(status.get("clients", 0), "client"),
        status["target"],
    ]
    if status.get("spare_snapshots"):
        kept = status["spare_snapshots"]["bytes"] / 1e6
        parts.append(f"{kept:.0f} MB of snapshots kept for spares")
    if status.get("tcp_target"):
        parts.append(status["tcp_target"])
    return ", ".join(parts)


def event_of(one: dict[str, Any]) -> dict[str, Any] | None:
    """The line of a slice's story to show: of a lost one its loss (fencing came after), else the last."""
    last = one["story"][-1] if one["story"] else None
    return (_since(one) or last) if one["state"] == "lost" else last


def _since(one: dict[str, Any]) -> dict[str, Any] | None:
    """The line of a slice's story with which its present state began."""
    begin = _begin(one)
    return next((line for line in reversed(one["story"]) if line["text"].startswith(begin)), None)


def _row(one: dict[str, Any]) -> list[str]:
    since, event = _since(one), event_of(one)
    ready = sum(host["state"] == "ready" for host in one["hosts"])
    there = [host for host in one["hosts"] if host["state"] != "gone"]
    pids = [str(host["pid"]) for host in there if host["pid"] is not None]
    told = f"{event['text']} ({duration(event['ago_s'])} ago)" if event is not None else ""
    return [
        str(one["index"]),
        one["state"],
        str(one["incarnation"]),
        f"{ready}/{len(one['hosts'])}",
        ", ".join(pids) or "-",
        duration(since["ago_s"]) if since is not None else "-",
        told,
    ]


def _begin(one: dict[str, Any]) -> str:
    """How the line of a slice's story begins that tells of its present state."""
    state: str = one["state"]
    return {"suspect": "up", "down": "", "stopping": ""}.get(state, state)
