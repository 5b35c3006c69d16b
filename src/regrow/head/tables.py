"""What a session's handles stand for."""

from __future__ import annotations

from typing import Any, Final, final

from regrow.errors import StatusError
from regrow.head.buffers import Array, Piece
from regrow.head.links import Waiter, unknown

SERVER_HANDLES_FROM: Final = 1 << 63
"""The client makes the handles below."""


@final
class Later:
    """An answer that comes later, once."""

    __slots__ = ("_outcome", "_waiter", "_watcher")

    def __init__(self) -> None:
        self._watcher: Waiter | None = None
        self._waiter: Waiter | None = None
        self._outcome: tuple[StatusError | None, Any] | None = None

    def settle(self, error: StatusError | None, value: Any) -> None:
        """Gives the answer."""
        if self._outcome is not None:
            return
        self._outcome = (error, value)
        if self._watcher is not None:
            self._watcher(error, value)
        if self._waiter is not None:
            self._waiter(error, value)

    @property
    def settled(self) -> bool:
        """Whether the answer is there."""
        return self._outcome is not None

    def watch(self, watcher: Waiter) -> None:
        """Has `watcher` called with an answer that is not there yet, before who waits for it."""
        self._watcher = watcher

    def subscribe(self, waiter: Waiter) -> None:
        """Has `waiter` called with the answer, at once if it is there."""
        self._waiter = waiter
        if self._outcome is not None:
            waiter(*self._outcome)


@final
class Tables:
    """Arrays, programs, host buffers and futures by handle.

    Attributes:
        nonce: By which the client's host callbacks are known, or empty.
        arrays: An array, or the error that it would have raised.
        programs: What `program_requests` keeps.
        host_buffers: Bytes that came from the client, or are to go to it.
        statuses: What there is to wait for at the end of an execution.
        stateful: Names of the programs that may hold on to something on the hosts, also former ones.
    """

    def __init__(self, nonce: str = "") -> None:
        self.nonce = nonce
        self.arrays: dict[int, Array | StatusError] = {}
        self.programs: dict[int, Any] = {}
        self.host_buffers: dict[int, Any] = {}
        self.statuses: dict[int, list[Piece] | StatusError | Later] = {}
        self.stateful: set[str] = set()
        self.closed = False
        self._next = SERVER_HANDLES_FROM

    def handle(self) -> int:
        """A handle that the server makes."""
        self._next += 1
        return self._next - 1

    def array(self, handle: int) -> Array:
        """The array of a handle.

        Raises:
            StatusError: There is none, or it is an error instead of an array.
        """
        array = self.arrays.get(handle)
        if isinstance(array, Array):
            return array
        if isinstance(array, StatusError):
            raise array.fresh()
        raise unknown(f"array handle {handle}")

    def fail(self, handle: int, error: StatusError) -> None:
        """A result of a request that failed: later uses of the handle raise its error."""
        self.arrays[handle] = self.statuses[handle] = error.fresh()

    def clear(self) -> None:
        """Lets go of everything, for good: what is settled later is not kept."""
        self.closed = True
        for program in self.programs.values():
            program.unload()
        self.arrays.clear()
        self.programs.clear()
        self.host_buffers.clear()
        self.statuses.clear()
