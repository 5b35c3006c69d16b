"""Keeps the frames of the hooks out of the tracebacks that JAX shows."""

from __future__ import annotations

import importlib
from typing import Any


def hides_frames(file: str) -> None:
    """JAX filters the frames of its own files; that of a hook is to go with them."""
    traceback_util: Any = importlib.import_module("jax._src.traceback_util")
    traceback_util.register_exclusion(file)
