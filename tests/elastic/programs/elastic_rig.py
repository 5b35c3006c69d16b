"""What the programs here share: the cluster whose slices they end at exact places of their own."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cases
import jax
import numpy as np
import pathwaysutils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from regrow.control import request

pathwaysutils.initialize()
logging.getLogger("jax").setLevel(logging.ERROR)

CONTROL = str(
    Path(os.environ["JAX_BACKEND_TARGET"].removeprefix("grpc://unix:")).parent / "control.sock"
)
DEVICES = jax.devices()
SLICES = 1 + max(device.slice_index for device in DEVICES)
PER_SLICE = len(DEVICES) // SLICES
LOST = jax.errors.JaxRuntimeError


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Makes a function a case, which begins with all slices up."""

    @functools.wraps(function)
    def on_whole_cluster() -> Any:
        whole()
        return function()

    return cases.case(on_whole_cluster)


def control(method: Any, **params: Any) -> Any:
    return request(CONTROL, method, timeout_s=60, **params)


def kill(index: int) -> None:
    control("kill", index=index)


def stop(index: int) -> None:
    control("stop", index=index)


def restore(index: int) -> None:
    control("restore", index=index)


def whole() -> None:
    """Brings all slices back."""
    for status in control("status")["slices"]:
        if status["state"] == "lost":
            restore(status["index"])
    control("wait_healthy")


def mesh_of(*slices: int, axes: tuple[str, str] = ("replica", "model")) -> Mesh:
    devices = [d for index in slices for d in DEVICES if d.slice_index == index]
    return Mesh(np.asarray(devices).reshape(len(slices), -1), axes)


def there(x: Any, mesh: Mesh, *spec: Any, kind: str | None = None) -> Any:
    return jax.device_put(x, NamedSharding(mesh, P(*spec), memory_kind=kind))


class Log(logging.Handler):
    """The lines that a logger has written."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@contextlib.contextmanager
def logged(name: str = "regrow.elastic") -> Iterator[Log]:
    log, logger = Log(), logging.getLogger(name)
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    try:
        yield log
    finally:
        logger.removeHandler(log)
