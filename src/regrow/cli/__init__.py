"""The `regrow` command: one module for each of its commands, imported when it is used."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Final

import click

from regrow import __version__
from regrow.errors import (
    ClusterError,
    LaunchError,
    OptionError,
    RegrowError,
    UsageError,
    WaitTimeout,
)

USAGE_STATUS: Final = 2
CLUSTER_STATUS: Final = 3
INTERRUPTED_STATUS: Final = 130

# In the order of the help; the summaries stand here so that it need not import them all.
_COMMANDS: Final = {
    "run": "Run a script on a cluster of local slices made for it.",
    "chaos": "Run a script as run does, with faults drawn by lot.",
    "prove": "Prove that a script which loses slices computes what it does without.",
    "up": "Start a cluster of local slices.",
    "down": "End a cluster.",
    "status": "Show a cluster and its slices.",
    "timeline": "Show the elastic events of a cluster, and where the time went.",
    "slice": "Kill, stop, continue or restore a slice.",
    "suspend": "Have slices leave with their state saved.",
    "resume": "Bring suspended slices back.",
    "snapshot": "Show, export or remove the state of suspended slices.",
    "env": "Print the variables that make a process a client.",
    "doctor": "Find what is wrong and tell how to mend it.",
    "plan": "Rank the ways to split a training over slices.",
    "bench": "Time shardings, and the network between slices.",
    "manifest": "Print manifests for Kubernetes.",
    "head": "Run a head in the foreground, with the flags of Pathways.",
    "worker": "Be a host of a slice, for a head on another machine.",
    "ray": "Ray: a head, jobs on the hosts of TPUs, a coordinator VM.",
    "cloud": "A local Cloud TPU: its API, and slices of local processes.",
    "queued-resources": "Ask for slices of a Cloud TPU, and work on their hosts.",
    "tpu-vm": "Single slices of a Cloud TPU, and work on their hosts.",
    "multihost": "One program on every host of slices.",
    "config": "Project and zone of queued-resources and tpu-vm.",
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = importlib.import_module(f"regrow.cli.{cmd_name.replace('-', '_')}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            like = difflib.get_close_matches(args[0], _COMMANDS, n=1)
            hint = f"; did you mean {like[0]!r}?" if like else ""
            raise click.UsageError(f"{error.message.rstrip('.')}{hint}", ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="regrow")
def _regrow() -> None:
    """Stock JAX over slices that are separate processes and may die and return."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status. Every error is one line."""
    try:
        status = _regrow.main(arguments, prog_name="regrow", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return USAGE_STATUS
    except click.ClickException as error:
        return complain(_usage_text(error), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED_STATUS
    except OptionError as error:
        return complain(f"{_flag(error.option)} {error.problem}", USAGE_STATUS)
    except UsageError as error:
        return complain(str(error), USAGE_STATUS)
    except (ClusterError, LaunchError, WaitTimeout) as error:
        return complain(str(error), CLUSTER_STATUS)
    except RegrowError as error:
        return complain(str(error), 1)
    except OSError as error:
        # What cannot be written now cannot at the end either, when Python tries it again.
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # Whoever reads our output may have had enough of it.
        return 1 if isinstance(error, BrokenPipeError) else complain(str(error), 1)
    return status if isinstance(status, int) else 0


def _flag(option: str) -> str:
    """What a user has typed for an option that Python knows by this name."""
    return f"--{option.removesuffix('_s').replace('_', '-')}"


def complain(text: str, status: int) -> int:
    """Prints one line on standard error; returns `status`."""
    click.echo(f"regrow: {' '.join(text.split())}", err=True)
    return status


def _usage_text(error: click.ClickException) -> str:
    text = error.format_message()
    context = getattr(error, "ctx", None)
    if isinstance(error, click.UsageError) and context is not None:
        return f"{text.rstrip('.')} (see: {context.command_path} --help)"
    return text
