"""`regrow timeline`: elastic events by their parts, and where the time went."""

from __future__ import annotations

import json
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from regrow.cli.options import cluster_choice
from regrow.control import request
from regrow.errors import UsageError
from regrow.home import Home
from regrow.observe import event_lines, goodput_lines


@click.command("timeline")
@cluster_choice
@click.option("--json", "as_json", is_flag=True, help="Print it for programs.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write it to a .json or .png file instead.",
)
def command(name: str | None, as_json: bool, out: Path | None) -> None:
    """Show the elastic events of a cluster, and the goodput of what it runs."""
    check_path(out)
    status = request(Home().find(name).control_socket, "timeline")
    if out is not None:
        write_timeline(status, out)
    elif as_json:
        click.echo(json.dumps(status, indent=1))
    else:
        lines = [line for event in status["events"] for line in event_lines(event)]
        click.echo("\n".join([*lines, *goodput_lines(status)]))


def check_path(path: Path | None) -> None:
    """Checks that a timeline can be written to a file of that name, as far as that shows before.

    Raises:
        UsageError: It is neither a .json nor a .png, there is no such folder and none can be made, or
            matplotlib is not installed.
    """
    if path is None:
        return
    if path.suffix not in (".json", ".png"):
        raise UsageError(f"{path} is no name for a timeline; it ends in .json or .png")
    if path.suffix == ".png" and find_spec("matplotlib") is None:
        raise UsageError(f"{path} needs matplotlib: pip install 'regrow[plots]'")
    try:
        # A script may run for days before it is written.
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(f"the timeline cannot be written to {path}: {error.strerror}") from None


def write_timeline(status: dict[str, Any], path: Path) -> None:
    """Writes a timeline to a file of JSON, or draws it.

    Raises:
        UsageError: The file cannot be written, or matplotlib is not installed.
    """
    try:
        if path.suffix == ".json":
            path.write_text(f"{json.dumps(status, indent=1)}\n", encoding="utf-8")
        else:
            # matplotlib takes long to import, and only this needs it.
            from regrow.observe.plot import draw

            draw(status, path)
    except OSError as error:
        raise UsageError(f"the timeline cannot be written to {path}: {error.strerror}") from None
