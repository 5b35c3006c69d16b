"""Programs across hosts: one gang for each epoch, and its quick end when a member is lost.

A gang is a PJRT client whose collectives reach the other members over gloo. XLA cannot mend a broken
gang: ranks that wait for a dead peer wait for minutes. So nobody waits for it: what is in flight is
poisoned (its outputs become errors at once), the links are cut (which frees most stuck threads), the
gang is put aside, and the next program across hosts runs in the gang of a new epoch.

Four rules keep survivors alive, each of them measured:
- At most one program of a gang is in flight, and none after one that failed here. A rank that ran
  ahead into the next collective gives its peers wrong values, or makes gloo abort them with "Received
  data size doesn't match".
- A launch is made by a thread that can be left alone with it (see `regrow.worker.maker`).
- No callback for missed heartbeats, and deadlines that never come: the agent's own reaction to an
  error is to abort the process. The head watches the hosts instead.
- A client that was put aside is kept for a while, and ended by a thread that nobody waits for (see
  `regrow.worker.garbage`): to end one with a stuck collective blocks the thread that does.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar, final

import jax
from jaxlib import _jax
from jaxlib import xla_client as xc

from regrow.channel.commands import EpochBroken, FailEpoch, FormEpoch
from regrow.errors import Code
from regrow.worker.callbacks import marked
from regrow.worker.garbage import collect
from regrow.worker.maker import Abandoned, Maker
from regrow.worker.platform import Domain, shards_of
from regrow.worker.sockets import cut, sockets
from regrow.worker.store import PartError, epoch_ended, epoch_over

log = logging.getLogger(__name__)

NEVER_S: Final = 1_000_000
_FORMED_S: Final = 90
_TOPOLOGY_MINUTES: Final = 1
_IDS_PER_NODE: Final = 2048
_KEEP_S: Final = 5.0
_IN_FLIGHT: Final = 4
_CLOSER_S: Final = 0.05
_TURN_S: Final = 60.0
T = TypeVar("T")
# Gangs of two epochs may be joining at once; each must find its own port.
_listening_lock = threading.Lock()


@final
class _Launch:
    """A launch that is watched.

    Attributes:
        number: Its number.
        token: Is ready when it has ended, which a stuck collective does late, also when poisoned.
        result: One of its results, if it has any.
        over: Set when it has ended, or is given up.
        error: What it failed with, or was given up for.
    """

    __slots__ = ("error", "number", "over", "result", "token")

    def __init__(self, number: int, token: Any, result: Any) -> None:
        self.number = number
        self.token = token
        self.result = result
        self.over = threading.Event()
        self.error: PartError | None = None

    def is_ready(self) -> bool:
        """Whether it has ended, or is given up."""
        return self.over.is_set()

    def block_until_ready(self) -> None:
        """Waits for its end.

        Raises:
            PartError: It failed, or was given up.
        """
        self.over.wait()
        if self.error is not None:
            raise self.error.fresh()

    def ended_devices(self) -> list[Any]:
        """What is there of the result: an array, or an error, of each device that has ended."""
        if not isinstance(self.result, jax.Array):
            return []
        shards = shards_of(self.result)
        return [shard for shard in shards if not shard.is_deleted() and shard.is_ready()]


@final
class Gang:
    """This host's membership in one epoch.

    Attributes:
        epoch: Its number.
        domain: Its devices, once it is formed and until it is put aside.
        failure: Why it has ended, if it has.
        ran: Numbers of the programs that have run in it.
    """

    def __init__(
        self,
        form: FormEpoch,
        local_devices: int,
        hostname: str,
        on_formed: Callable[[int, int], None],
        on_broken: Callable[[EpochBroken], None],
    ) -> None:
        """Begins to join, on a thread of its own; `wait_formed` says when it is done.

        Args:
            form: Who the members are and where they meet.
            local_devices: How many devices this host has.
            hostname: Address that collectives listen on.
            on_formed: Called with the epoch and the port of the collectives.
            on_broken: Called with failures, of which the first matters.
        """
        self.epoch = form.epoch
        self.domain: Domain | None = None
        self.failure: PartError | None = None
        self.ran: set[int] = set()
        self._form = form
        self._local_devices = local_devices
        self._hostname = hostname
        self._on_formed = on_formed
        self._on_broken = on_broken
        self._port = 0
        self._agent: Any = None
        self._formed = threading.Event()
        self._launches: deque[int] = deque(maxlen=_IN_FLIGHT)
        self._last: _Launch | None = None
        self._links: set[int] = set()
        self._maker = Maker(f"epoch-{self.epoch}-maker")
        self._behind = False
        self._made = threading.Event()
        self._made.set()
        self._over = threading.Event()
        self._command: FailEpoch | None = None
        self._watch: deque[_Launch] = deque()
        self._watched = threading.Semaphore(0)
        self._present: _Launch | None = None
        self._ended = threading.Event()
        self._retired = False
        threading.Thread(target=self._run, name=f"epoch-{self.epoch}", daemon=True).start()

    # --- joining ---

    def _run(self) -> None:
        if self._joined():
            threading.Thread(target=self._look_closer, name="epoch-closer", daemon=True).start()
            self._watch_launches()
        self._ended.set()
        self._over.wait()
        self._maker.close()
        self._put_aside()

    def _joined(self) -> bool:
        try:
            self._join()
        except Exception as error:  # noqa: BLE001 - every cause is reported to the head
            text = f"could not join epoch {self.epoch}: {error}"
            self._break(EpochBroken(self.epoch, 0, text))
            return False
        finally:
            self._formed.set()
        return True

    def _join(self) -> None:
        form = self._form
        agent = _jax.get_distributed_runtime_client(
            form.address,
            form.key,
            init_timeout=NEVER_S,
            heartbeat_timeout=NEVER_S,
            shutdown_timeout=NEVER_S,
            shutdown_on_destruction=False,
            use_compression=False,
        )
        agent.connect()
        self._agent = agent
        with _listening_lock:
            before = set(sockets(listening=True))
            collectives = _jax.make_gloo_tcp_collectives(agent, hostname=self._hostname)
            ports = [port for fd, (port, _) in sockets(listening=True).items() if fd not in before]
        self._enter_domain(self._make_client(agent, collectives), ports)

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
        self._formed.wait(_FORMED_S)
        if self.failure is not None:
            raise self.failure.fresh()
        domain = self.domain
        if domain is None:
            text = f"epoch {self.epoch} was not formed in time"
            self._break(EpochBroken(self.epoch, 0, text))
            raise PartError(Code.UNKNOWN, text, self.epoch)
        return domain

    # --- launches ---

    def enter(self, launch: int) -> None:
        """Waits for the turn of a launch: until the one before it has ended.

        `launched` or `not_launched` must follow.

        Raises:
            PartError: The epoch has ended, or is about to.
        """
        while self.failure is None and not self._made.wait(_TURN_S):
            log.warning(
                "launch %d of epoch %d waits for one that is being made", launch, self.epoch
            )
        last = self._last
        if last is not None:
            last.over.wait()
            self._behind = self._behind or last.error is not None
        if self.failure is not None:
            raise self._failure_of(launch)
        if self._behind:
            # This host would run ahead of peers that are still in the failed one.
            raise epoch_over(self.epoch)
        self._made.clear()
        self._launches.append(launch)

    def make(self, launch: int, run: Callable[[], T]) -> T:
        """Makes the launch that has entered: what `run` returns, or raises.

        Raises:
            PartError: The epoch ended before it returned.
        """
        try:
            return self._maker.make(run)
        except Abandoned:
            raise self._failure_of(launch, in_flight=True) from None

    def launched(self, launch: int, token: Any, result: Any) -> Any:
        """Takes note of a launch, by a token that is ready when it has ended, and a result.

        Returns:
            Another token, which is ready also when the epoch has ended.
        """
        self._last = last = _Launch(launch, token, result)
        self._watch.append(last)
        self._watched.release()
        self._made.set()
        if self.failure is not None:
            # The epoch ended between `enter` and the launch, too early for the poison.
            self._give_up(last)
            self._poison([launch])
        return last

    def not_launched(self, launch: int, error: PartError) -> None:
        """A launch that this host could not make: its peers wait for it in vain."""
        self._behind = True
        self._made.set()
        cause = 0 if error.epoch == self.epoch else error.epoch
        code = int(error.code) if error.epoch != self.epoch else 0
        self._break(EpochBroken(self.epoch, launch, error.message, code, cause))

    def _watch_launches(self) -> None:
        while self.failure is None:
            if not self._watched.acquire(timeout=5.0):
                continue
            if not self._watch:
                if self._retired or self.failure is not None:
                    return
                continue
            self._present = present = self._watch.popleft()
            present.error = present.error or self._error_of(present.number, present.token)
            present.over.set()
            if present.error is not None:
                return
            self._present = None

    def _error_of(self, launch: int, token: Any) -> PartError | None:
        """Waits for the end of a launch, or of one device's part in it: its error, if it failed."""
        try:
            token.block_until_ready()
        except Exception as error:  # noqa: BLE001 - reported to the head, which judges
            if isinstance(token, jax.Array) and token.is_deleted():
                return None  # It had ended, and was donated the moment after that was seen.
            meant = PartError.of(error, self.epoch)
            code = 0 if meant.epoch else int(meant.code)
            self._break(EpochBroken(self.epoch, launch, meant.message, code))
            return meant
        return None

    def _give_up(self, launch: _Launch) -> None:
        """Lets nobody wait for a launch that XLA may be stuck in; its results are poisoned."""
        launch.error = launch.error or self._failure_of(launch.number, in_flight=True)
        launch.over.set()

    def _look_closer(self) -> None:
        """Looks for devices that have failed, in a launch that takes its time.

        When a link breaks, one device of a host may fail while another waits for a peer that has
        failed too: then the launch as a whole does not end, and its token tells nothing.
        """
        seen: object = None
        while not self._ended.wait(_CLOSER_S):
            before, seen = seen, self._maker.present or self._present
            if seen is None or seen is not before:
                continue
            if not (self._well(seen) if isinstance(seen, _Launch) else self._linked()):
                return

    def _well(self, seen: _Launch) -> bool:
        return not any(self._error_of(seen.number, shard) for shard in seen.ended_devices())

    def count_links(self) -> None:
        """Takes note of the links that there are; for when a program has first run to its end."""
        self._links = self._accepted()

    def _accepted(self) -> set[int]:
        """The links that peers have made to this host, by the port at their end; each has two ends."""
        ends = sockets(listening=False).values()
        return {peer for local, peer in ends if local == self._port}

    def _linked(self) -> bool:
        """Whether all links are up: nothing else is known of a launch that has not returned."""
        if self._links <= self._accepted():
            return True
        self._break(EpochBroken(self.epoch, 0, f"a link of epoch {self.epoch} is down"))
        return False

    def _break(self, report: EpochBroken) -> None:
        if self.failure is None:
            self._on_broken(report)

    # --- the end ---

    def retire(self) -> None:
        """Leaves in good order: the programs in flight end by themselves, there are no new ones."""
        self._retired = True
        self._watched.release()
        self._over.set()

    def fail(self, command: FailEpoch) -> None:
        """Ends the gang at once; any thread. What is in flight becomes an error with this text."""
        if self.failure is not None:
            return
        self._command = command
        self.failure = PartError(Code.DATA_LOSS, command.message, self.epoch)
        for event in (self._formed, self._made, self._over):
            event.set()
        self._maker.abandon()
        last = self._last
        if last is not None and not last.over.is_set():
            self._give_up(last)
        poisoned = self._poison(list(self._launches))
        count = cut(self._port, command.ports)
        log.info("epoch %d ends: %d launches poisoned, %d links cut", self.epoch, poisoned, count)
        self._watched.release()

    def ended_with(self, launch: int) -> PartError | None:
        """What a launch ends with that the end of the epoch has overtaken; None: it has not ended."""
        return None if self.failure is None else self._failure_of(launch)

    def _failure_of(self, launch: int, *, in_flight: bool = False) -> PartError:
        """What a launch ends with that XLA does not know, or not yet."""
        assert self.failure is not None
        told = self._command
        if told is not None and told.own and told.launch in (launch, 0 if in_flight else launch):
            return PartError(Code(told.code), told.own)
        return self.failure.fresh()

    def _poison(self, launches: Iterable[int]) -> int:
        domain, told = self.domain, self._command
        if domain is None or told is None:
            return 0
        poisoned = 0
        for launch in launches:
            own = told.own and told.launch in (0, launch)
            text = (
                marked(Code(told.code), told.own) if own else epoch_ended(self.epoch, told.message)
            )
            for device in domain.client.local_devices():
                poisoned += bool(device.poison_execution(launch, text))
        return poisoned

    def _put_aside(self) -> None:
        """Leaves the service, and drops the client; on the gang's own thread, after all else."""
        if self._last is not None:
            self._last.over.wait()
        if self._agent is not None:
            try:
                self._agent.shutdown()
            except Exception as error:  # noqa: BLE001 - the service may be gone with the lost host
                log.info("leaving epoch %d: %s", self.epoch, error)
        time.sleep(_KEEP_S)
        self._last = self._present = self._agent = self.domain = None
        self._watch.clear()
        jax.clear_caches()  # type: ignore[no-untyped-call]
        collect()


def enough_threads(devices: int) -> None:
    """Gives clients that are made from now on a thread for each core and each collective that blocks.

    XLA runs collectives on a pool with a thread for each core, or each device if those are more. So
    the threads of two hosts can all be taken by collectives that wait for each other's other devices,
    which plain JAX may wait for for ever. A device is in one collective at a time, and a gang in one
    launch, so these are enough; more only disturb each other. XLA reads the pool's size from NPROC.
    """
    # For good, since a client may be in the making for a minute where a member does not come.
    os.environ["NPROC"] = str((os.cpu_count() or 1) + devices)
