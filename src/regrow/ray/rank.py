"""A rank of a job, on its host: runs the program, and ends it when the attempt is over.

    python -m regrow.ray.rank -- COMMAND...

The program is ended, with all that it has started, when
- a later attempt has begun (the token of the job in the Ray cluster, or that of its directory),
- Ray's supervisor of this job or the raylet of this host has ended: nobody would tell us any more,
- the head of the Ray cluster has not answered for a while,
- it, Ray's supervisor or what Ray knows as the job hangs (SIGSTOP),
- Ray stops the job (SIGTERM).
It ends with this process, too (PR_SET_PDEATHSIG), which is watched in turn by what Ray knows as the job.
That the raylet has ended is told through the head, who would find it out a second later.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Final, final

from regrow.errors import FencedError, NoClusterError, RegrowError
from regrow.processes import (
    Child,
    ProcessStat,
    adopted_reaped,
    descendants_of,
    die_with_parent,
    end_all,
    has_ended,
    name_of,
    set_name,
)
from regrow.ray.attempts import FENCED_STATUS, ORPHANED_STATUS
from regrow.ray.cluster import KeyStore
from regrow.ray.fence import AttemptId, current_attempt, lost_key
from regrow.ray.hung import LOOK_S, Hung
from regrow.ray.knock import ADDRESS_VARIABLE
from regrow.ray.leaving import see_supervisor_end

LEASE_S: Final = 10.0
"""How long a rank goes on without hearing from the head, in seconds."""
LOOK_EVERY_S: Final = 0.5
"""How often a rank asks whether it is still of the present attempt, in seconds."""
_GRACE_S: Final = 2.0
# The entrypoint, Ray's supervisor of this job, and the raylet.
_OWNERS: Final = 3


class _Over(Exception):
    """The program is to be ended."""

    def __init__(self, why: str, status: int) -> None:
        super().__init__(why)
        self.status = status


@final
class Lease:
    """Asks, on a thread of its own, whether an attempt is still the present one.

    Attributes:
        fd: Becomes readable when it is not.
    """

    def __init__(self, attempt: AttemptId, address: str) -> None:
        """Asks once, and from then on again and again.

        Raises:
            FencedError: If it is over already.
            NoClusterError: If the head does not answer.
        """
        self._attempt = attempt
        self._keys = KeyStore(address)
        self._look()
        self.fd, self._writer = os.pipe()
        self._why: _Over | None = None
        threading.Thread(target=self._watch, name="lease", daemon=True).start()

    def why(self) -> _Over:
        """Why it is over."""
        return self._why or _Over("the lease has ended", ORPHANED_STATUS)

    def tell_lost(self) -> None:
        """Tells that the raylet of this host, and so this rank, has ended."""
        with contextlib.suppress(RegrowError, OSError):
            self._keys.put(lost_key(self._attempt.job), self._attempt.lost_text)

    def _look(self) -> None:
        attempt = self._attempt
        present = self._keys.get(attempt.key)
        if present is not None and present != attempt.token:
            raise FencedError(f"a later attempt of {attempt.job} has begun")
        attempt.check()

    def _watch(self) -> None:
        heard = time.monotonic()
        while self._why is None:
            time.sleep(LOOK_EVERY_S)
            try:
                self._look()
                heard = time.monotonic()
            except FencedError as error:
                self._why = _Over(str(error), FENCED_STATUS)
            except (RegrowError, OSError) as error:
                if time.monotonic() - heard > LEASE_S:
                    text = f"the Ray head was not heard for {LEASE_S:g} s: {error}"
                    self._why = _Over(text, ORPHANED_STATUS)
        os.write(self._writer, b"x")


@final
class Rank:
    """The program, and whatever may end it."""

    def __init__(self, argv: Sequence[str], lease: Lease) -> None:
        """Starts it.

        Raises:
            OSError: If it cannot be started.
        """
        self._lease = lease
        self._signals, self._signal_writer = os.pipe()
        os.set_blocking(self._signal_writer, False)
        signal.set_wakeup_fd(self._signal_writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        self._owners = _owners()
        parent = os.getpid()
        popen = subprocess.Popen(
            argv,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509 - the lease is its thread
        )
        popen.returncode = 0
        self._program = Child(popen.pid)
        # Whether the raylet, the last one, hangs is found by the head.
        self._hung = Hung([popen.pid, *list(self._owners.values())[:2]])
        self._looked = time.monotonic()

    def run(self) -> int:
        """Waits for its end, whatever causes it; returns the exit status."""
        try:
            self._wait()
            return _status(self._program)
        except _Over as over:
            _say(f"rank ends: {over}")
            return over.status
        finally:
            end_descendants({os.getpid()})
            if self._raylet_has_ended():
                self._lease.tell_lost()

    def _raylet_has_ended(self) -> bool:
        """Whether the raylet has, whose death Ray's supervisor notices as soon as we do."""
        return len(self._owners) == _OWNERS and has_ended(list(self._owners)[-1])

    def _wait(self) -> None:
        poller = select.poll()
        for descriptor in (self._program.fd, self._lease.fd, self._signals, *self._owners):
            poller.register(descriptor, select.POLLIN)
        while self._program.poll() is None:
            ready = {descriptor for descriptor, _ in poller.poll(LOOK_S * 1000)}
            self._end_if_hung()
            if ready & set(self._owners):
                raise _Over("the raylet of this host has ended", ORPHANED_STATUS)
            if self._lease.fd in ready:
                raise self._lease.why()
            if self._signals in ready:
                number = os.read(self._signals, 64)[0]
                if number != signal.SIGCHLD:
                    self._politely(number)

    def _end_if_hung(self) -> None:
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        hung = self._hung.look()
        if hung is None:
            return
        if hung != self._program.pid:
            # Ray takes the job for running until its supervisor has ended.
            for descriptor in list(self._owners)[:2]:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        raise _Over(f"{name_of(hung) or hung} hangs (SIGSTOP)", ORPHANED_STATUS)

    def _politely(self, number: int) -> None:
        """Passes a signal on, and leaves the program a moment."""
        self._program.send(number)
        self._program.wait(_GRACE_S)
        raise _Over(f"{signal.Signals(number).name}", 128 + number)


