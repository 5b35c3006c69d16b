"""`regrow down`: the end of a cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Final

import click

from regrow.cli.manager_requests import ask_manager
from regrow.cli.options import cluster_choice
from regrow.cli.report import say
from regrow.control import request
from regrow.errors import ControlError, NoClusterError, WaitTimeout
from regrow.home import ClusterState, Home

_POLITE_S: Final = 5.0
_DEADLINE_S: Final = 15.0


@click.command("down")
@cluster_choice
@click.option("--all", "everything", is_flag=True, help="End every cluster in REGROW_HOME.")
def command(name: str | None, everything: bool) -> None:
    """End a cluster: its slices, its head, and the script if `regrow run` started it."""
    home = Home()
    states = home.clusters() if everything else [home.find(name)]
    for state in states:
        _end(home, state)
        say(f"cluster {state.name} is down")
    if not states:
        say(f"no cluster runs in {home.path}")


def _end(home: Home, state: ClusterState) -> None:
    began_at = time.monotonic()
    with contextlib.suppress(ControlError, NoClusterError):
        if state.shared:
            ask_manager(state.control_socket, "shutdown")
        else:
            request(state.control_socket, "shutdown", timeout_s=_POLITE_S)
    killed = False
    while any(entry.run_id == state.run_id for entry in home.entries()):
        waited_s = time.monotonic() - began_at
        if waited_s > _DEADLINE_S:
            raise WaitTimeout(f"cluster {state.name} to end", _DEADLINE_S)
        if waited_s > _POLITE_S and not killed:
            killed = True
            _kill(state)
        time.sleep(0.01)
        home.sweep()


def _kill(state: ClusterState) -> None:
    """Ends a head that does not end by itself; its supervisor cleans up."""
    if state.head is not None and state.head.alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(state.head.pid, signal.SIGKILL)
