"""What ends a head whose own code fails.

An exception that nobody expected has left something undone, and somebody may wait for just that: so
it ends the head, and with it every wait. A fault that concerns one request or one connection does not
come here: it is the answer to that request, or the end of that connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar, final

T = TypeVar("T")

# asyncio reports here what happens to its own connections; their owners hear of it, too.
_CONNECTION_KEYS: Final = ("transport", "socket")


def unexpected(what: str, error: Exception) -> None:
    """Reports an exception in the running loop that its caller goes on from."""
    context = {"message": what, "exception": error}
    asyncio.get_running_loop().call_exception_handler(context)


def watch(task: asyncio.Task[None]) -> None:
    """An exception that ends the task is reported at once, and not when the task is garbage."""
    task.add_done_callback(_ended)


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.result()


@final
class Tasks:
    """Tasks that are kept until they end: the loop itself forgets what nobody holds."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def keep(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begins a task, whose outcome the caller looks at."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Begins a task whose outcome nobody looks at."""
        watch(self.keep(work))

    def cancel(self) -> None:
        """Has them all end."""
        for task in list(self._tasks):
            task.cancel()

    async def close(self) -> None:
        """Ends them all."""
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@final
class Guard:
    """The exception handler of a head's loop.

    Attributes:
        failure: What failed first, None while nothing has.
    """

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        """`on_failure` is called once, with the text."""
        self.failure: str | None = None
        self._on_failure = on_failure

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Logs what asyncio tells, with its traceback; ends the head if it is a fault of its own."""
        loop.default_exception_handler(context)
        error = context.get("exception")
        of_connection = any(key in context for key in _CONNECTION_KEYS)
        # What is a future and no task was the answer to somebody who wants it no longer.
        abandoned = not isinstance(context.get("future"), asyncio.Task | None)
        if error is None or of_connection or abandoned or self.failure is not None:
            return
        self.failure = f"the head failed: {type(error).__name__}: {error}; its log tells where"
        self._on_failure(self.failure)
