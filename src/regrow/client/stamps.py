"""Executions that carry the step they belong to, so that the head need not guess it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from regrow.channel.stamps import stamp_of

_set: Callable[[int], None] | None = None


def install() -> None:
    """Finds where JAX takes the id of an execution's stream from."""
    global _set
    jax: Any = importlib.import_module("jaxlib._jax")
    _set = jax.set_execution_stream_id


def stamp(step: int, *, expected: bool = False) -> None:
    """What this thread executes from now on belongs to this step; without a cluster it does nothing.

    `expected`: unless the program goes back to an earlier one, which it may not say.

    The step travels in each request to execute, so it cannot come before or after it as what is told
    over another connection does. An execution's stream is of no other use on Regrow, whose hosts
    execute in the order of the requests.
    """
    if _set is not None:
        _set(stamp_of(step, expected=expected))
