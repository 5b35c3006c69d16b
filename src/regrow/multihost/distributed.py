"""`jax.distributed.initialize` for runs whose hosts are not to wait for one that has failed.

How the other hosts learn that a process is gone, or will not come:

- The process is killed, or crashes: its connections end. Collectives that wait for it fail at once,
  and JAX ends every process when the coordinator (process 0) is gone.
- It raises an error: JAX has it wait, before it ends, until all the others end too (five minutes), who
  wait for it in a collective. `initialize` makes it end at once, so that it is as good as killed.
- It hangs, or its machine is cut off: it sends no heartbeats, and after `HEARTBEAT_S` the coordinator
  has all the others end. JAX's default is 100 s.
- It lives, but gets no further: see `StepDeadline`.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final

from regrow.client.notice import say

HEARTBEAT_S: Final = 60
"""Seconds without a heartbeat after which a process counts as lost."""

_INTERRUPTED: Final = 130
_installed = False


def initialize(*args: Any, **kwargs: Any) -> None:
    """Joins all hosts, as `jax.distributed.initialize`, whose arguments it takes.

    Where these do not say otherwise a process that hangs is noticed after `HEARTBEAT_S`. A process
    that an error ends does so at once, with exit status 1 and without waiting for the others (so
    without `atexit` functions); those that wait for it then fail, too.

    On hosts of the local Cloud TPU `jax.distributed.initialize` itself does this.
    """
    jax: Any = importlib.import_module("jax")
    start(jax.distributed.initialize, args, kwargs)


def start(
    stock: Callable[..., None],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Calls JAX's own function, with our defaults for what the caller leaves open."""
    given = inspect.signature(stock).bind_partial(*args, **kwargs).arguments
    given.setdefault("heartbeat_timeout_seconds", HEARTBEAT_S)
    for name, value in (defaults or {}).items():
        if given.get(name) is None:
            given[name] = value
    stock(**given)
    _end_at_once()


def _end_at_once() -> None:
    """Has an error end the process without a wait for the others."""
    global _installed
    if _installed:
        return
    _installed = True
    former = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        former(kind, error, trace)
        if _is_alone() or hasattr(sys, "ps1"):
            return
        say("this process ends without waiting for the other hosts, which end, too")
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(_INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = excepthook


def _is_alone() -> bool:
    """Whether no other host waits for this process (any more)."""
    state: Any = importlib.import_module("jax._src.distributed").global_state
    return state.client is None or state.num_processes == 1
