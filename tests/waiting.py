"""Waiting for what other threads and processes do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LONG_S = 60.0
"""More than anything takes on a loaded machine."""


def until(
    condition: Callable[[], object], what: str = "its condition", timeout_s: float = LONG_S
) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.01)


async def until_on_loop(
    condition: Callable[[], object], what: str = "its condition", timeout_s: float = LONG_S
) -> None:
    """The same, and the loop goes on meanwhile."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        await asyncio.sleep(0.002)
