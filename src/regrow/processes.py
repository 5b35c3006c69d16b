"""What Linux offers to start processes, tell them apart, and be sure that they end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

RUN_MARK: Final = "REGROW_RUN"
"""Environment variable that every process of a cluster carries, with the id of the run."""
HOST_MARK: Final = "REGROW_HOST_OF_RUN"
"""Carried, too, by hosts that do not descend from their head: these nobody's script has started."""

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36
HOSTS_VARIABLE: Final = "REGROW_HOSTS_PER_SLICE"
"""Makes JAX in a process one host of a local Multislice, whose slices have so many hosts each."""

SITE_DIRECTORY: Final = Path(__file__).resolve().parent / "client" / "site"
"""On PYTHONPATH it lets JAX be joined to what the environment names."""

_CLIENT_VARIABLES: Final = ("REGROW_TARGET", "REGROW_TOKEN", "REGROW_CLUSTER", HOSTS_VARIABLE)
# A fatal line of XLA (it is followed by a stack), or the last line of a Python traceback.
_ERROR: Final = re.compile(r"F\d{4} |[\w.]*(Error|Exception|Exit|Interrupt|Timeout)\b: |regrow: ")
# What the head logs in good days, beginning with the date; no cause of anything.
_EVERYDAY: Final = re.compile(r"\d{4}-\d\d-\d\d \S+ (DEBUG|INFO) ")
_END_S: Final = 5.0
_REAPED_S: Final = 2.0
_TAIL_BYTES: Final = 8192
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: int | bytes) -> None:
    value = argument if isinstance(argument, bytes) else ctypes.c_ulong(argument)
    nothing = ctypes.c_ulong(0)
    if _libc.prctl(ctypes.c_int(option), value, nothing, nothing, nothing) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def become_subreaper() -> None:
    """Makes orphans among this process's descendants its own children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """Sets the name that `ps` and `top` show for this process (15 bytes at most)."""
    _prctl(_PR_SET_NAME, name.encode()[:15] + b"\0")


def die_with_parent(parent: int) -> None:
    """Has the kernel end this process with SIGKILL when its parent ends.

    Ends it at once where `parent` is not (or no more) the parent of this process.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def boot_id() -> str:
    """Names this boot of this machine; process ids and start times mean nothing beyond it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


@final
@dataclass(frozen=True, slots=True)
class ProcessStat:
    """The part of /proc/PID/stat that is of use here."""

    state: str
    parent: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessStat | None:
        """Reads it; None when there is no such process."""
        try:
            # The name stands in parentheses and may itself hold blanks and parentheses.
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return None
        if len(fields) < 20:
            return None
        return cls(fields[0].decode(), int(fields[1]), int(fields[19]))


def is_running(pid: int) -> bool:
    """Whether there is such a process (a zombie is none)."""
    stat = ProcessStat.of(pid)
    return stat is not None and stat.state not in "ZX"


def is_traced(pid: int) -> bool:
    """Whether a debugger is attached to a process."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return re.search(r"^TracerPid:\s*[1-9]", status, re.MULTILINE) is not None


@final
@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process, told apart from a later one with the same number."""

    pid: int
    start_ticks: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The identity of a process that runs now."""
        stat = ProcessStat.of(pid)
        return None if stat is None else cls(pid, stat.start_ticks, boot_id())

    @classmethod
    def own(cls) -> ProcessId:
        """The identity of this process."""
        own = cls.of(os.getpid())
        assert own is not None
        return own

    def alive(self) -> bool:
        """Whether this very process still runs (a zombie does not)."""
        stat = ProcessStat.of(self.pid)
        return (
            stat is not None
            and stat.state not in "ZX"
            and stat.start_ticks == self.start_ticks
            and self.boot == boot_id()
        )


