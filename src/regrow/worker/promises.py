"""Parts that are promised now and filled later, by ways other than the queue of the executor.

A promise and what fills it come over the same channel, and are both handled as they come: were a
promise to wait in the queue, its shards could be there before it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, final

from regrow.channel.arena import ArenaView
from regrow.channel.commands import Expect, Fill, FillError
from regrow.errors import Code
from regrow.worker import transfers
from regrow.worker.platform import Domain
from regrow.worker.store import Part, PartError, Store

log = logging.getLogger(__name__)


@final
class _Promise:
    """One part that is still to come."""

    def __init__(self, expect: Expect, part: Part) -> None:
        self.expect = expect
        self.part = part
        self.shards: list[Any] = [None] * len(expect.devices)
        self.left = len(expect.devices)


@final
class Promises:
    """The promised parts of a host; its methods are for the thread that reads the channel."""

    def __init__(
        self,
        store: Store,
        home: Domain,
        memory: ArenaView,
        spawn: Callable[[Callable[[], None]], Any],
        released: Callable[[int], None],
    ) -> None:
        """Begins with none.

        Args:
            store: Where promised parts go.
            home: The domain that they will be in.
            memory: Where bulks are.
            spawn: Runs a function on a helper thread.
            released: Tells the head that a lease is over.
        """
        self._store = store
        self._home = home
        self._memory = memory
        self._spawn = spawn
        self._released = released
        self._lock = threading.Lock()
        self._open: dict[int, _Promise] = {}

    def expect(self, command: Expect) -> None:
        """Makes a pending part."""
        part = Part.expected(self._home, command.devices)
        with self._lock:
            self._open[command.aid] = _Promise(command, part)
        self._store.set(command.aid, part)

    def fill(self, command: Fill) -> None:
        """One shard has come; it is placed on a helper, for it may be large."""
        with self._lock:
            promise = self._open.get(command.aid)
        if promise is None:  # Another shard of it has failed.
            self._release(command)
        else:
            self._spawn(lambda: self._place(command, promise))

    def fail(self, command: FillError) -> None:
        """A promise is broken."""
        with self._lock:
            promise = self._open.pop(command.aid, None)
        if promise is not None:
            error = PartError(Code(command.code), command.message)
            promise.part.resolve(Part.failed(self._home, error))

    def _place(self, command: Fill, promise: _Promise) -> None:
        expect = promise.expect
        try:
            shard = transfers.filled(command, expect, self._memory, self._home)
        except Exception as error:
            log.exception("shard %d of buffer %d", command.shard, command.aid)
            self._end(promise, Part.failed(self._home, PartError.of(error)))
            return
        finally:
            self._release(command)
        with self._lock:
            promise.shards[command.shard] = shard
            promise.left -= 1
            left = promise.left
        if not left:
            self._end(promise, Part(self._home, expect.devices, promise.shards))

    def _end(self, promise: _Promise, value: Part) -> None:
        with self._lock:
            self._open.pop(promise.expect.aid, None)
        promise.part.resolve(value)

    def _release(self, command: Fill) -> None:
        if command.lease:
            self._released(command.lease)
