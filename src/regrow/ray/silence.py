"""A Ray head that does not answer: for a while it may only be busy, then it is lost, and may come back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from regrow.errors import NoRayHeadError, RayError, WaitTimeout
from regrow.ray.cluster import RayCluster
from regrow.ray.rank import LEASE_S

_T = TypeVar("_T")
# By then its ranks have ended, too.
SILENT_S: Final = LEASE_S
"""How long a head may be silent before it is lost, in seconds."""
_LOOK_S: Final = 0.5


def heard(ask: Callable[[], _T]) -> _T:
    """What a cluster answers to a question, which is asked again while its head is silent.

    Raises:
        NoRayHeadError: If that is too long.
    """
    began = time.monotonic()
    while True:
        try:
            return ask()
        except NoRayHeadError:
            if time.monotonic() - began > SILENT_S:
                raise
            time.sleep(_LOOK_S)


def await_head(cluster: RayCluster, timeout_s: float) -> None:
    """Waits until there is a head again, the same one or another, and connects to it.

    Raises:
        UnsupportedError: If it is another version.
        WaitTimeout: If there is none.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        time.sleep(_LOOK_S)
        try:
            return cluster.connect()
        # One that has only begun to start refuses this and that.
        except (NoRayHeadError, RayError):
            if time.monotonic() > deadline:
                what = f"the Ray head at {cluster.address} to answer again"
                raise WaitTimeout(what, timeout_s) from None