def spawn(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    output: int,
    errors: int | None = None,
    stdin: int | None = None,
    keep: Iterable[int] = (),
) -> int:
    """Starts a program in a session of its own, with no signal blocked.

    Args:
        argv: The program's absolute path and its arguments.
        environ: Its whole environment.
        output: File descriptor for its standard output.
        errors: The same for its standard error; default: that of its output.
        stdin: The same for its standard input; default: an empty one.
        keep: File descriptors that it inherits, under the same numbers.

    Returns:
        The process id; the caller must reap it.
    """
    actions: list[tuple[int, int, str, int, int] | tuple[int, int, int]] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        if stdin is None
        else (os.POSIX_SPAWN_DUP2, stdin, 0),
        (os.POSIX_SPAWN_DUP2, output, 1),
        (os.POSIX_SPAWN_DUP2, output if errors is None else errors, 2),
    ]
    # dup2 of a descriptor to itself clears its close-on-exec flag in the child only, so that no
    # other thread of this process can leak it by starting a process of its own meanwhile.
    actions += [(os.POSIX_SPAWN_DUP2, fd, fd) for fd in keep]
    return os.posix_spawn(
        argv[0],
        list(argv),
        dict(environ),
        file_actions=actions,
        setsid=True,
        setsigmask=(),
        setsigdef=(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD),
    )


def close_inherited(keep: Iterable[int]) -> None:
    """Closes every file descriptor but the standard three and those to keep."""
    low = 3
    for fd in sorted({fd for fd in keep if fd >= low}):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))


def describe_exit(code: int, status: int) -> str:
    """Tells in words how a process ended, from `si_code` and `si_status` of waitid."""
    if code == os.CLD_EXITED:
        return f"exit status {status}"
    try:
        name = signal.Signals(status).name
    except ValueError:
        name = "a signal"
    return f"{name} (signal {status})"


def has_ended(pidfd: int) -> bool:
    """Whether a process has, whosever child it is."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


@final
class Child:
    """A child of this process, watched through a file descriptor of its own.

    Attributes:
        pid: Its process id, which stays its own until `poll` has reaped it.
        fd: Becomes readable when it ends.
        cause: How it ended, None while it runs.
        status: Exit status as a shell tells it (128 + n for signal n), None while it runs.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.fd = os.pidfd_open(pid)
        self.cause: str | None = None
        self.status: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> str | None:
        """Reaps the child if it has ended; returns how, or None while it runs."""
        with self._lock:
            return self.cause or self._reap()

    def _reap(self) -> str | None:
        try:
            info = os.waitid(os.P_PIDFD, self.fd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            # Somebody else reaped it (a user's SIGCHLD handler, say).
            if not has_ended(self.fd):
                return None
            self.cause, self.status = "an exit status that was lost", 1
        else:
            if info is None:
                return None
            exited = info.si_code == os.CLD_EXITED
            self.cause = describe_exit(info.si_code, info.si_status)
            self.status = info.si_status if exited else 128 + info.si_status
        os.close(self.fd)
        return self.cause

    def wait(self, timeout_s: float) -> str | None:
        """Waits until the child has ended; returns how, or None after the deadline."""
        deadline = time.monotonic() + timeout_s
        while self.poll() is None and (left := deadline - time.monotonic()) > 0:
            poller = select.poll()
            poller.register(self.fd, select.POLLIN)
            # Another thread may reap it, and thereby close the descriptor, meanwhile.
            poller.poll(min(left, 0.25) * 1000)
        return self.cause

    def send(self, signum: int) -> None:
        """Sends a signal; nothing happens when the child has ended."""
        with self._lock:
            if self.cause is None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self.fd, signum)


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _carries(pid: int, mark: bytes) -> bool:
    try:
        return mark in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def _parents() -> dict[int, int]:
    """Parent of each process."""
    return {pid: stat.parent for pid in _pids() if (stat := ProcessStat.of(pid)) is not None}


def children_of(pid: int) -> set[int]:
    """Process ids of the children of a process."""
    return {child for child, parent in _parents().items() if parent == pid}


def descendants_of(roots: set[int]) -> set[int]:
    """Process ids of what descends from `roots`, these themselves left out."""
    return _below(roots, _parents())


def _below(roots: set[int], parents: Mapping[int, int]) -> set[int]:
    found: set[int] = set()
    while fresh := {
        pid for pid, parent in parents.items() if parent in roots | found and pid not in found
    }:
        found |= fresh
    return found - roots


