"""Tells the head how long JAX has traced and lowered programs, which only the client can see."""

from __future__ import annotations

import importlib
import time
from typing import Any, Final

from regrow.client.telling import tell

_EVENTS: Final = frozenset(
    {
        "/jax/core/compile/jaxpr_trace_duration",
        "/jax/core/compile/jaxpr_to_mlir_module_duration",
    }
)
_LEAST_S: Final = 0.005


def install() -> None:
    """Listens to what JAX tells of its compilations."""
    monitoring: Any = importlib.import_module("jax.monitoring")
    monitoring.register_event_duration_secs_listener(_listen)


def _listen(event: str, duration_s: float, **_: Any) -> None:
    if event in _EVENTS and duration_s >= _LEAST_S:
        # The clock is that of the whole machine, and only a head on this machine is told.
        now = time.monotonic()
        tell("traced", began=now - duration_s, ended=now)
