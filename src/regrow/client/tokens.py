"""What becomes of the failure of a host callback after it was told.

Before JAX 0.12 the token of a failed ordered callback stays in JAX's table, and every later ordered
effect fails with the same old error. As in 0.12, the failure is told once and the order begins anew.

At the exit JAX waits for all effects, and tells of a failure once for each of its two ways to do so,
also of one that ended the script already. It is told once.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import sys
import threading
from typing import Any, Final

from regrow.client.marks import hides_frames
from regrow.client.notice import say

hides_frames(__file__)

_HEAD_GONE: Final = "Connection to IFRT proxy server was terminated"


def install() -> None:
    """Hooks the table of tokens, and what JAX does at the exit."""
    jax: Any = importlib.import_module("jax")
    dispatch: Any = importlib.import_module("jax._src.dispatch")
    if jax.__version_info__ < (0, 12):
        _hook_tokens(dispatch.RuntimeTokenSet, jax.errors.JaxRuntimeError)
    settle = functools.partial(_settle, dispatch.runtime_tokens, jax.errors.JaxRuntimeError)
    # Functions registered later run earlier: this one comes before JAX's own.
    atexit.register(settle)
    # By then Python 3.12 starts no threads, which callbacks that still run may need.
    before_threads_end = getattr(threading, "_register_atexit", None)
    if before_threads_end is not None:
        before_threads_end(settle)


def _hook_tokens(token_set: Any, jax_runtime_error: type[Exception]) -> None:
    stock = token_set.get_token_input

    def get_token_input(self: Any, eff: Any, devices: Any) -> Any:
        try:
            return stock(self, eff, devices)
        except jax_runtime_error:
            self.current_tokens.pop(eff, None)
            raise

    token_set.get_token_input = get_token_input


def _settle(runtime_tokens: Any, jax_runtime_error: type[Exception]) -> None:
    try:
        runtime_tokens.block_until_ready()
    except jax_runtime_error as error:
        runtime_tokens.clear()
        text = str(error)
        if _HEAD_GONE not in text and text not in str(getattr(sys, "last_value", "")):
            say(f"an effect of the script failed: {text}")
