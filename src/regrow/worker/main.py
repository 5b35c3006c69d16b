"""The entry points of the processes beside the head: a host of a slice, the compiler."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, NoReturn, Protocol

from regrow.channel import commands as c
from regrow.channel.handshake import Identity, Role
from regrow.channel.worker_end import WorkerChannel
from regrow.control import ControlConnection
from regrow.errors import RegrowError
from regrow.suspend.points import reach
from regrow.worker import metadata
from regrow.worker.garbage import collect_aside, share_one_arena
from regrow.worker.platform import initialise, make_home_client

log = logging.getLogger(__name__)

_CONNECT_S: Final = 30.0
_SWITCH_S: Final = 0.0005
HEAD_GONE: Final = 75
"""Exit status of a process that lost its head."""


class Service(Protocol):
    """What both kinds of process have in common."""

    def connect(self, sender: Any) -> None:
        """Names the channel that reports go to."""
        ...

    def on_payload(self, payload: bytes | memoryview) -> None:
        """Takes one payload; the reader's thread."""
        ...

    def run(self) -> None:
        """Works until the end; the main thread."""
        ...

    def work_done(self) -> int:
        """How many commands were carried out; any thread."""
        ...

    def stop(self) -> None:
        """Makes `run` return; any thread."""
        ...


def run(spec: dict[str, Any], client: Any = None) -> NoReturn:
    """A host of a slice. `spec` is that of `HostSpec.for_worker`; `client` the home client, if made."""
    from regrow.worker.gang import enough_threads
    from regrow.worker.host import Host

    share_one_arena()

    def make() -> Service:
        endpoint = spec["endpoint"]
        near = {} if isinstance(endpoint, str) else {"head_host": endpoint[0]}
        host = Host(spec["devices"], spec.get("hostname", "127.0.0.1"), client, **near)
        enough_threads(len(spec["devices"]))
        return host

    _serve(spec, "worker", make)


def run_warm(spec: dict[str, Any]) -> NoReturn:
    """A host that waits to be one of some head's.

    Args:
        spec: Where it waits (`socket`) and as whom (`key`), and how many `devices` it has.
    """
    from regrow.launchers.leased import unpack_spec

    logging.basicConfig(level=spec.get("log_level", "INFO").upper(), stream=sys.stderr)
    share_one_arena()
    initialise()
    client = make_home_client(spec["devices"])
    try:
        with ControlConnection(spec["socket"]) as machines:
            machines.call("warm", key=spec["key"])
            told: list[Any] = []
            while not told:
                select.select([machines], [], [])
                told = list(machines.take()[0])
    except RegrowError as error:
        log.info("not needed any more: %s", error)
        os._exit(0)
    run(unpack_spec(told[0]), client)


def run_compiler(spec: dict[str, Any]) -> NoReturn:
    """The compiler. `spec["devices"]` lists all devices of the cluster."""
    from regrow.worker.compiler import Compiler

    _serve(spec, "compiler", lambda: Compiler(len(spec["devices"])))


def _serve(spec: dict[str, Any], role: Role, make: Callable[[], Service]) -> NoReturn:
    logging.basicConfig(level=spec.get("log_level", "INFO").upper(), stream=sys.stderr)
    try:
        status = _serve_until_end(spec, role, make)
    except RegrowError as error:
        log.error("%s", error)
        status = 1
    # XLA's threads may hang in a dead collective: nothing is gained by waiting for them.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # The disk of the logs may be full.
            stream.flush()
    os._exit(status)


def _be_considerate() -> None:
    """No thread of this process interrupts what runs on its core the moment it wakes up.

    Where head, client and the hosts of several slices share a machine, a host that gets its command
    would stop the head before the next host has got its own; and threads of XLA that wake each other
    all the time would stop those that compute. It gets as much of the processor as any other process.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _notices() -> Callable[[Callable[[str], None]], None]:
    """Takes SIGTERM as the notice that it is; returns what names who is to be told.

    The head decides what follows: it has the state saved, or this process ended at once. The main thread
    may be busy in XLA, where Python handles no signal, so another one is woken by the kernel.
    """
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)

    def watch(tell: Callable[[str], None]) -> None:
        def wait() -> None:
            with theirs:
                while received := ours.recv(1):
                    if received[0] == signal.SIGTERM:
                        tell("SIGTERM")

        threading.Thread(target=wait, name="notices", daemon=True).start()

    return watch


def _serve_until_end(spec: dict[str, Any], role: Role, make: Callable[[], Service]) -> int:
    from jaxlib.version import __version__ as jaxlib_version

    _be_considerate()
    # The reader must not wait long for the interpreter while the executor is busy.
    sys.setswitchinterval(_SWITCH_S)
    initialise()
    service = make()
    watch_for = _notices() if role == "worker" else None
    collect_aside(service.work_done)
    channel = _channel(spec, role, service)
    service.connect(channel)
    channel.connect(_CONNECT_S)
    channel.send(c.pack_all([c.Up(jaxlib_version, True)]))
    if watch_for is not None:

        def tell(why: str) -> None:
            channel.send(c.pack_all([c.Noticed(why)]))

        watch_for(tell)
        metadata.watch(tell)
    service.run()
    reach("worker-leaves")
    channel.close()
    return 0


def _channel(spec: dict[str, Any], role: Role, service: Service) -> WorkerChannel:
    """The way to the head, without which this process ends."""

    def on_lost(cause: str) -> None:
        log.error("the head is gone: %s", cause)
        os._exit(HEAD_GONE)

    endpoint = spec["endpoint"]
    return WorkerChannel(
        endpoint if isinstance(endpoint, str) else (endpoint[0], endpoint[1]),
        spec["secret"],
        Identity(role, spec["slice"], spec["host"], spec["incarnation"], os.getpid()),
        service.on_payload,
        on_lost,
        budget_s=spec.get("reconnect_s", 3.0),
    )