def name_of(pid: int) -> str:
    """The name that `ps` shows for a process (15 bytes at most); empty if there is none."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").rstrip("\n")
    except OSError:
        return ""


def ancestor(pid: int, name: str) -> int | None:
    """The nearest process of a name that a process descends from; None if there is none."""
    stat = ProcessStat.of(pid)
    while stat is not None and stat.parent > 1:
        if name_of(stat.parent) == name:
            return stat.parent
        stat = ProcessStat.of(stat.parent)
    return None


def marked(run_id: str, *, by: str = RUN_MARK) -> set[int]:
    """Process ids of a run: those that carry its mark, and the descendants of these.

    A descendant that was started with an emptied environment is found through its parent.
    """
    mark = f"\0{by}={run_id}\0".encode()
    parents = _parents()
    found = {pid for pid in parents if _carries(pid, mark)}
    return found | _below(found, parents)


def end_all(pids_now: Iterable[int], *, signum: int = signal.SIGKILL) -> set[int]:
    """Sends a signal to processes; returns those that were there and have not yet ended."""
    reached: set[int] = set()
    for pid in filter(is_running, set(pids_now) - {os.getpid(), 1}):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)
            reached.add(pid)
    return reached


def end_child(pid: int) -> None:
    """Ends a child of this process with SIGKILL, and reaps it."""
    try:
        child = Child(pid)
    except ProcessLookupError:
        return
    child.send(signal.SIGKILL)
    if child.wait(_END_S) is None:
        os.close(child.fd)


def end_run(run_id: str) -> set[int]:
    """Ends every process of a run with SIGKILL; returns those that the deadline left over."""
    deadline = time.monotonic() + _END_S
    while left := end_all(marked(run_id)):
        if time.monotonic() > deadline:
            return left
        time.sleep(0.005)
    return set()


@contextlib.contextmanager
def adopted_reaped() -> Iterator[None]:
    """Has this process inherit the orphans below it, and reaps its children at the end.

    Only for a process that has no children of its own that anybody else waits for.
    """
    become_subreaper()
    try:
        yield
    finally:
        deadline = time.monotonic() + _REAPED_S
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < deadline:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(0.005)


def python_argv(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module of this installation with this interpreter.

    With -P, so that a file in the current directory that is named like a library is not taken
    for it.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def server_environ(base: Mapping[str, str], run_id: str) -> dict[str, str]:
    """The environment of a head: that of a user who may be a client of another cluster."""
    environ = {
        name: value for name, value in base.items() if not name.startswith(_CLIENT_VARIABLES)
    }
    # With that directory on its path Python would make itself a client.
    kept = _others_than_site(environ.pop("PYTHONPATH", ""))
    if kept:
        environ["PYTHONPATH"] = os.pathsep.join(kept)
    return environ | {RUN_MARK: run_id}


def with_site(pythonpath: str) -> str:
    """A PYTHONPATH with the directory in front that joins JAX to what the environment names."""
    return os.pathsep.join([str(SITE_DIRECTORY), *_others_than_site(pythonpath)])


def _others_than_site(pythonpath: str) -> list[str]:
    paths = pythonpath.split(os.pathsep)
    return [path for path in paths if path and Path(path) != SITE_DIRECTORY]


def telling_line(path: Path) -> str:
    """The line near the end of a log that tells why its process died; empty if there is none."""
    lines = tail(path, lines=60)
    errors = [line for line in lines if _ERROR.match(line)]
    return " ".join((errors or _unusual(lines) or [""])[-1].split())


def _unusual(lines: Iterable[str]) -> list[str]:
    """Without the everyday entries of a log; what is indented goes on with the entry before."""
    found, everyday = [], False
    for line in lines:
        everyday = bool(_EVERYDAY.match(line)) or (everyday and line[0].isspace())
        if not everyday:
            found.append(line)
    return found


def tail(path: Path, *, lines: int = 5) -> list[str]:
    """The last lines of a log that hold something; empty when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-lines:]
