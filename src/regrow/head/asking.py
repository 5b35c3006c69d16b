"""Questions to hosts, for code that can wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from regrow.errors import Code, StatusError, WaitTimeout
from regrow.head.links import Link
from regrow.head.transfers import EpochError

Made = Callable[[int], Any]


async def ask(link: Link, make: Made, heard: Callable[[Link], None] = lambda _: None) -> Any:
    """The answer of a host; `heard` is called at the moment at which it comes.

    Raises:
        StatusError: It failed, or the host is lost.
    """
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def waiter(error: StatusError | None, value: Any) -> None:
        if answer.done():
            return
        if error is None:
            heard(link)
            answer.set_result(value)
        elif isinstance(error, EpochError):
            answer.set_exception(StatusError(error.code, error.message))
        else:
            answer.set_exception(error.fresh())

    link.ask(make, waiter)
    return await answer


async def ask_all(
    questions: Iterable[tuple[Link, Made]],
    timeout_s: float | None,
    what: str,
    heard: Callable[[Link], None] = lambda _: None,
) -> list[Any]:
    """The answers of several hosts; the first error ends it.

    Raises:
        StatusError: One failed, or is lost.
        WaitTimeout: Not all have answered in time.
    """
    tasks = [asyncio.ensure_future(ask(link, make, heard)) for link, make in questions]
    try:
        async with asyncio.timeout(timeout_s):
            return list(await asyncio.gather(*tasks))
    except TimeoutError:
        raise WaitTimeout(what, timeout_s or 0) from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(done: Callable[[], bool], timeout_s: float | None, what: str) -> None:
    """Waits for something that tells nobody when it happens.

    Raises:
        WaitTimeout: It did not happen in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while not done():  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise WaitTimeout(what, timeout_s or 0) from None


def in_words(error: Exception) -> str:
    """What an error says, without its code."""
    if isinstance(error, StatusError) and error.code in (Code.FAILED_PRECONDITION, Code.UNKNOWN):
        return error.message
    return str(error)
