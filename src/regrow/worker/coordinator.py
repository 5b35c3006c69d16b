"""Where the members of an epoch meet: coordination services, in a process of their own.

PJRT clients need a coordination service to join. When one ends, every process that is still connected
to it aborts; so it lives neither in a slice nor in the compiler, and is closed long after its epoch.

The service lets members in one by one: its barrier, which would make the others abort when one of
them never comes, has been passed before by dummies, and with `recoverable` the real members come as
"restarted tasks".
"""

from __future__ import annotations

import logging
import socket
import threading
from typing import Any, Final, final

from jaxlib import _jax

from regrow.channel import commands as c
from regrow.worker.gang import NEVER_S

log = logging.getLogger(__name__)

_CONNECT_S: Final = 60
_KEEP_S: Final = 120.0


@final
class Coordinator:
    """Answers `OpenService` with an address, and closes services some time after `CloseService`."""

    def __init__(self, hostname: str) -> None:
        self._hostname = hostname
        self._services: dict[int, Any] = {}
        self._sender: Any = None
        self._stopped = threading.Event()

    def connect(self, sender: Any) -> None:
        """Names the channel that reports go to."""
        self._sender = sender

    def on_payload(self, payload: bytes | memoryview) -> None:
        """Takes one payload from the head; the reader's thread."""
        for command in c.unpack(payload):
            if isinstance(command, c.OpenService):
                threading.Thread(target=self._open, args=(command,), daemon=True).start()
            elif isinstance(command, c.CloseService):
                timer = threading.Timer(_KEEP_S, self._close, (command.epoch,))
                timer.daemon = True
                timer.start()
            elif isinstance(command, c.Ping):
                self._sender.send(c.pack_all([c.Pong(command.number, 0)]))
            elif isinstance(command, c.Exit):
                self.stop()

    def run(self) -> None:
        """Waits until the end; the main thread."""
        self._stopped.wait()

    def stop(self) -> None:
        """Makes `run` return."""
        self._stopped.set()

    def _open(self, command: c.OpenService) -> None:
        try:
            address, service = open_service(self._hostname, command.members)
        except Exception as error:  # noqa: BLE001 - told to the head
            self._sender.send(c.pack_all([c.Failed(command.rid, 2, str(error), 0)]))
            return
        self._services[command.epoch] = service
        self._sender.send(c.pack_all([c.Reply(command.rid, address)]))

    def _close(self, epoch: int) -> None:
        service = self._services.pop(epoch, None)
        if service is not None:
            service.shutdown()


def open_service(hostname: str, members: int) -> tuple[str, Any]:
    """Starts a service that members can join without waiting for each other: address, service."""
    address = f"{hostname}:{_free_port(hostname)}"
    service = _jax.get_distributed_runtime_service(
        address,
        members,
        heartbeat_timeout=NEVER_S,
        cluster_register_timeout=NEVER_S,
        shutdown_timeout=1,
        recoverable=True,
    )
    dummies = [
        _jax.get_distributed_runtime_client(
            address,
            node,
            init_timeout=_CONNECT_S,
            heartbeat_timeout=NEVER_S,
            shutdown_timeout=1,
            shutdown_on_destruction=False,
            use_compression=False,
        )
        for node in range(members)
    ]
    threads = [threading.Thread(target=dummy.connect, daemon=True) for dummy in dummies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_CONNECT_S)
    for dummy in dummies:
        dummy.shutdown()
    return address, service


def _free_port(hostname: str) -> int:
    with socket.socket() as sock:
        sock.bind((hostname, 0))
        port: int = sock.getsockname()[1]
        return port
