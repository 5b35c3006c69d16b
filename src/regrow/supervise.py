"""What the supervisor and the head of a cluster do for each other.

The supervisor (A) is the process of `regrow run` or `regrow up`, or the user's own process when it
makes a `LocalCluster`. It starts the head (B), which starts everything else. So that nothing is ever
left over:

* A waits for the end of B. The workers end with B (PR_SET_PDEATHSIG), also stopped ones; A ends what
  else carries the mark of the run, and removes the cluster's directory.
* B waits for the end of A: it holds a pidfd of A, and the read end of a pipe whose write end only A
  has. Then it ends all processes of the run, the script of `regrow run` among them, removes the
  directory, and ends itself.
* If both end at once, the next command in that home does the same (`Home.sweep`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, final

from regrow.config import HeadConfig
from regrow.control import ControlConnection, request
from regrow.errors import ClusterStartError, ControlError, NoClusterError, RegrowError, WaitTimeout
from regrow.home import ClusterState, Home
from regrow.processes import (
    Child,
    ProcessId,
    become_subreaper,
    close_inherited,
    end_run,
    python_argv,
    server_environ,
    set_name,
    spawn,
    telling_line,
)

logger = logging.getLogger(__name__)

HEAD_MODULE: Final = "regrow.head"
_CONTROL_DEADLINE_S: Final = 30.0
_SHUTDOWN_DEADLINE_S: Final = 5.0
_LOOK_EVERY_S: Final = 1.0
_TELL_EVERY_S: Final = 10.0
_HOPELESS_FAILURES: Final = 3


@final
class Supervisor:
    """A cluster that this process has started and watches over.

    Attributes:
        config: What the head was told.
        state: The cluster's entry in its home.
    """

    def __init__(
        self,
        home: Home,
        state: ClusterState,
        config: HeadConfig,
    ) -> None:
        """Starts the head; does not wait for it.

        Args:
            home: Where the cluster is entered.
            state: Its entry there, as `Home.claim` returned it.
            config: What the head is told.

        Raises:
            ClusterStartError: If no process could be started.
        """
        self._home = home
        self._lock = threading.Lock()
        self._closed = False
        self._owner = os.getpid()
        self.config = config
        self.state = state
        try:
            self._head, self._lifeline = start_watched(config, os.environ, HEAD_MODULE, "head")
        except OSError as error:
            home.release(state)
            raise ClusterStartError(f"cannot start the head: {error}") from None
        self.state = dataclasses.replace(state, head=ProcessId.of(self._head.pid))
        home.update(self.state)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def head(self) -> Child:
        """The head's process."""
        return self._head

    def wait_healthy(self, timeout_s: float, *, tell: Callable[[str], None] | None = None) -> None:
        """Waits until every slice is up.

        Args:
            timeout_s: How long.
            tell: Is called every ten seconds or so with what is still missing.

        Raises:
            ClusterStartError: If the head ended, or not all slices are up at the deadline.
        """
        try:
            with self.connect(min(timeout_s, _CONTROL_DEADLINE_S)) as connection:
                self._wait_healthy(connection, timeout_s, tell)
        except (WaitTimeout, ControlError) as error:
            raise ClusterStartError(self._why(error)) from None

    def _wait_healthy(
        self, connection: ControlConnection, timeout_s: float, tell: Callable[[str], None] | None
    ) -> None:
        began_at = told_at = time.monotonic()
        while True:
            left_s = max(0.1, began_at + timeout_s - time.monotonic())
            try:
                connection.call("wait_healthy", timeout_s=min(left_s, _LOOK_EVERY_S))
                return
            except WaitTimeout as error:
                if left_s <= _LOOK_EVERY_S:
                    raise WaitTimeout(error.what, timeout_s) from None
                _check_hope(connection.call("status"), self.config.log_dir)
                if tell is not None and time.monotonic() - told_at > _TELL_EVERY_S:
                    told_at = time.monotonic()
                    tell(f"still waiting for {error.what}")

    def connect(self, timeout_s: float = _CONTROL_DEADLINE_S) -> ControlConnection:
        """A connection to the head's control socket; waits for the head to open it.

        Raises:
            ClusterStartError: If the head has ended.
            WaitTimeout: If it has not opened it at the deadline.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return ControlConnection(self.config.control_socket)
            except NoClusterError:
                if self._head.poll() is not None:
                    raise ClusterStartError(self._why(None)) from None
                if time.monotonic() > deadline:
                    raise WaitTimeout("the head to open its control socket", timeout_s) from None
            time.sleep(0.005)

    def _why(self, error: RegrowError | None) -> str:
        """Why the cluster did not start, in one line."""
        # A head that fails closes its connections a little before it has ended.
        cause = self._head.wait(1.0) if isinstance(error, ControlError) else self._head.poll()
        if cause is None:
            return str(error)
        return f"the head did not start ({cause}){self.last_words()}"

    def last_words(self) -> str:
        """What the head's log says of its end, to be added to a message; empty if there is none."""
        return last_words(self.config, "head")

    def close(self) -> None:
        """Ends the cluster and removes what it has left; may be called more than once."""
        if os.getpid() != self._owner:
            # A fork of the owner has a copy of this object, but not the cluster.
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._end_head()
            os.close(self._lifeline)
            left = end_run(self.state.run_id)
            self._home.release(self.state)
        if left:
            logger.error("these processes of %s did not end: %s", self.state.name, sorted(left))

    def _end_head(self) -> None:
        if self._head.poll() is None:
            with contextlib.suppress(ControlError, NoClusterError):
                request(self.config.control_socket, "shutdown", timeout_s=2.0)
                self._head.wait(_SHUTDOWN_DEADLINE_S)
        if self._head.poll() is None:
            self._head.send(signal.SIGKILL)
            self._head.wait(_SHUTDOWN_DEADLINE_S)