def end_descendants(roots: set[int]) -> None:
    """Ends all that has been started below, and reaps what is this process's own."""
    while end_all(descendants_of(roots)):
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _owners() -> dict[int, int]:
    """The entrypoint, Ray's supervisor of this job, and this host's raylet, by descriptors of them."""
    found: dict[int, int] = {}
    pid = os.getppid()
    for _ in range(_OWNERS):
        with contextlib.suppress(ProcessLookupError):
            found[os.pidfd_open(pid)] = pid
        stat = ProcessStat.of(pid)
        if stat is None or stat.parent <= 1:
            break
        pid = stat.parent
    return found


def main(arguments: Sequence[str]) -> int:
    """Runs a rank; returns the exit status of its program, or why it was ended."""
    argv = list(arguments[1:] if arguments[:1] == ["--"] else arguments)
    set_name("regrow-rank")
    try:
        attempt = current_attempt()
        lease = Lease(attempt, os.environ.get(ADDRESS_VARIABLE, ""))
        with adopted_reaped():
            return Rank(argv, lease).run()
    except FencedError as error:
        return _refused(f"rank does not begin: {error}", FENCED_STATUS)
    except NoClusterError as error:
        return _refused(f"rank does not begin: {error}", ORPHANED_STATUS)
    except (RegrowError, OSError) as error:
        return _refused(str(error), 127)


def _refused(text: str, status: int) -> int:
    _say(text)
    return status


def _say(text: str) -> None:
    print(f"regrow: {text}", file=sys.stderr, flush=True)  # noqa: T201


def entrypoint(arguments: Sequence[str]) -> int:
    """Has a process of its own be the rank, and waits for it; returns the exit status.

    A worker of Ray that loses its raylet ends its own children with SIGKILL, who then cannot end
    theirs: so what Ray knows as the job is not who looks after the program.
    """
    rank = os.fork()
    if rank == 0:
        os.setsid()
        status = main(arguments)
        # XLA's and Ray's threads have nothing to do any more.
        os._exit(status)
    keeper = Child(rank)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _: _pass_on(rank, received))
    with adopted_reaped():
        status = _await_keeper(keeper)
        end_descendants({os.getpid()})
    see_supervisor_end()
    return status


def _pass_on(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def _await_keeper(keeper: Child) -> int:
    """Waits for who looks after the program; ends one that hangs, with all that it looks after."""
    hung = Hung([keeper.pid])
    while keeper.wait(LOOK_S) is None:
        if hung.look() is not None:
            _say("rank ends: it hangs (SIGSTOP)")
            end_descendants({keeper.pid})
            keeper.send(signal.SIGKILL)
            keeper.wait(_GRACE_S)
            return ORPHANED_STATUS
    return _status(keeper)


def _status(child: Child) -> int:
    """The exit status of a child that has ended; whoever reads the log is told of a signal."""
    cause = child.cause or ""
    if "signal" in cause:
        _say(f"rank ends: {cause} has ended it")
    return 1 if child.status is None else child.status


if __name__ == "__main__":
    sys.exit(entrypoint(sys.argv[1:]))
