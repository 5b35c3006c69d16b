"""Tells the head how long JAX has traced, lowered and compiled programs, which only the client can see.

To compile means more to the client than to the head: it writes the program out before it asks, and
makes its own executable of the answer. With a program from the cache that is most of the time.
"""

from __future__ import annotations

import importlib
import time
from typing import Any, Final

from regrow.client.telling import tell

_EVENTS: Final = frozenset(
    {
        "/jax/core/compile/jaxpr_trace_duration",
        "/jax/core/compile/jaxpr_to_mlir_module_duration",
        "/jax/core/compile/backend_compile_duration",
    }
)
_LEAST_S: Final = 0.001


def install() -> None:
    """Listens to what JAX tells of its compilations."""
    monitoring: Any = importlib.import_module("jax.monitoring")
    monitoring.register_event_duration_secs_listener(_listen)


def _listen(event: str, duration_s: float, **_: Any) -> None:
    if event in _EVENTS and duration_s >= _LEAST_S:
        # The clock is that of the whole machine, and only a head on this machine is told.
        now = time.monotonic()
        tell("traced", began=now - duration_s, ended=now)
