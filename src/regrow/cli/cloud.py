"""`regrow cloud`: the local Cloud TPU."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from regrow.cli.detach import hand_over, hand_over_error, start_detached
from regrow.cli.report import count, say
from regrow.cloud.config import CloudConfig
from regrow.cloud.local import ask, end
from regrow.cloud.names import Place, base
from regrow.cloud.server.state_dir import DEFAULT_PORT, ServerState, StateDir
from regrow.errors import RegrowError

_START_DEADLINE_S: Final = 30.0
_END_DEADLINE_S: Final = 60.0


def _state_dir_option(function: Callable[..., Any]) -> Callable[..., Any]:
    option = click.option(
        "--state-dir",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="Where everything is kept.  [default: cloud in REGROW_HOME]",
    )
    return option(function)


@click.group("cloud")
def command() -> None:
    """A Cloud TPU on this machine: the API, and slices that are local processes."""


@command.command("up")
@click.option("--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True)
@click.option(
    "--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Where to listen."
)
@_state_dir_option
@click.option(
    "--config",
    "config_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Zones, capacity, reservations, quotas and times, in TOML.",
)
@click.option("--simulate", is_flag=True, help="Slices without processes, for load tests.")
@click.option("--detach", "detached", is_flag=True, help="Return when it is up.")
@click.option("--step", "step_s", type=float, metavar="SECONDS", help="From state to state.")
@click.option("--notice", "notice_s", type=float, metavar="SECONDS", help="Before a preemption.")
@click.option("--stop", "stop_s", type=float, metavar="SECONDS", help="From SIGTERM to SIGKILL.")
@click.option(
    "--queued-resources-quota",
    type=int,
    metavar="N",
    help="Queued resources of a project in a zone.",
)
@click.option(
    "--preemptions-per-hour", type=float, metavar="RATE", help="Mean rate for each spot request."
)
@click.option("--seed", type=int, metavar="N", help="Of the times of preemptions.")
@click.option("--ready-fd", type=int, hidden=True)
def up(
    port: int,
    host: str,
    state_dir: Path | None,
    config_file: Path | None,
    simulate: bool,
    detached: bool,
    ready_fd: int | None,
    **overrides: Any,
) -> int:
    """Start the local Cloud TPU; it goes on with what it finds in its directory.

    Without --detach it ends with this command (Ctrl-C), else with `regrow cloud down`.
    """
    # uvicorn and starlette are imported by this command alone.
    from regrow.cloud.server.main import ServerOptions, serve

    given = {name: value for name, value in overrides.items() if value is not None}
    config = CloudConfig.load(config_file, **given) if config_file else CloudConfig(**given)
    if detached:
        return start_detached("local Cloud TPU", _START_DEADLINE_S)
    logging.basicConfig(level=logging.WARNING, format="regrow: %(message)s")
    directory = StateDir(state_dir)
    options = ServerOptions(
        state_dir=directory, config=config, host=host, port=port, simulate=simulate
    )

    def ready(server: ServerState) -> None:
        lines = _welcome(server, directory)
        if ready_fd is not None:
            hand_over(ready_fd, lines, directory.path / "server.log")
        else:
            for line in lines:
                say(line)

    try:
        serve(options, ready)
    except RegrowError as error:
        if ready_fd is None:
            raise
        return hand_over_error(ready_fd, error)
    return 0


def _welcome(server: ServerState, directory: StateDir) -> list[str]:
    kind = "simulated slices, without processes" if server.simulated else "slices of processes"
    return [
        f"a local Cloud TPU with {kind} is up at {server.endpoint} (in {directory.path})",
        "its clients: regrow, curl, and Google's own with this address as their API endpoint",
    ]


@command.command("down")
@_state_dir_option
def down(state_dir: Path | None) -> None:
    """End the local Cloud TPU and the processes of all slices; their disks are kept."""
    server = end(StateDir(state_dir), _END_DEADLINE_S)
    say(f"the local Cloud TPU at {server.endpoint} is down")


@command.command("status")
@_state_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print it for programs.")
def status(state_dir: Path | None, as_json: bool) -> None:
    """Show what the local Cloud TPU has and gives."""
    directory = StateDir(state_dir)
    server = directory.server()
    told = ask(directory, "GET", "status")
    if as_json:
        known = {"endpoint": server.endpoint, "state_dir": str(directory.path)}
        process = dataclasses.asdict(server.process)
        click.echo(json.dumps(known | {"process": process} | told, indent=1))
        return
    _print(server, told)


def _print(server: ServerState, told: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    queued, alone = told["queuedResources"], told["nodes"]
    simulated = "; its slices are simulated, without processes" if told["simulated"] else ""
    texts = [count(len(queued), "queued resource"), count(len(alone), "further node")]
    console.print(f"[bold]{server.endpoint}[/]: {', '.join(texts)}{simulated}", soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("name", "zone", "type", "slices", "tier", "state", "trouble"):
        table.add_column(title)
    for one in queued:
        ready = sum(node["state"] == "READY" for node in one["nodes"])
        troubles = [node["trouble"] for node in one["nodes"] if node["trouble"]]
        table.add_row(
            base(one["name"]),
            Place.of(one["name"]).zone,
            one["acceleratorType"],
            f"{ready}/{one['slices']}",
            one["tier"],
            one["state"],
            troubles[0] if troubles else "",
        )
    for one in alone:
        name, place = base(one["name"]), Place.of(one["name"])
        table.add_row(
            name, place.zone, one["acceleratorType"], "-", "-", one["state"], one["trouble"]
        )
    if queued or alone:
        console.print(table)
    for pool, chips in sorted(told["taken"].items()):
        console.print(f"{pool}: {count(chips, 'chip')} taken")


@command.command("preempt")
@click.argument("name")
@_state_dir_option
def preempt(name: str, state_dir: Path | None) -> None:
    """Preempt spot slices: NAME is the full name of a queued resource or node."""
    ask(StateDir(state_dir), "POST", "preempt", {"name": name})
    say(f"{name} is being preempted")


@command.command("capacity")
@click.argument("zone")
@click.argument("generation")
@click.argument("chips", type=click.IntRange(0))
@_state_dir_option
def capacity(zone: str, generation: str, chips: int, state_dir: Path | None) -> None:
    """Set how many chips of a generation a zone has beside its reservations."""
    body = {"zone": zone, "generation": generation, "chips": chips}
    ask(StateDir(state_dir), "POST", "capacity", body)
    say(f"{zone} has {count(chips, 'chip')} of {generation}")
