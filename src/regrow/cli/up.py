"""`regrow up`: a cluster that stays until it is taken down."""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

import click

from regrow import errors
from regrow.cli.options import cluster_options, tcp_options, to_cluster_options
from regrow.cli.report import EventReporter, healthy_line, say
from regrow.cli.signals import SignalQueue
from regrow.cluster import complete_state, start_cluster
from regrow.config import ClusterOptions
from regrow.control import ControlConnection, error_from_json, error_to_json
from regrow.errors import ClusterError, ClusterStartError, RegrowError
from regrow.home import ClusterState, Home
from regrow.processes import RUN_MARK, Child, adopted_reaped, python_argv, spawn
from regrow.supervise import Supervisor

NOT_ELASTIC_STATUS: Final = 4
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@click.command("up")
@cluster_options
@tcp_options
@click.option("--detach", is_flag=True, help="Return when it is up; it goes on by itself.")
@click.option("--ready-fd", type=int, hidden=True)
def command(
    name: str | None, start_timeout_s: float, detach: bool, ready_fd: int | None, **values: Any
) -> int:
    """Start a cluster of local slices, which stays until it is taken down.

    Without --detach it ends with this command (Ctrl-C), else with `regrow down`.
    """
    options = to_cluster_options(values)
    if detach:
        return _detach(start_timeout_s)
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
        home = Home()
        with (
            adopted_reaped(),
            start_cluster(options, home=home, name=name, stem="up", purpose=purpose) as supervisor,
        ):
            supervisor.wait_healthy(start_timeout_s, tell=say)
            state = complete_state(home, supervisor)
            if ready_fd is None:
                _tell(supervisor, state)
            else:
                _hand_over(ready_fd, supervisor, state)
            return _watch(supervisor)
    except RegrowError as error:
        if ready_fd is None:
            raise
        os.write(ready_fd, json.dumps({"error": error_to_json(error)}).encode())
        return 1


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
    """Lets go of whoever waits for the start, and of the terminal."""
    lines = [healthy_line(supervisor.config), *how_to_connect(state)]
    log = os.open(
        Path(supervisor.config.log_dir, "supervisor.log"),
        os.O_WRONLY | os.O_CREAT | os.O_APPEND,
        0o600,
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.write(ready_fd, json.dumps({"lines": lines}).encode())
    os.close(ready_fd)


def _watch(supervisor: Supervisor) -> int:
    """Reports what happens until the cluster is to end."""
    reporter = EventReporter()
    status: list[int] = []
    with (
        selectors.DefaultSelector() as selector,
        ControlConnection(supervisor.config.control_socket) as control,
        SignalQueue(_ENDING) as signals,
    ):
        control.subscribe()

        def on_control() -> None:
            try:
                events, _ = control.take()
            except RegrowError:
                # The head has ended, or is about to; its own descriptor tells.
                selector.unregister(control)
                return
            for event in events:
                reporter.report(event)
                if event["kind"] == "job_ends":
                    status.append(NOT_ELASTIC_STATUS)

        selector.register(control, selectors.EVENT_READ, on_control)
        selector.register(signals, selectors.EVENT_READ, lambda: status.append(_received(signals)))
        selector.register(
            supervisor.head.fd, selectors.EVENT_READ, lambda: status.append(_ended(supervisor))
        )
        while not status:
            for key, _ in selector.select():
                key.data()
    return status[0]


def _received(signals: SignalQueue) -> int:
    received = signals.take()[0]
    say(f"{received.number.name}: the cluster is taken down")
    return 0 if received.number == signal.SIGINT else 128 + received.number


def _ended(supervisor: Supervisor) -> int:
    cause = supervisor.head.poll()
    if cause == "exit status 0":
        return 0
    raise ClusterError(f"the head has died: {cause}{supervisor.last_words()}")


def _detach(start_timeout_s: float) -> int:
    """Starts this command again, in a session of its own, and waits until the cluster is up."""
    reader, writer = os.pipe()
    arguments = [word for word in sys.argv[1:] if word != "--detach"]
    environ = {name: value for name, value in os.environ.items() if name != RUN_MARK}
    with contextlib.ExitStack() as stack:
        nowhere = stack.enter_context(Path(os.devnull).open("wb"))
        argv = python_argv("regrow", *arguments, "--ready-fd", str(writer))
        supervisor = Child(spawn(argv, environ, output=nowhere.fileno(), keep=[writer]))
    os.close(writer)
    try:
        answer = _read_all(reader, start_timeout_s + 10)
    except BaseException:
        supervisor.send(signal.SIGTERM)
        raise
    if "error" in answer:
        supervisor.wait(10)
        raise error_from_json(answer["error"])
    for line in answer["lines"]:
        say(line)
    return 0


def _read_all(reader: int, timeout_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    text = b""
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise errors.WaitTimeout("the detached cluster to be up", timeout_s)
            chunk = pipe.read(1 << 16)
            if not chunk:
                break
            text += chunk
    if not text:
        raise ClusterStartError("the detached supervisor died before the cluster was up")
    answer: dict[str, Any] = json.loads(text)
    return answer
