"""The supervisor of `regrow run`: a script, its cluster, and the faults that were ordered for it."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, final

from regrow.chaos.inject import Injector
from regrow.chaos.schedule import REMEDIES, AtStep, FaultEvent, format_schedule
from regrow.cli.accounts import Accounts
from regrow.cli.pulse import Pulse
from regrow.cli.report import EventReporter, say
from regrow.cli.signals import Received, SignalQueue
from regrow.cli.tee import Tee
from regrow.client.settings import DEFAULT_HEAD_DEADLINE_S
from regrow.control import ControlConnection, Event, request
from regrow.errors import ClusterError, ControlError, NoClusterError, RegrowError
from regrow.processes import (
    HOST_MARK,
    Child,
    children_of,
    descendants_of,
    die_with_parent,
    end_all,
    marked,
)
from regrow.supervise import Supervisor

if TYPE_CHECKING:
    from regrow.jobs.lease_link import LeaseLink

NOT_ELASTIC_STATUS: Final = 4
CLUSTER_STATUS: Final = 3
_FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_WATCHED: Final = (*_FORWARDED, signal.SIGCHLD)
_END_GRACE_S: Final = 10.0
_AFTER_LOSS_GRACE_S: Final = 5.0
_LEFT_BEHIND_GRACE_S: Final = 0.5
_STATUS_DEADLINE_S: Final = 2.0


@final
class Runner:
    """Runs one script on a cluster that is up.

    It is single-threaded: the script must be able to inherit a clean set of signals, and ends
    with the thread that has started it.

    Attributes:
        happened: The faults that were made while it ran.
        disturbed_at: When the first of them was that does not only undo others, in seconds since 1970;
            None: there was none.
        lost: The slices that were lost while it ran.
        out_of_time: Whether it was ended because it took too long.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        faults: Sequence[FaultEvent],
        *,
        verbose: bool = False,
        output: tuple[int | None, int | None] = (None, None),
        tees: Sequence[Tee] = (),
        limit_s: float | None = None,
        head_deadline_s: float | None = DEFAULT_HEAD_DEADLINE_S,
        accounts: Accounts | None = None,
        leases: LeaseLink | None = None,
    ) -> None:
        """Readies it.

        Args:
            supervisor: Of the cluster.
            faults: What is to happen.
            verbose: Whether more is said.
            output: Descriptors for the script's standard output and error; None: ours.
            tees: Of which it writes to, to be copied while it runs.
            limit_s: How long the script may take, in seconds; then it is ended.
            head_deadline_s: How long the head may be silent, in seconds; then it is ended.
            accounts: What is made of the timeline; None: nothing.
            leases: Of the cluster's slices; None: they are its own.
        """
        self.happened: Sequence[FaultEvent] = ()
        self.disturbed_at: float | None = None
        self.lost: list[int] = []
        self.out_of_time = False
        self._end_at = None if limit_s is None else time.monotonic() + limit_s
        self._output = output
        self._tees = tees
        self._head_deadline_s = head_deadline_s
        self._supervisor = supervisor
        self._faults = faults
        self._accounts = accounts
        self._leases = leases
        self._verbose = verbose
        self._injector: Injector | None = None
        self._reporter = EventReporter(verbose=verbose)
        self._selector = selectors.DefaultSelector()
        self._kill_at: float | None = None
        self._job_ended: str | None = None
        self._head_died = False

    def run(self, argv: Sequence[str], environ: Mapping[str, str]) -> int:
        """Runs the script until it has ended; returns the exit status for `regrow run`."""
        with (
            self._selector,
            self._connected() as self._control,
            SignalQueue(_WATCHED) as self._signals,
            self._chaos(),
        ):
            self._pulse = Pulse(self._supervisor.head, self._control, self._head_deadline_s)
            self._script = self._start(argv, environ)
            self._register()
            while self._script.poll() is None:
                self._step()
            self._end_left_behind()
            self._last_events()
            return self._status()

    @contextlib.contextmanager
    def _connected(self) -> Iterator[ControlConnection]:
        if self._leases is not None:
            yield self._leases.control
            return
        with ControlConnection(self._supervisor.config.control_socket) as control:
            control.subscribe()
            yield control

    @contextlib.contextmanager
    def _chaos(self) -> Iterator[None]:
        if not self._faults:
            yield
            return
        supervisor = self._supervisor
        with Injector(supervisor.config, supervisor.head.pid, self._faults, self._say) as injector:
            self._injector = injector
            self.happened = injector.done
            self._selector.register(injector, selectors.EVENT_READ, lambda: None)
            yield
        if injector.left:
            left = format_schedule(injector.left)
            by_step = any(isinstance(event.anchor, AtStep) for event in injector.left)
            hint = "; steps are those of regrow.elastic.at_step or record" if by_step else ""
            say(f"chaos: the script ended before these were due: {left}{hint}")

    def _say(self, text: str) -> None:
        say(f"{self._reporter.stamp()} {text}")

    def _start(self, argv: Sequence[str], environ: Mapping[str, str]) -> Child:
        supervisor = os.getpid()

        def in_child() -> None:
            die_with_parent(supervisor)
            self._signals.release_in_child()

        try:
            self._popen = subprocess.Popen(
                argv,
                env=environ,
                stdout=self._output[0],
                stderr=self._output[1],
                preexec_fn=in_child,  # noqa: PLW1509
            )
        except OSError as error:
            raise ClusterError(f"cannot run {argv[0]}: {error.strerror}") from None
        # It is waited for through a descriptor; without this Popen complains when it is dropped.
        self._popen.returncode = 0
        return Child(self._popen.pid)

    def _register(self) -> None:
        for source, callback in (
            (self._script.fd, lambda: None),
            (self._supervisor.head.fd, self._on_head_end),
            (self._control, self._on_control),
            (self._signals, self._on_signals),
        ):
            self._selector.register(source, selectors.EVENT_READ, callback)
        for tee in self._tees:
            self._selector.register(tee, selectors.EVENT_READ, tee.copy)
        if self._leases is not None:
            self._selector.register(self._leases.tenant, selectors.EVENT_READ, lambda: None)

    def _step(self) -> None:
        for key, _ in self._selector.select(self._wait_s()):
            key.data()
        self._inject()
        self._pulse.step()
        self._obey()
        if self._end_at is not None and time.monotonic() >= self._end_at:
            self._end_at = None
            self.out_of_time = True
            self._end_script(_AFTER_LOSS_GRACE_S)
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._script.send(signal.SIGKILL)
            self._kill_at = None

    def _obey(self) -> None:
        """Does what the resource manager has said."""
        if self._leases is None or self._head_died:
            return
        try:
            self._leases.obey()
        except NoClusterError as error:
            say(f"{error}; the script is ended")
            self._leases = None
            self._end_script(_AFTER_LOSS_GRACE_S)
            return
        except ControlError:
            # The head has ended, or is about to; its own descriptor tells.
            return
        if self._leases.stop_by is not None and self._kill_at is None:
            say(f"the script is stopped: {self._leases.stop_reason}")
            self._script.send(signal.SIGTERM)
            self._kill_at = self._leases.stop_by

    def _wait_s(self) -> float | None:
        """How long nothing is due."""
        due = [at - time.monotonic() for at in (self._kill_at, self._end_at) if at is not None]
        if self._leases is not None and self._leases.tenant.next_at is not None:
            due.append(self._leases.tenant.next_at - time.monotonic())
        if self._injector is not None and self._injector.next_at is not None:
            due.append(self._injector.next_at - time.monotonic())
        pulse_s = self._pulse.wait_s()
        if pulse_s is not None:
            due.append(pulse_s)
        return max(0.0, min(due)) if due else None

    def _inject(self) -> None:
        if self._injector is None:
            return
        try:
            self._injector.step()
            self._note_disturbance()
        except RegrowError:
            # The head has ended, or is about to: there is nobody left to do faults to.
            self._selector.unregister(self._injector)
            self._injector = None

    def _note_disturbance(self) -> None:
        if all(fault.fault in REMEDIES for fault in self.happened):
            # What had been ordered was refused.
            self.disturbed_at = None
        elif self.disturbed_at is None:
            self.disturbed_at = time.time()

    # --- what happens ---

    def _on_control(self) -> None:
        try:
            events, answers = self._control.take()
        except RegrowError:
            # The head has ended, or is about to; its own descriptor tells.
            self._selector.unregister(self._control)
            return
        if events or answers:
            self._pulse.heard()
        if self._leases is not None:
            events = self._leases.heard(events, answers)
        for event in events:
            self._on_event(event)

    def _last_events(self) -> None:
        """Tells what the head has told and nobody has read yet."""
        if self._control in self._selector.get_map():
            self._on_control()

    def _on_event(self, event: Event) -> None:
        self._reporter.report(event)
        if event["kind"] == "slice_lost" and event["slice"] is not None:
            self.lost.append(event["slice"])
        elif event["kind"] == "job_ends":
            self._job_ended = event["text"]
            self._end_script(_AFTER_LOSS_GRACE_S)

    def _on_head_end(self) -> None:
        self._selector.unregister(self._supervisor.head.fd)
        cause = self._supervisor.head.poll()
        self._head_died = True
        if cause == "exit status 0":
            say("the cluster was taken down; the script is ended")
        elif self._pulse.lost is not None:
            say(f"the head {self._pulse.lost}; it is ended, and so is the script")
        else:
            say(f"the head has died: {cause}{self._supervisor.last_words()}; the script is ended")
        self._end_script(_AFTER_LOSS_GRACE_S)

    def _on_signals(self) -> None:
        for received in self._signals.take():
            if received.number == signal.SIGCHLD:
                self._reap_adopted()
            else:
                self._forward(received)

    def _reap_adopted(self) -> None:
        """Reaps orphans of the script and of the head; as a subreaper we inherit them."""
        for pid in children_of(os.getpid()) - {self._script.pid, self._supervisor.head.pid}:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def _forward(self, received: Received) -> None:
        # What a terminal sends has reached the script already: it is in our process group.
        if not received.from_terminal:
            self._script.send(received.number)
        if received.number != signal.SIGINT:
            # Whoever sends these wants an end. A Ctrl-C may mean something else to the script.
            self._kill_at = self._kill_at or time.monotonic() + _END_GRACE_S

    def _end_script(self, grace_s: float) -> None:
        self._script.send(signal.SIGTERM)
        self._kill_at = time.monotonic() + grace_s

    # --- the end ---

    def _end_left_behind(self) -> None:
        """Ends what the script has started and left behind, first politely."""
        deadline = time.monotonic() + _LEFT_BEHIND_GRACE_S
        signum = signal.SIGTERM
        while end_all(self._left_behind(), signum=signum) and time.monotonic() < deadline:
            time.sleep(0.02)

    def _left_behind(self) -> set[int]:
        """What descends from us or carries the run's mark, but is not of the cluster."""
        head = self._supervisor.head.pid
        of_cluster = {head} | descendants_of({head})
        run_id = self._supervisor.state.run_id
        ours = descendants_of({os.getpid()}) | marked(run_id)
        return ours - of_cluster - marked(run_id, by=HOST_MARK)

    def _status(self) -> int:
        status = self._script.status
        assert status is not None
        if status != 0 and not self._head_died and self._pulse.failing:
            # The script's own deadline was a little earlier than ours.
            say("the head does not answer; it is ended")
            self._pulse.end("does not answer")
            return CLUSTER_STATUS
        if status != 0 and self._job_ended is None and not self._head_died:
            # A script can end of the loss before the head's word of it has reached us.
            self._job_ended = self._ask_whether_ended()
            if self._job_ended is not None:
                say(f"the job ends: {self._job_ended}")
        if self._job_ended is not None:
            return NOT_ELASTIC_STATUS
        if self._head_died and status in (128 + signal.SIGTERM, 128 + signal.SIGKILL):
            return CLUSTER_STATUS
        if self._accounts is None or self._head_died:
            return status
        path = self._supervisor.config.control_socket
        broken = self._accounts.settle(path, verbose=self._verbose)
        return status or broken

    def _ask_whether_ended(self) -> str | None:
        with contextlib.suppress(RegrowError):
            path = self._supervisor.config.control_socket
            ended = request(path, "status", timeout_s=_STATUS_DEADLINE_S).get("ended")
            return None if ended is None else str(ended)
        return None
