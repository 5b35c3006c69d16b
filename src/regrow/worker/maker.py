"""The thread that makes the launches of a gang.

XLA runs small programs inline: the call that launches them returns when they have ended, and cannot be
poisoned meanwhile. In a collective whose peer is gone that may take as long as a collective may, so the
call is made on a thread that can be left alone with it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar, final

T = TypeVar("T")


@final
class Abandoned(Exception):
    """The launch was left alone."""


@final
class _Making:
    """One call."""

    __slots__ = ("error", "left", "run", "value", "waker")

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run = run
        self.left = True
        self.value: Any = None
        self.error: BaseException | None = None
        self.waker = threading.Event()

    def carry_out(self) -> None:
        try:
            self.value = self.run()
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            self.error = error
        self.left = False
        self.waker.set()


@final
class Maker:
    """Makes one launch at a time.

    Attributes:
        present: What is being made, if anything is.
    """

    def __init__(self, name: str) -> None:
        self.present: object | None = None
        self._abandoned = False
        self._queue: queue.SimpleQueue[_Making | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def make(self, run: Callable[[], T]) -> T:
        """What `run` returns or raises.

        Raises:
            Abandoned: `abandon` was called before it returned; an error since then may come of that.
        """
        making = self.present = _Making(run)
        if self._abandoned:
            raise Abandoned
        self._queue.put(making)
        making.waker.wait()
        self.present = None
        if making.left or (making.error is not None and self._abandoned):
            raise Abandoned
        if making.error is not None:
            raise making.error
        value: T = making.value
        return value

    def abandon(self) -> None:
        """Ends the wait for what is being made, and that for all that is to come; any thread."""
        self._abandoned = True
        present = self.present
        if isinstance(present, _Making):
            present.waker.set()
        self.close()

    def close(self) -> None:
        """Lets the thread end when it has made what it was given."""
        self._queue.put(None)

    def _work(self) -> None:
        while (making := self._queue.get()) is not None:
            making.carry_out()
            del making
