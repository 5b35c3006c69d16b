"""A host of a slice: carries out the head's commands, in their order.

Two threads matter. The *reader* (the channel's) takes payloads, handles at once what must not wait, and
queues the rest. The *executor* (the main thread) works through the queue. What would block the
executor for long (waiting for a value, a program that calls back into the user's process) goes to a
helper thread, and leaves a pending part behind.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol, TypeAlias, final

from regrow.channel import commands as c
from regrow.channel.arena import ArenaView
from regrow.errors import Code, StatusError
from regrow.worker import transfers
from regrow.worker.callbacks import CallbackRelay
from regrow.worker.colocated import Colocated, ColocatedRunner
from regrow.worker.digests import Digests
from regrow.worker.faults import Faults
from regrow.worker.gang import Gang
from regrow.worker.launch import Launcher
from regrow.worker.persistence import Persistence
from regrow.worker.platform import Domain, collect_garbage
from regrow.worker.programs import Program
from regrow.worker.promises import Promises
from regrow.worker.reads import Reads
from regrow.worker.store import Part, PartError, Store, epoch_over, is_ready, wait_for
from regrow.worker.suspending import Suspending
from regrow.worker.traces import Traces

log = logging.getLogger(__name__)

_HELPERS: Final = 512
_FILLERS: Final = 4
_GANGS_KEPT: Final = 64
_NO_ROOM: Final = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE})
NO_ROOM: Final = 71
"""Exit status of a host that has no memory, or no file, left for what it is sent."""

Handlers: TypeAlias = dict[type[Any], Callable[[Any], None]]


class Sender(Protocol):
    """The channel to the head."""

    def send(self, payload: bytes) -> None:
        """Sends one payload; any thread."""
        ...


@final
class Host:
    """The state of a worker process."""

    def __init__(
        self,
        devices: Sequence[int],
        hostname: str,
        client: Any = None,
        head_host: str = "127.0.0.1",
    ) -> None:
        self.home = Domain.home(devices, client)
        self.store = Store(self.home)
        self.gang: Gang | None = None
        self._hostname = hostname
        self._head_host = head_host
        self._memory = ArenaView()
        self._programs: dict[int, Program | Colocated | PartError] = {}
        self._gangs: dict[int, Gang] = {}
        self._failed_epochs: dict[int, c.FailEpoch] = {}
        self._queue: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._helpers = ThreadPoolExecutor(_HELPERS, thread_name_prefix="helper")
        # All helpers may be waiting for what these bring.
        self._fillers = ThreadPoolExecutor(_FILLERS, thread_name_prefix="filler")
        self._sender: Sender | None = None
        self._done = 0
        self._relay = CallbackRelay(self._call_user, self._free_callbacks)
        self._launcher = Launcher(self.store, self._helpers.submit)
        self._colocated = ColocatedRunner(self.store, self.home)
        self._running = True
        self._promises = Promises(
            self.store,
            self.home,
            self._memory,
            self._fillers.submit,
            lambda lease: self.report(c.Released((lease,))),
        )
        self._suspending = Suspending(self.store, self.home, self._helpers.submit, self.report)
        self._at_once = self._handlers_at_once()
        self._in_order = self._handlers_in_order()

    def _handlers_at_once(self) -> Handlers:
        faults, promises, suspending = Faults(), self._promises, self._suspending
        return {
            c.Ping: self._ping,
            c.FailEpoch: self._fail_epoch,
            c.Expect: promises.expect,
            c.Fill: promises.fill,
            c.FillError: promises.fail,
            c.CallbackResult: self._callback_result,
            c.Segment: self._segment,
            c.Fail: lambda command: faults.make(command.fault),
            c.GiveUp: suspending.give_up,
            c.Go: suspending.go,
        }

    def _handlers_in_order(self) -> Handlers:
        store, home, helpers, suspending = self.store, self.home, self._helpers, self._suspending
        reads = Reads(store, self._memory, helpers.submit, self.report)
        persistence = Persistence(store, home, helpers.submit, self.report)
        traces = Traces(helpers.submit, self.report)
        return {
            c.Put: self._put,
            c.Load: self._load,
            c.Unload: self._unload,
            c.Execute: self._execute,
            c.Take: self._take,
            c.Copy: self._copy,
            c.Digest: Digests(store, home, helpers.submit).digest,
            c.Get: reads.get,
            c.Ready: reads.ready,
            c.Free: self._free,
            c.FormEpoch: self._form_epoch,
            c.Adopt: self._adopt,
            c.SetColocated: self._set_colocated,
            c.StartTrace: traces.start,
            c.StopTrace: traces.stop,
            c.Drain: suspending.drain,
            c.Save: suspending.save,
            c.LoadParts: suspending.load,
            c.Measure: suspending.measure,
            c.WriteShards: persistence.write,
            c.ReadShards: persistence.read,
            c.Exit: self._exit,
        }

    # --- the two threads ---

    def connect(self, sender: Sender) -> None:
        """Names the channel that reports go to."""
        self._sender = sender

    def on_payload(self, payload: bytes | memoryview) -> None:
        """Takes one payload from the head; the reader's thread."""
        batch = []
        for command in c.unpack(payload):
            handle = self._at_once.get(type(command))
            if handle is None:
                batch.append(command)
                continue
            try:
                handle(command)
            except Exception:  # What else is in the payload must not be lost with it.
                log.exception("%s", type(command).__name__)
        if batch:
            self._queue.put(batch)

    def run(self) -> None:
        """Carries out commands until `Exit`; the main thread."""
        while self._running:
            for command in self._queue.get():
                self._in_order[type(command)](command)
                self._done += 1

    def work_done(self) -> int:
        """How many commands were carried out; any thread."""
        return self._done

    def stop(self) -> None:
        """Makes `run` return after the queue's present content; any thread."""
        self._queue.put([c.Exit()])

    def report(self, *reports: Any) -> None:
        """Sends reports to the head; any thread."""
        if self._sender is not None:
            self._sender.send(c.pack_all(reports))

    # --- at once ---

    def _ping(self, command: c.Ping) -> None:
        self.report(c.Pong(command.number, self._done))

    def _segment(self, command: c.Segment) -> None:
        if command.path:
            self._open(command)
        else:
            self._memory.forget(command.segment)

    def _open(self, command: c.Segment) -> None:
        try:
            self._memory.open(command.segment, command.path, command.size)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            # It is sent once: whatever lies there could never be read, and the error of each array
            # would be that of a missing segment. That this host is lost is what is true.
            log.critical("no room for %d bytes of shared memory: %s", command.size, error)
            os._exit(NO_ROOM)

    def _fail_epoch(self, command: c.FailEpoch) -> None:
        self._failed_epochs[command.epoch] = command
        gang = self._gangs.pop(command.epoch, None)
        if gang is not None:
            gang.fail(command)

    def _callback_result(self, command: c.CallbackResult) -> None:
        self._relay.answered(command.call, command.answer)

    # --- in order ---

    def _put(self, command: c.Put) -> None:
        domain = self._gang_domain() if command.spans else self.home
        try:
            part = transfers.put(
                command, self._memory, domain, lambda: self.report(c.Released((command.lease,)))
            )
        except Exception as error:  # noqa: BLE001 - the part carries it
            part = Part.failed(self.home, PartError.of(error))
        self.store.set(command.aid, part)

    def _gang_domain(self) -> Domain:
        gang = self.gang
        if gang is None or gang.failure is not None or gang.domain is None:
            return self.home
        return gang.domain

    def _load(self, command: c.Load) -> None:
        try:
            domain = self.home if not command.epoch else self._gang_of(command.epoch).wait_formed()
            self._programs[command.exe] = Program(command, domain, self._relay)
        except Exception as error:
            if not isinstance(error, PartError | StatusError):
                log.exception("loading %s", command.name)
            self._programs[command.exe] = PartError.of(error, command.epoch)

    def _gang_of(self, epoch: int) -> Gang:
        gang = self.gang
        if gang is None or gang.epoch != epoch:
            raise epoch_over(epoch)
        return gang

    def _unload(self, command: c.Unload) -> None:
        for exe in command.exes:
            program = self._programs.pop(exe, None)
            if isinstance(program, Program):
                program.close()
            elif isinstance(program, Colocated):
                self._colocated.unload(program)

    def _execute(self, command: c.Execute) -> None:
        program = self._programs.get(command.exe)
        if program is None:
            # Were it one across hosts, its peers would wait for this one.
            error = PartError(Code.FAILED_PRECONDITION, f"program {command.exe} is not loaded")
            self._launcher.refuse_gang(command, self.gang, error)
        elif isinstance(program, PartError):
            self._launcher.fail_unloaded(command, self._gangs.get(program.epoch), program)
        elif isinstance(program, Colocated):
            self._colocated.start(command, program)
        elif program.spans:
            self._launcher.run_gang(command, program, self.gang)
        else:
            self._launcher.run_home(command, program)

    def _take(self, command: c.Take) -> None:
        self._derive(command.aid, command.sources, transfers.take)

    def _copy(self, command: c.Copy) -> None:
        devices, memory_kind = command.devices, command.memory_kind
        self._derive(
            command.aid,
            command.sources,
            lambda sources: transfers.copy(sources, devices, memory_kind, self.home),
            self._may_be_stuck,
        )

    def _derive(
        self,
        aid: int,
        sources: Sequence[tuple[int, int]],
        make: Callable[[list[transfers.Source]], Part],
        must_wait: Callable[[Part], bool] = lambda part: part.pending,
    ) -> None:
        # The parts themselves are kept: their numbers may be freed before a helper comes to them.
        found = [(self.store.get(source), shard) for source, shard in sources]

        def guarded() -> Part:
            try:
                wait_for(part for part, _ in found if must_wait(part))
                return make(found)
            except Exception as error:  # noqa: BLE001 - the part carries it
                return Part.failed(self.home, PartError.of(error))

        if not any(must_wait(part) for part, _ in found):
            self.store.set(aid, guarded())
            return
        part = Part.expected(self.home, ())
        self.store.set(aid, part)
        readings = [source.read() for source, _ in found]

        def later() -> None:
            made = guarded()
            for reading in readings:
                reading.set()
            part.resolve(made)

        self._helpers.submit(later)

    def _may_be_stuck(self, part: Part) -> bool:
        """Whether a gang may fail under it, which copies of it would not notice while XLA is stuck."""
        return part.pending or (part.domain is not self.home and not is_ready(part))

    def _free(self, command: c.Free) -> None:
        self.store.free(command.aids)
        collect_garbage()

    def _form_epoch(self, command: c.FormEpoch) -> None:
        if command.address.startswith(":"):
            command = command._replace(address=f"{self._head_host}{command.address}")
        gang = Gang(
            command,
            len(self.home.local),
            self._hostname,
            lambda epoch, port: self.report(c.EpochFormed(epoch, port)),
            self.report,
        )
        former, self.gang = self.gang, gang
        self._drop_programs()
        self._gangs[command.epoch] = gang
        # What came at once may have been meant for this gang before it was there.
        if command.epoch in self._failed_epochs:
            self._fail_epoch(self._failed_epochs[command.epoch])
        for epoch in [epoch for epoch in list(self._failed_epochs) if epoch < command.epoch]:
            self._failed_epochs.pop(epoch, None)  # Epochs come in order: it has had its turn.
        if former is not None:
            former.retire()
            for epoch in list(self._gangs)[:-_GANGS_KEPT]:
                self._gangs.pop(epoch).retire()

    def _adopt(self, _: c.Adopt) -> None:
        gang = self.gang
        keep = None if gang is None or gang.failure is not None else gang.domain
        self._drop_programs()
        moved = self.store.adopt_idle(keep)
        log.info("%d buffers moved home", moved)

    def _drop_programs(self) -> None:
        """Lets go of programs of former epochs: the head loads them anew for the present one."""
        gang = self.gang
        present = 0 if gang is None or gang.failure is not None else gang.epoch
        for exe, program in list(self._programs.items()):
            if isinstance(program, Program) and program.spans and program.domain.epoch != present:
                program.close()
                self._programs[exe] = epoch_over(program.domain.epoch)

    def _set_colocated(self, command: c.SetColocated) -> None:
        self._programs[command.exe] = Colocated(command)

    def _exit(self, _: c.Exit) -> None:
        self._running = False

    # --- callbacks of the user's process ---

    def _call_user(self, call: int, nonce: str, token: int, index: int, payload: bytes) -> None:
        self.report(c.Callback(call, nonce, token, index, payload))

    def _free_callbacks(self, nonce: str, token: int) -> None:
        self.report(c.CallbackFreed(nonce, token))
