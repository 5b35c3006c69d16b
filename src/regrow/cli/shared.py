"""`regrow up --spares N --priorities FILE`: a cluster whose slices several jobs share."""

from __future__ import annotations

import contextlib
import selectors
from pathlib import Path
from typing import Any, Final

from regrow.cli.detach import hand_over, hand_over_error
from regrow.cli.report import count, say, since_start_s
from regrow.cli.shared_status import change_line
from regrow.cli.signals import SignalQueue
from regrow.config import ClusterOptions
from regrow.control import ControlConnection
from regrow.errors import ControlError, NoClusterError, RegrowError, UsageError
from regrow.home import Home
from regrow.jobs.priorities import load_classes
from regrow.jobs.supervisor import SharedSupervisor
from regrow.processes import adopted_reaped
from regrow.start import head_config

_AGAIN_S: Final = 0.1


def supervise_shared(
    options: ClusterOptions,
    name: str | None,
    start_timeout_s: float,
    ready_fd: int | None,
    *,
    spares: int,
    priorities: Path | None,
    grace_s: float,
    warm: bool,
    ending: Any,
) -> int:
    """Starts a shared cluster and stays with it to its end; returns the exit status.

    Args:
        options: What its slices are like.
        name: Its name; None: any.
        start_timeout_s: How long the slices may take to be there.
        ready_fd: Where to write how the start went; None: tell the user.
        spares: Idle slices that only a job that has lost one may take.
        priorities: File of the priority classes.
        grace_s: How long a job may take to give up what is taken from it.
        warm: Whether spares are warm.
        ending: The signals that end it.
    """
    manager = ["--spares", str(spares), "--grace", str(grace_s)]
    if priorities is not None:
        manager += ["--priorities", str(priorities)]
    try:
        _check(options, spares, priorities)
        home = Home()
        state = home.claim(name, stem="up", purpose="regrow up")
        try:
            config = head_config(options, home, state)
        except BaseException:
            home.release(state)
            raise
        with (
            adopted_reaped(),
            SharedSupervisor(home, state, config, manager, warm=warm) as supervisor,
        ):
            supervisor.wait_idle(start_timeout_s, tell=say)
            lines = _told(supervisor, spares)
            if ready_fd is None:
                for line in lines:
                    say(line)
            else:
                hand_over(ready_fd, lines, Path(config.log_dir, "supervisor.log"))
            return _Watch(supervisor, ending).run()
    except RegrowError as error:
        if ready_fd is None:
            raise
        return hand_over_error(ready_fd, error)


def _check(options: ClusterOptions, spares: int, priorities: Path | None) -> None:
    if not 0 <= spares < options.slices:
        raise UsageError(
            f"of {count(options.slices, 'slice')}, {spares} cannot be spares: jobs need some, too"
        )
    if options.ray is not None or options.tpu is not None:
        raise UsageError(
            "jobs share slices of this machine: --spares and --priorities go neither with "
            "--launcher ray nor with --queued-resource"
        )
    if options.port is not None or options.metrics_port is not None:
        raise UsageError(
            "clients connect to jobs: a shared cluster takes no --port, --metrics-port"
        )
    if priorities is not None:
        load_classes(priorities)


def _told(supervisor: SharedSupervisor, spares: int) -> list[str]:
    config, name = supervisor.config, supervisor.state.name
    sizes = f"{count(config.slices, 'slice')} of {count(config.devices_per_slice, 'device')}"
    return [
        f"{sizes}, {count(spares, 'spare')}, in {since_start_s():.1f} s (shared cluster {name})",
        f"a job: regrow run --cluster {name} --slices N SCRIPT; its end: regrow down --cluster {name}",
    ]


class _Watch:
    """Reports what happens until the cluster is to end."""

    def __init__(self, supervisor: SharedSupervisor, ending: Any) -> None:
        self._supervisor = supervisor
        self._ending = ending
        self._control: ControlConnection | None = None

    def run(self) -> int:
        """Stays to the end; returns the exit status."""
        with SignalQueue(self._ending) as signals:
            while True:
                self._subscribe()
                self._wait(signals)
                received = signals.take()
                if received:
                    number = received[0].number
                    say(f"{number.name}: the cluster is taken down")
                    return 0 if number.name == "SIGINT" else 128 + number
                lines = self._supervisor.mend()
                if lines is None:
                    return 0
                for line in lines:
                    say(line)
                self._report()

    def _wait(self, signals: SignalQueue) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(signals, selectors.EVENT_READ)
            for ended in self._supervisor.watched:
                selector.register(ended, selectors.EVENT_READ)
            if self._control is not None:
                selector.register(self._control, selectors.EVENT_READ)
            selector.select(None if self._control is not None else _AGAIN_S)

    def _subscribe(self) -> None:
        if self._control is None:
            with contextlib.suppress(ControlError, NoClusterError):
                control = ControlConnection(self._supervisor.state.control_socket)
                control.call("watch")
                self._control = control

    def _report(self) -> None:
        if self._control is None:
            return
        try:
            changes: list[Any] = list(self._control.take()[0])
        except ControlError:
            self._control.close()
            self._control = None
            return
        for change in changes:
            say(change_line(change))
