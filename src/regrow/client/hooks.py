"""Puts the hooks into JAX, each for itself, so that a JAX that lacks one place loses one feature."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from regrow.client import (
    analysis,
    arrays,
    backend,
    callbacks,
    crossing,
    profiler,
    stamps,
    tokens,
    tracing,
)
from regrow.client.notice import say
from regrow.client.settings import PLATFORMS, Settings


def _quieten() -> None:
    """Applies the level of logging that `settings.environ` chose to a jaxlib that is loaded already.

    With the level that JAX sets by itself each request that a lost slice refuses is logged.
    """
    level = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "")
    jax: Any = sys.modules["jax"]
    if level.isdecimal() and jax.config.jax_logging_level in (None, "", "NOTSET"):
        importlib.import_module("jax._src.lib").utils.absl_set_min_log_level(int(level))


_HOOKS: Final[tuple[tuple[str, Callable[[], None]], ...]] = (
    ("silence about what a lost slice refuses", _quieten),
    ("connecting with a token", backend.install),
    ("host callbacks inside jit", callbacks.install),
    ("NumPy arrays with negative or zero strides", arrays.install),
    ("copies of arrays to devices of another backend", crossing.install),
    ("the estimated cost of a lowered program", analysis.install),
    ("ordered effects after a failed callback", tokens.install),
    ("the time that tracing takes", tracing.install),
    ("traces of the hosts by the profiler", profiler.install),
    ("the step of each execution", stamps.install),
)
_installed = False


def install(settings: Settings) -> None:
    """Installs every hook, and makes `settings` what JAX connects to. JAX must be imported."""
    global _installed
    _configure(settings)
    backend.use(settings)
    if _installed:
        return
    _installed = True
    for feature, hook in _HOOKS:
        try:
            hook()
        except (ImportError, AttributeError) as error:
            jax = sys.modules["jax"]
            version = getattr(jax, "__version__", "?")
            say(
                f"this JAX ({version}) is not one that Regrow knows, so {feature} will not work: "
                f"{error}"
            )


def _configure(settings: Settings) -> None:
    config: Any = importlib.import_module("jax").config
    # JAX lower-cases the target that it reads from the environment, but paths have capitals.
    config.update("jax_backend_target", settings.target)
    platforms = os.environ.get("JAX_PLATFORMS", "")
    # The arguments of a host callback live on a local CPU device.
    if "proxy" in platforms.split(","):
        config.update("jax_platforms", PLATFORMS if platforms == "proxy" else platforms)
