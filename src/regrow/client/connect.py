"""`connect`: make JAX in this process a client of a cluster."""

from __future__ import annotations

import os
import sys
from typing import Final

from regrow.client import jaxhook
from regrow.client.settings import TARGET_VARIABLE, Settings, environ, token_from
from regrow.errors import UsageError

_NOT_FOR_THIS_PROCESS: Final = ("PYTHONPATH",)


def connect(target: str | os.PathLike[str] | None = None, token: str | None = None) -> None:
    """Makes JAX in this process a client of the cluster at `target`.

    Call it before JAX is used; JAX may have been imported already. The work is done when JAX first
    asks for its devices, so a cluster that cannot be reached is reported there.

    Args:
        target: `grpc://HOST:PORT`, `HOST:PORT`, `grpc://unix:/PATH` or the path of a Unix socket;
            default: the environment variable REGROW_TARGET.
        token: The token that the head demands of clients over TCP; default: REGROW_TOKEN, or the
            contents of the file that REGROW_TOKEN_FILE names.

    Raises:
        UsageError: There is no target, it is no address, or JAX in this process uses its backends
            already, those of another cluster say.
    """
    target = os.environ.get(TARGET_VARIABLE) if target is None else target
    if not target:
        raise UsageError(f"regrow.connect: give a target, or set {TARGET_VARIABLE}")
    settings = Settings.of(target, token or token_from(os.environ))
    if _backends_in_use():
        known = jaxhook.active()
        if settings == known:
            return
        if known is not None:
            raise UsageError(
                f"regrow.connect: JAX in this process is a client of {known.target} already, and "
                f"stays one also when that cluster is gone; {settings.target} needs a process of its "
                "own"
            )
        raise UsageError(
            "regrow.connect: JAX in this process uses its backends already; call regrow.connect "
            "before the first array, jax.devices() or jax.jit call"
        )
    variables = environ(settings)
    os.environ.update({k: v for k, v in variables.items() if k not in _NOT_FOR_THIS_PROCESS})
    jaxhook.activate(settings)


def _backends_in_use() -> bool:
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bool(bridge.backends_are_initialized())
