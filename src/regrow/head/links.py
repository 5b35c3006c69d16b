"""Commands to hosts, and the answers that are waited for.

Commands of one turn of the loop go out as one payload. A question has a `Waiter`, which is called
exactly once: with the answer, with the host's error, or with the loss of the host.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeAlias, TypeVar, final

from regrow.channel.arena import Arena, Block
from regrow.channel.commands import Free, Segment, pack
from regrow.channel.frames import MAX_PAYLOAD_BYTES
from regrow.errors import Code, ResourceError, StatusError

log = logging.getLogger(__name__)

# Nobody waits for memory to be freed: it may wait for a payload that is sent anyway.
_FREE_S: Final = 0.02
_BEHIND_S: Final = 0.05

Waiter: TypeAlias = Callable[[StatusError | None, Any], None]
One = TypeVar("One")
Other = TypeVar("Other")


class Channel(Protocol):
    """What carries payloads."""

    def send(self, payload: bytes | Sequence[bytes]) -> None:
        """Sends one payload."""
        ...

    def close(self) -> None:
        """Ends the channel."""
        ...


@final
class Link:
    """The head's side of one process: a host in one incarnation, or the compiler.

    Attributes:
        name: Who it is, for messages.
        host: Cluster-wide number of the host, -1 for other processes.
        slice_index: Its slice.
        incarnation: The incarnation of its slice.
        shares_memory: Whether it can reach the head's arena.
    """

    def __init__(self, name: str, host: int = -1, slice_index: int = -1, incarnation: int = 0):
        self.name = name
        self.host = host
        self.slice_index = slice_index
        self.incarnation = incarnation
        self.shares_memory = True
        self.lost: StatusError | None = None
        self.freed: list[int] = []
        self._channel: Channel | None = None
        self._out: list[bytes] = []
        self._planned = False
        self._freeing = False
        self._next = 1
        self._waiters: dict[int, Waiter] = {}
        self._segments: set[int] = set()
        self._leases: dict[int, Lease] = {}

    @property
    def waiting(self) -> int:
        """How many questions are open."""
        return len(self._waiters)

    def attach(self, channel: Channel) -> None:
        """Names the channel; what was posted before goes out over it."""
        self._channel = channel
        self._plan()

    def post(self, packed: bytes) -> None:
        """Adds a packed command to the payload of this turn.

        Raises:
            ResourceError: It is larger than a message may be.
        """
        if len(packed) > MAX_PAYLOAD_BYTES:
            raise ResourceError(f"a message to {self.name}", len(packed), MAX_PAYLOAD_BYTES)
        self._out.append(packed)
        self._plan()

    def send(self, command: Any) -> None:
        """Adds a command to the payload of this turn."""
        self.post(pack(command))

    def ask(self, make: Callable[[int], Any], waiter: Waiter) -> None:
        """Sends the command that `make` builds for a request number; its answer goes to `waiter`."""
        if self.lost is not None:
            waiter(self.lost, None)
            return
        rid = self._next
        self._next += 1
        self.send(make(rid))
        self._waiters[rid] = waiter

    def answered(self, rid: int, error: StatusError | None, value: Any) -> None:
        """Hands an answer to who waits for it."""
        waiter = self._waiters.pop(rid, None)
        if waiter is not None:
            waiter(error, value)

    def free(self, aid: int) -> None:
        """Has a buffer dropped with the next payload, or soon; also from a finalizer."""
        self.freed.append(aid)
        if not self._planned and not self._freeing and self._channel is not None:
            self._freeing = True
            asyncio.get_running_loop().call_later(_FREE_S, self._flush_freed)

    def lose(self, error: StatusError) -> None:
        """The process is lost: everything that is waited for fails with this error."""
        self.lost = error
        self._out.clear()
        if self._channel is not None:
            self._channel.close()
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters.values():
            waiter(error, None)

    # --- shared memory ---

    def reach(self, lease: Lease) -> tuple[int, int, int]:
        """How this process refers to shared memory; told of its segment first, if new to it."""
        segment, offset, size = lease.block.ref()
        if segment not in self._segments:
            self._segments.add(segment)
            arena = lease.arena
            path, length = arena.segment_path(segment), arena.segment_bytes(segment)
            self.send(Segment(segment, path, length))
        return segment, offset, size

    def forget_segment(self, segment: int) -> None:
        """The segment is gone: the process should unmap it."""
        if segment in self._segments:
            self._segments.discard(segment)
            self.send(Segment(segment, "", 0))

    def hold(self, lease: Lease) -> int:
        """Keeps shared memory until the process reports that it is done with it, or has ended."""
        number = self._next
        self._next += 1
        self._leases[number] = lease
        return number

    def released(self, leases: Sequence[int]) -> None:
        """Ends leases."""
        for number in leases:
            self._leases.pop(number, None)

    def ended(self) -> None:
        """The process has ended for certain: it writes into no block any longer."""
        self._leases.clear()

    # --- inside ---

    def _plan(self) -> None:
        if not self._planned and self._channel is not None:
            self._planned = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush_freed(self) -> None:
        self._freeing = False
        if self.freed:
            self._plan()

    def _flush(self) -> None:
        self._planned = False
        if self.freed:
            freed, self.freed = self.freed, []
            self._out.append(pack(Free(freed)))
        while self._out and self._channel is not None and self.lost is None:
            payload = _fitting(self._out)
            try:
                self._channel.send(payload)
            except ResourceError as error:
                # The process is far behind: it catches up, or is declared lost.
                log.warning("%s: %s", self.name, error)
                asyncio.get_running_loop().call_later(_BEHIND_S, self._plan)
                return
            del self._out[: len(payload)]


@final
class Lease:
    """A block of shared memory; released when the last reference to this goes."""

    __slots__ = ("arena", "block")

    def __init__(self, arena: Arena, size: int) -> None:
        self.arena = arena
        self.block: Block = arena.alloc(size)

    @property
    def view(self) -> memoryview:
        """The memory, writable."""
        return self.block.view

    def __del__(self) -> None:
        if hasattr(self, "block"):  # There may have been no room for it.
            self.block.release()


def _fitting(commands: list[bytes]) -> list[bytes]:
    """As many of the first commands as one message may hold."""
    size = 0
    for count, packed in enumerate(commands):
        size += len(packed)
        if size > MAX_PAYLOAD_BYTES:
            return commands[:count]
    return commands.copy()


def gather(count: int, waiter: Waiter) -> Waiter:
    """A waiter for `count` answers: calls `waiter` at the first error, or when all are in."""
    left = count
    done = False

    def one(error: StatusError | None, value: Any) -> None:
        nonlocal left, done
        left -= 1
        if done or (error is None and left):
            return
        done = True
        waiter(error, value)

    return one


def malformed(what: str) -> StatusError:
    """The error for a request that contradicts itself; the user's own fault."""
    return StatusError.user(Code.INVALID_ARGUMENT, f"the request does not fit together: {what}")


def pairs(ones: Sequence[One], others: Sequence[Other], what: str) -> Iterator[tuple[One, Other]]:
    """Pairs of what a request has of two kinds.

    Raises:
        StatusError: It has more of one.
    """
    if len(ones) != len(others):
        raise malformed(f"{len(ones)} and {len(others)} {what}")
    return zip(ones, others, strict=True)


def unknown(what: str) -> StatusError:
    """The error for a handle or name that is not known; the user's own fault."""
    return StatusError.user(Code.INVALID_ARGUMENT, f"{what} is not known to this session")
