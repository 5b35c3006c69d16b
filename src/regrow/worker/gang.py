"""Programs across hosts: one gang for each epoch, and its quick end when a member is lost.

A gang is a PJRT client whose collectives reach the other members over gloo. XLA cannot mend a broken
gang: ranks that wait for a dead peer wait for minutes. So nobody waits for it: what is in flight is
poisoned (its outputs become errors at once), the links are cut (which frees most stuck threads), the
gang is put aside, and the next program across hosts runs in the gang of a new epoch.

Three rules keep survivors alive, each of them measured:
- At most one program of a gang is in flight. A rank that failed and ran ahead into the next
  collective makes gloo abort the peers with "Received data size doesn't match".
- No callback for missed heartbeats and heartbeats that never end: the agent's own reaction to an error
  is to abort the process. The head watches the hosts instead.
- A client that was put aside is kept for a while: to drop the last reference to one with a stuck
  collective blocks the thread that does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, final

import jax
from jaxlib import _jax
from jaxlib import xla_client as xc

from regrow.channel.commands import FormEpoch
from regrow.errors import Code, WaitTimeout
from regrow.worker.callbacks import user_error
from regrow.worker.platform import Domain, shards_of
from regrow.worker.store import PartError, epoch_ended

log = logging.getLogger(__name__)

NEVER_S: Final = 1_000_000
_CONNECT_S: Final = 30
_TOPOLOGY_MINUTES: Final = 1
_IDS_PER_NODE: Final = 2048
_KEEP_S: Final = 25.0
_IN_FLIGHT: Final = 4
_CLOSER_S: Final = 0.05
_THREADS_PER_DEVICE: Final = 2
_nproc_lock = threading.Lock()
# Gangs of two epochs may be joining at once; each must find its own port.
_listening_lock = threading.Lock()


@final
class _Launch:
    """A launch that is watched: its number, a token for its end, and one of its results if any."""

    __slots__ = ("number", "result", "token")

    def __init__(self, number: int, token: Any, result: Any) -> None:
        self.number = number
        self.token = token
        self.result = result

    def ended_devices(self) -> list[Any]:
        """What is there of the result: an array, or an error, of each device that has ended."""
        if not isinstance(self.result, jax.Array):
            return []
        shards = shards_of(self.result)
        return [shard for shard in shards if not shard.is_deleted() and shard.is_ready()]


@final
class Gang:
    """This host's membership in one epoch."""

    def __init__(
        self,
        form: FormEpoch,
        local_devices: int,
        hostname: str,
        on_formed: Callable[[int, int], None],
        on_broken: Callable[[int, int, str], None],
    ) -> None:
        """Begins to join, on a thread of its own; `wait_formed` says when it is done.

        Args:
            form: Who the members are and where they meet.
            local_devices: How many devices this host has.
            hostname: Address that collectives listen on.
            on_formed: Called with the epoch and the port of the collectives.
            on_broken: Called with the epoch, the launch (or 0) and the text of the first failure.
        """
        self.epoch = form.epoch
        self.domain: Domain | None = None
        self.failure: PartError | None = None
        self._form = form
        self._local_devices = local_devices
        self._hostname = hostname
        self._on_formed = on_formed
        self._on_broken = on_broken
        self._port = 0
        self._agent: Any = None
        self._address = ""
        self._addressed = threading.Event()
        self._formed = threading.Event()
        self._launches: deque[int] = deque(maxlen=_IN_FLIGHT)
        self._last: Any = None
        self._watch: deque[_Launch] = deque()
        self._watched = threading.Semaphore(0)
        self._present: _Launch | None = None
        self._ended = threading.Event()
        self._retired = False
        threading.Thread(target=self._run, name=f"epoch-{self.epoch}", daemon=True).start()

    # --- joining ---

    def _run(self) -> None:
        try:
            self._join()
        except Exception as error:  # noqa: BLE001 - every cause is reported to the head
            self._break(0, f"could not join epoch {self.epoch}: {error}")
            return
        finally:
            self._formed.set()
        threading.Thread(target=self._look_closer, name="epoch-closer", daemon=True).start()
        self._watch_launches()
        self._ended.set()

    def meet_at(self, address: str) -> None:
        """Tells where the members meet; any thread."""
        self._address = address
        self._addressed.set()

    def _join(self) -> None:
        form = self._form
        if not self._addressed.wait(_CONNECT_S):
            raise WaitTimeout(f"the address of epoch {self.epoch}", _CONNECT_S)
        if self.failure is not None:
            raise self.failure.fresh()
        agent = _jax.get_distributed_runtime_client(
            self._address,
            form.node,
            init_timeout=_CONNECT_S,
            heartbeat_timeout=NEVER_S,
            shutdown_timeout=1,
            shutdown_on_destruction=False,
            use_compression=False,
        )
        agent.connect()
        self._agent = agent
        with _listening_lock:
            before = set(_sockets(listening=True))
            collectives = _jax.make_gloo_tcp_collectives(agent, hostname=self._hostname)
            ports = [port for fd, (port, _) in _sockets(listening=True).items() if fd not in before]
        with _enough_threads(self._local_devices):
            client = self._make_client(agent, collectives)
        self._enter_domain(client, ports)

    def _make_client(self, agent: Any, collectives: Any) -> Any:
        form = self._form
        return xc.make_cpu_client(
            asynchronous=True,
            distributed_client=agent,
            node_id=form.node,
            num_nodes=len(form.members),
            collectives=collectives,
            num_devices=self._local_devices,
            get_local_topology_timeout_minutes=_TOPOLOGY_MINUTES,
            get_global_topology_timeout_minutes=_TOPOLOGY_MINUTES,
        )

    def _enter_domain(self, client: Any, ports: list[int]) -> None:
        form = self._form
        by_id = {device.id: device for device in client.devices()}
        devices = {
            logical: by_id[node * _IDS_PER_NODE + ordinal]
            for node, members in enumerate(form.members)
            for ordinal, logical in enumerate(members)
        }
        domain = Domain(client, devices, form.members[form.node])
        domain.epoch = self.epoch
        self._port = ports[0] if len(ports) == 1 else 0
        self.domain = domain
        if self.failure is None:
            self._on_formed(self.epoch, self._port)

    def wait_formed(self) -> Domain:
        """The domain of the gang, once it is formed.

        Raises:
            PartError: It could not be formed, or its epoch has ended.
        """
        self._formed.wait(_CONNECT_S + 60 * _TOPOLOGY_MINUTES)
        if self.failure is not None:
            raise self.failure.fresh()
        if self.domain is None:
            raise PartError(Code.UNKNOWN, f"epoch {self.epoch} was not formed in time", self.epoch)
        return self.domain

    # --- launches ---

    def enter(self, launch: int) -> None:
        """Waits for the turn of a launch: until the one before it has ended.

        Raises:
            PartError: The epoch has ended.
        """
        if self._last is not None and self.failure is None:
            self._wait(self._last)
        if self.failure is not None:
            raise self.failure.fresh()
        self._launches.append(launch)

    def _wait(self, token: Any) -> None:
        try:
            token.block_until_ready()
        except Exception as error:  # noqa: BLE001 - the program's own error is told by its outputs
            log.debug("a launch of epoch %d failed: %s", self.epoch, error)

    def launched(self, launch: int, token: Any, result: Any) -> None:
        """Takes note of a launch, by a token that is ready when it has ended, and a result."""
        self._last = token
        self._watch.append(_Launch(launch, token, result))
        self._watched.release()
        if self.failure is not None:
            # The epoch ended between `enter` and the launch, too early for the poison.
            self._poison([launch], self.failure.message)

    def not_launched(self, launch: int, error: PartError) -> None:
        """A launch that this host could not make: its peers wait for it in vain."""
        self._break(launch, error.message)

    def _watch_launches(self) -> None:
        while self.failure is None:
            if not self._watched.acquire(timeout=5.0):
                continue
            if not self._watch:
                if self._retired or self.failure is not None:
                    return
                continue
            self._present = present = self._watch.popleft()
            if not self._watch_token(present.number, present.token):
                return
            self._present = None

    def _watch_token(self, launch: int, token: Any) -> bool:
        """Waits for the end of a launch, or of one device's part in it; whether it went well."""
        try:
            token.block_until_ready()
        except Exception as error:  # noqa: BLE001 - reported to the head, which judges
            meant = user_error(error)
            self._break(launch, str(error) if meant is None else meant.message)
            return False
        return True

    def _look_closer(self) -> None:
        """Looks for devices that have failed, in a launch that takes its time.

        When a link breaks, one device of a host may fail while another waits for a peer that has
        failed too: then the launch as a whole does not end, and its token tells nothing.
        """
        seen: _Launch | None = None
        while not self._ended.wait(_CLOSER_S):
            before, seen = seen, self._present
            if seen is None or seen is not before:
                continue
            if not all(self._watch_token(seen.number, shard) for shard in seen.ended_devices()):
                return

    def _break(self, launch: int, message: str) -> None:
        if self.failure is None:
            self._on_broken(self.epoch, launch, message)

    # --- the end ---

    def retire(self) -> None:
        """Leaves in good order: the programs in flight end by themselves, there are no new ones."""
        if self.failure is None and not self._retired:
            self._retired = True
            self._watched.release()
            threading.Thread(target=self._put_aside, name="epoch-reaper", daemon=True).start()

    def fail(self, message: str, ports: Sequence[int]) -> None:
        """Ends the gang at once; any thread. What is in flight becomes an error with this text."""
        if self.failure is not None:
            return
        self.failure = PartError(Code.DATA_LOSS, message, self.epoch)
        self._formed.set()
        self._addressed.set()
        poisoned = self._poison(list(self._launches), message)
        cut = _cut(self._port, ports)
        log.info("epoch %d ends: %d launches poisoned, %d links cut", self.epoch, poisoned, cut)
        self._watched.release()
        if not self._retired:
            threading.Thread(target=self._put_aside, name="epoch-reaper", daemon=True).start()

    def _poison(self, launches: Iterable[int], message: str) -> int:
        domain = self.domain
        if domain is None:
            return 0
        text = epoch_ended(self.epoch, message)
        return sum(
            bool(device.poison_execution(launch, text))
            for launch in launches
            for device in domain.client.local_devices()
        )

    def _put_aside(self) -> None:
        agent, last = self._agent, self._last
        if self._retired and last is not None:
            self._wait(last)
        if agent is not None:
            try:
                agent.shutdown()
            except Exception as error:  # noqa: BLE001 - the service may be gone with the lost host
                log.info("leaving epoch %d: %s", self.epoch, error)
        time.sleep(_KEEP_S)
        self._last = self._present = None
        self._watch.clear()
        self.domain = None
        self._agent = None
        jax.clear_caches()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _enough_threads(devices: int) -> Iterator[None]:
    """Gives the client that is made here a thread for each collective that may block, and more.

    XLA runs collectives on a pool with a thread for each core. Where devices outnumber cores, the
    threads of two hosts can all be taken by collectives that wait for each other's other devices.
    XLA reads the pool's size from NPROC.
    """
    with _nproc_lock:
        os.environ["NPROC"] = str((os.cpu_count() or 1) + _THREADS_PER_DEVICE * devices)
        try:
            yield
        finally:
            del os.environ["NPROC"]


def _sockets(*, listening: bool) -> dict[int, tuple[int, int]]:
    """TCP sockets of this process: (local port, peer port or 0) by file descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with sock:
            try:
                if _is_tcp(sock, listening):
                    peer = 0 if listening else sock.getpeername()[1]
                    found[int(name)] = (sock.getsockname()[1], peer)
            except OSError:
                continue
    return found


def _is_tcp(sock: socket.socket, listening: bool) -> bool:
    inet = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
    return inet and bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) == listening


def _cut(port: int, peer_ports: Iterable[int]) -> int:
    """Shuts down the sockets of one gang's collectives, and no others; how many."""
    cut, peers = 0, set(peer_ports)
    for fd, (local, peer) in _sockets(listening=False).items():
        if not (port and local == port) and peer not in peers:
            continue
        try:
            with socket.socket(fileno=os.dup(fd)) as sock:
                if sock.getsockname()[1] == local:  # The descriptor may be another socket by now.
                    sock.shutdown(socket.SHUT_RDWR)
                    cut += 1
        except OSError:
            continue
    return cut
