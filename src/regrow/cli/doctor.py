"""`regrow doctor`: what is wrong, and how to mend it."""

from __future__ import annotations

import os
import sys
from typing import Final, TextIO

import click

from regrow.cli import checks, probe
from regrow.cli.findings import Finding, explain
from regrow.cli.options import cluster_choice
from regrow.home import Home

_MARKS: Final = {"ok": ("ok  ", "green"), "note": ("note", "yellow"), "bad": ("BAD ", "red")}


@click.command("doctor")
@cluster_choice
@click.option(
    "--explain",
    "error_file",
    type=click.File("r", errors="replace"),
    metavar="FILE",
    help="Only explain the error message in FILE ('-': standard input).",
)
@click.option("--no-probe", is_flag=True, help="Do not start a client to see how it fares.")
def command(name: str | None, error_file: TextIO | None, no_probe: bool) -> int:
    """Find what is wrong and tell how to mend it.

    Looks at this machine and its libraries, the variables of this shell, what runs in REGROW_HOME,
    and at how a client fares. The exit status is 1 if something is wrong.
    """
    if error_file is not None:
        return _report([explain(error_file.read())])
    home = Home()
    worst = 0
    for section in (
        checks.machine,
        checks.libraries,
        lambda: checks.environment(os.environ),
        lambda: checks.token(home, os.environ),
        lambda: checks.clusters(home, name),
    ):
        worst = max(worst, _report(section()))
    if not no_probe and worst == 0:
        worst = max(worst, _report(probe.client(home, name, os.environ)))
    return worst


def _report(findings: list[Finding]) -> int:
    """Prints findings; 1 if one of them is bad."""
    for finding in findings:
        mark, color = _MARKS[finding.level]
        styled = click.style(mark, fg=color) if sys.stdout.isatty() else mark
        click.echo(f"{styled} {finding.text}")
        if finding.mend:
            click.echo(f"     -> {finding.mend}")
    return int(any(finding.level == "bad" for finding in findings))
