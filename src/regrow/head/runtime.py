"""The parts of a head that all sessions share, put together."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, final

from regrow.channel import commands as c
from regrow.channel import rgcb
from regrow.channel.arena import Arena
from regrow.config import HeadConfig
from regrow.errors import Code, ResourceError, SliceLostError, StatusError
from regrow.head.aides import Aide
from regrow.head.buffers import Buffers
from regrow.head.callbacks import Callbacks
from regrow.head.compile import CompileService, DiskCache
from regrow.head.coordination import Coordination
from regrow.head.coordination_calls import address_of
from regrow.head.epochs import Epochs
from regrow.head.executables import Dispatcher
from regrow.head.gate import Gate
from regrow.head.links import Link
from regrow.head.moves import Moves
from regrow.head.observer import Observer
from regrow.head.spare_snapshots import SpareSnapshots
from regrow.head.topology import Topology
from regrow.head.transfers import EpochError, Transfers
from regrow.observe import Report

log = logging.getLogger(__name__)

_LAST_WORD_S: Final = 1.0
# Of XLA, of C++, of Python and of NumPy. Our own limits, of shared memory for one, end no process.
_NO_MEMORY: Final = re.compile(
    "out of memory|bad_alloc|MemoryError|unable to allocate", re.IGNORECASE
)


class Suspending(Protocol):
    """Who looks after suspended slices."""

    @property
    def stored(self) -> Mapping[int, Any]:
        """The slices whose state is on storage."""
        ...

    def slice_up(self, index: int, links: Sequence[Link]) -> None:
        """New hosts of such a slice are up."""
        ...

    def noticed(self, index: int, why: str) -> None:
        """A host was told that it is going to be ended."""
        ...


@final
class Runtime:
    """What carries out the requests of all sessions."""

    def __init__(
        self,
        config: HeadConfig,
        topology: Topology,
        arena_bytes: int,
        compiler: Aide,
        on_change: Callable[[str, int, int, str], None],
        on_report: Callable[[Report], None] = lambda report: None,
    ) -> None:
        self.config = config
        self.topology = topology
        self.arena = Arena(arena_bytes, on_closed=self._segment_closed)
        self.buffers = Buffers(topology)
        self.coordination = Coordination(address_of(config.epoch_socket))
        self.epochs = Epochs(topology, self.buffers.links, self.coordination)
        self.dispatcher = Dispatcher(self.buffers, self.epochs)
        self.transfers = Transfers(self.buffers, self.epochs, self.arena)
        self.moves = Moves(self.buffers, self.transfers, self.arena)
        self.spare_snapshots: SpareSnapshots | None = None
        if config.spare_snapshots:
            self.spare_snapshots = SpareSnapshots(
                self.buffers, self.transfers, lambda text: on_change("warning", -1, 0, text)
            )
        cache = config.compile_cache_dir
        self.compiler = CompileService(compiler, DiskCache(Path(cache)) if cache else None)
        self.callbacks = Callbacks()
        self.observer = Observer(self.buffers, self.transfers, on_report)
        self.compiler.on_done = self.observer.run.program_found
        self.ended: str | None = None
        self.gate = Gate()
        self.suspension: Suspending | None = None
        self._on_change = on_change

    def end(self, error: StatusError) -> None:
        """The head ends: whatever a client waits for fails with this error."""
        self.compiler.end(error)
        for link in list(self.buffers.links.values()):
            link.lose(error)
        self.callbacks.end(error.message)

    def close(self) -> None:
        """Lets go of the hosts' links and the shared memory; no request comes after this."""
        # Arrays that end from now on have nobody to tell, and no loop to do it on.
        self.buffers.links.clear()
        self.arena.close()

    def _segment_closed(self, segment: int) -> None:
        for link in self.buffers.links.values():
            link.forget_segment(segment)

    # --- what the fleet tells ---

    def slice_up(self, slice_index: int, incarnation: int, links: list[Link]) -> None:
        """A slice takes work."""
        stored = self._is_stored(slice_index)
        if incarnation > 1 and not stored:
            self.observer.run.slice_back(slice_index)
        for link in links:
            self.buffers.links[link.host] = link
        if self.spare_snapshots is not None and not stored:
            self.spare_snapshots.slice_up(slice_index)
        if len(self.buffers.links) == self.topology.hosts:
            self.observer.run.slices_up(time.monotonic())
            self.epochs.form_if_needed()
        if incarnation > 1 and not stored:
            self.dispatcher.preload_recent(slice_index)
        if stored and self.suspension is not None:
            self.suspension.slice_up(slice_index, links)
        else:
            self._on_change("slice_up", slice_index, incarnation, "")

    def _is_stored(self, slice_index: int) -> bool:
        return self.suspension is not None and slice_index in self.suspension.stored

    def _hosts_of(self, slice_index: int) -> range:
        count = self.topology.hosts_per_slice
        return range(slice_index * count, (slice_index + 1) * count)

    def slice_leaves(self, slice_index: int) -> None:
        """A slice takes no work any longer, and is not lost by that: its state is on storage."""
        if self.spare_snapshots is not None:
            self.spare_snapshots.drop()
        for host in self._hosts_of(slice_index):
            link = self.buffers.links.pop(host, None)
            if link is not None:
                self.callbacks.release_all(link)

    def slice_left(self, slice_index: int, incarnation: int) -> None:
        """The hosts of a suspended slice are gone: the epochs that they were in are over."""
        for host in self._hosts_of(slice_index):
            self.epochs.host_left(host, incarnation)

    def slice_lost(
        self, error: SliceLostError, cause: str, was_up: bool, since: float | None = None
    ) -> None:
        """A slice is lost: waits for it end now, its peers' epoch ends, its arrays are lost."""
        started = time.monotonic()
        hosts = self._hosts_of(error.slice_index)
        if self._is_stored(error.slice_index):
            # What lived on it is on storage, and it is started again.
            self.slice_leaves(error.slice_index)
            for host in hosts:
                self.epochs.host_lost(host, error.incarnation, error)
            return
        if was_up:
            signs = [since, *map(self.epochs.suspected_since, hosts)]
            first = min((sign for sign in signs if sign is not None), default=started)
            self.observer.run.slice_lost(error.slice_index, cause, first, started)
        self.buffers.slice_lost(error.slice_index, error)
        for host in hosts:
            link = self.buffers.links.pop(host, None)
            if link is not None:
                self.callbacks.release_all(link)
        for host in hosts:
            self.epochs.host_lost(host, error.incarnation, error)
        if was_up:
            self.epochs.form_if_needed()
        self._on_change("slice_lost", error.slice_index, error.incarnation, cause)
        log.info("loss handled in %.1f ms", 1e3 * (time.monotonic() - started))

    def job_ends(self, text: str) -> None:
        """More slices are gone than the job bears."""
        self.ended = text
        self._on_change("job_ends", -1, 0, text)

    def report(self, link: Link, command: Any) -> None:
        """A live host reports.

        That it gets no memory is often the last that a host says. Who hears of it would take it for an
        error of the program, so it is told when the host has lived on for a while.
        """
        if not _lacks_memory(command):
            self._report(link, command)
            return

        def report_if_alive() -> None:
            if link.lost is None:
                self._report(link, command)

        log.warning("%s has no memory left: %s", link.name, command.message)
        asyncio.get_running_loop().call_later(_LAST_WORD_S, report_if_alive)

    def _report(self, link: Link, command: Any) -> None:
        match command:
            case c.Reply():
                link.answered(command.rid, None, command.value)
            case c.Failed():
                link.answered(command.rid, _error_of(command), None)
            case c.Released():
                link.released(command.leases)
            case c.Pong():
                self.epochs.alive(link.host, command.number)
            case c.EpochFormed():
                self.epochs.formed(command.epoch, link.host, command.port)
            case c.EpochBroken():
                self.epochs.broken(command)
            case c.Noticed():
                if self.suspension is not None:
                    self.suspension.noticed(link.slice_index, command.why)
            case c.Callback():
                self.call_client(link, command)
            case c.CallbackFreed():
                self.callbacks.release(command.nonce, command.token, link)
            case _:
                log.warning("%s sent %s", link.name, type(command).__name__)

    def call_client(self, link: Link, command: c.Callback) -> None:
        """A process calls a function of a client."""

        def done(answer: Any) -> None:
            if link.lost is not None:
                return
            try:
                link.send(c.CallbackResult(command.call, bytes(answer)))
            except ResourceError as error:
                refusal = rgcb.failure(
                    Code.RESOURCE_EXHAUSTED, f"what a host callback gave: {error}"
                )
                link.send(c.CallbackResult(command.call, refusal))

        self.callbacks.call(command.nonce, command.token, command.function, command.payload, done)


def _lacks_memory(command: Any) -> bool:
    failed = isinstance(command, c.Failed | c.EpochBroken)
    return failed and _NO_MEMORY.search(command.message) is not None


def _error_of(failed: c.Failed) -> StatusError:
    try:
        code = Code(failed.code)
    except ValueError:
        code = Code.UNKNOWN
    if failed.epoch:
        return EpochError(code, failed.message, failed.epoch)
    return StatusError(code, failed.message)