def last_words(config: HeadConfig, name: str) -> str:
    """What the log of a process says of its end, to be added to a message; empty if there is none."""
    line = telling_line(Path(config.log_dir, f"{name}.log"))
    return f": {line.removeprefix('regrow: ')}" if line else ""


def _check_hope(status: dict[str, Any], log_dir: str) -> None:
    """Gives up on slices that fail again and again to start."""
    if status["worker_port"] is not None:
        return  # Whoever is to join may come at any time.
    for one in status["slices"]:
        index, failures = one["index"], one["start_failures"]
        if failures < _HOPELESS_FAILURES:
            continue
        # The newest log may be that of a further attempt which has not said anything yet.
        paths = [
            Path(log_dir, f"slice{index}-host{host['index']}.log{suffix}")
            for suffix in ("", ".1")
            for host in one["hosts"]
        ]
        why = next((line for path in paths if (line := telling_line(path))), "no reason given")
        why = why.removeprefix("regrow: ")
        raise ClusterStartError(f"slice {index} failed {failures} times to start: {why}")


def start_watched(
    config: HeadConfig, environ: Mapping[str, str], module: str, name: str, *arguments: str
) -> tuple[Child, int]:
    """Starts the head, or another process that is guarded as one (see `guard_head`).

    Args:
        config: What it is told.
        environ: What its environment is made of.
        module: What it runs.
        name: Of its configuration and its log.
        *arguments: Further ones on its command line.

    Returns:
        The process and the write end of its lifeline.
    """
    directory = Path(config.dir)
    Path(config.log_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
    read_end, write_end = (_above_standard(fd) for fd in os.pipe())
    own = _above_standard(os.pidfd_open(os.getpid()))
    told = dataclasses.replace(config, lifeline_fd=read_end, supervisor_fd=own)
    path = directory / ("config.json" if name == "head" else f"{name}.json")
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(told.to_json())
        with Path(config.log_dir, f"{name}.log").open("ab") as log:
            pid = spawn(
                python_argv(module, "--config", str(path), *arguments),
                server_environ(environ, config.run_id),
                output=log.fileno(),
                keep=[read_end, own],
            )
    except BaseException:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
        os.close(own)
    return Child(pid), write_end


def _above_standard(fd: int) -> int:
    """The same file under a number that is none of standard input, output and error."""
    if fd > 2:
        return fd
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return moved


def guard_head(config: HeadConfig, name: str = "regrow-head") -> None:
    """Readies this process to be the head; call it first of all, in the main thread.

    Lets go of what was inherited, and has a thread of its own wait for the end of the supervisor:
    however busy the head may be, it does not outlive it.
    """
    watched = [fd for fd in (config.lifeline_fd, config.supervisor_fd) if fd is not None]
    close_inherited(watched)
    for fd in watched:
        os.set_inheritable(fd, False)
    set_name(name)
    become_subreaper()
    if watched:
        threading.Thread(
            target=_outlast, args=(config, watched), name="supervisor-watch", daemon=True
        ).start()


def _outlast(config: HeadConfig, watched: list[int]) -> None:
    poller = select.poll()
    for fd in watched:
        poller.register(fd, select.POLLIN)
    while not poller.poll():
        pass
    print("the supervisor has ended: so does its cluster", file=sys.stderr, flush=True)  # noqa: T201
    try:
        end_run(config.run_id)
        home = Home(config.home)
        for state in home.entries():
            if state.run_id == config.run_id:
                home.release(state)
    finally:
        os._exit(1)
