"""`regrow up`: a cluster that stays until it is taken down."""

from __future__ import annotations

import os
import selectors
import signal
from pathlib import Path
from typing import Any, Final

import click

from regrow.cli.detach import hand_over, hand_over_error, start_detached
from regrow.cli.options import cluster_options, tcp_options, to_cluster_options
from regrow.cli.pulse import Pulse
from regrow.cli.report import EventReporter, healthy_line, say
from regrow.cli.signals import SignalQueue
from regrow.client.settings import head_deadline_from
from regrow.config import ClusterOptions
from regrow.control import ControlConnection
from regrow.errors import ClusterError, RegrowError
from regrow.home import ClusterState, Home
from regrow.processes import adopted_reaped
from regrow.start import complete_state, start_cluster
from regrow.supervise import Supervisor

NOT_ELASTIC_STATUS: Final = 4
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@click.command("up")
@cluster_options
@tcp_options
@click.option(
    "--spares",
    type=int,
    metavar="N",
    help="Share the slices among jobs (regrow run --cluster); so many are kept for lost ones.",
)
@click.option(
    "--priorities",
    type=click.Path(dir_okay=False, path_type=Path, resolve_path=True),
    metavar="FILE",
    help="Share the slices among jobs of these priority classes, a YAML of Kubernetes' form.",
)
@click.option(
    "--cold-spares",
    "warm",
    flag_value=False,
    default=True,
    help="Start the hosts of a spare only when it is used.",
)
@click.option("--detach", is_flag=True, help="Return when it is up; it goes on by itself.")
@click.option("--ready-fd", type=int, hidden=True)
def command(
    name: str | None,
    start_timeout_s: float,
    detach: bool,
    ready_fd: int | None,
    spares: int | None,
    priorities: Path | None,
    warm: bool,
    **values: Any,
) -> int:
    """Start a cluster of local slices, which stays until it is taken down.

    Without --detach it ends with this command (Ctrl-C), else with `regrow down`.
    With --spares or --priorities it has no head of its own: jobs lease its slices.
    """
    options = to_cluster_options(values)
    if detach:
        return start_detached("cluster", start_timeout_s)
    if spares is not None or priorities is not None:
        from regrow.cli.shared import supervise_shared

        return supervise_shared(
            options,
            name,
            start_timeout_s,
            ready_fd,
            spares=spares or 0,
            priorities=priorities,
            grace_s=options.grace_s,
            warm=warm,
            ending=_ENDING,
        )
    return supervise(options, name, start_timeout_s, ready_fd, purpose="regrow up")


def supervise(
    options: ClusterOptions,
    name: str | None,
    start_timeout_s: float,
    ready_fd: int | None = None,
    *,
    purpose: str,
) -> int:
    """Starts a cluster and stays with it to its end; returns the exit status.

    Args:
        options: What it is to be like.
        name: Its name; None: any.
        start_timeout_s: How long the slices may take to be up.
        ready_fd: Where to write how the start went; None: tell the user.
        purpose: The command that it is started by.
    """
    try:
        head_deadline_s = head_deadline_from(os.environ)
        home = Home()
        with (
            adopted_reaped(),
            start_cluster(options, home=home, name=name, stem="up", purpose=purpose) as supervisor,
        ):
            supervisor.wait_healthy(start_timeout_s, tell=say)
            state = complete_state(home, supervisor)
            # Before it is said that the cluster is up: from then on a signal is its orderly end.
            with SignalQueue(_ENDING) as signals:
                if ready_fd is None:
                    _tell(supervisor, state)
                else:
                    _hand_over(ready_fd, supervisor, state)
                return _watch(supervisor, signals, head_deadline_s)
    except RegrowError as error:
        if ready_fd is None:
            raise
        return hand_over_error(ready_fd, error)


def _tell(supervisor: Supervisor, state: ClusterState) -> None:
    say(healthy_line(supervisor.config))
    for line in how_to_connect(state):
        say(line)


def how_to_connect(state: ClusterState) -> list[str]:
    """Tells how to become a client of a cluster."""
    lines = [
        f"clients: {state.target}",
        f'in a shell: eval "$(regrow env --cluster {state.name})"; '
        f"its end: regrow down --cluster {state.name}",
    ]
    if state.tcp_target is not None:
        how = "without a token" if state.token is None else f"with REGROW_TOKEN={state.token}"
        lines.insert(1, f"clients over TCP: {state.tcp_target}, {how}")
    return lines


def _hand_over(ready_fd: int, supervisor: Supervisor, state: ClusterState) -> None:
    lines = [healthy_line(supervisor.config), *how_to_connect(state)]
    hand_over(ready_fd, lines, Path(supervisor.config.log_dir, "supervisor.log"))


def _watch(supervisor: Supervisor, signals: SignalQueue, head_deadline_s: float | None) -> int:
    """Reports what happens until the cluster is to end."""
    reporter = EventReporter()
    status: list[int] = []
    with (
        selectors.DefaultSelector() as selector,
        ControlConnection(supervisor.config.control_socket) as control,
    ):
        control.subscribe()
        pulse = Pulse(supervisor.head, control, head_deadline_s)

        def on_control() -> None:
            try:
                events, answers = control.take()
            except RegrowError:
                # The head has ended, or is about to; its own descriptor tells.
                selector.unregister(control)
                return
            if events or answers:
                pulse.heard()
            for event in events:
                reporter.report(event)
                if event["kind"] == "job_ends":
                    status.append(NOT_ELASTIC_STATUS)

        selector.register(control, selectors.EVENT_READ, on_control)
        selector.register(signals, selectors.EVENT_READ, lambda: status.append(_received(signals)))
        selector.register(
            supervisor.head.fd,
            selectors.EVENT_READ,
            lambda: status.append(_ended(supervisor, pulse.lost)),
        )
        while not status:
            for key, _ in selector.select(pulse.wait_s()):
                key.data()
            pulse.step()
    return status[0]


def _received(signals: SignalQueue) -> int:
    received = signals.take()[0]
    say(f"{received.number.name}: the cluster is taken down")
    return 0 if received.number == signal.SIGINT else 128 + received.number


def _ended(supervisor: Supervisor, lost: str | None) -> int:
    cause = supervisor.head.poll()
    if cause == "exit status 0":
        return 0
    if lost is not None:
        raise ClusterError(f"the head {lost}; it was ended")
    raise ClusterError(f"the head has died: {cause}{supervisor.last_words()}")
