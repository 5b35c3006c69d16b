"""What the operator of a cluster asks of the script."""

from __future__ import annotations

import time
from typing import Final

from regrow.client.telling import asks

_AGAIN_S: Final = 0.1
_asked_at = -_AGAIN_S
_requested = False


def suspend_requested() -> bool:
    """Whether the whole job is to end now (`regrow suspend --job`), with its state saved by the script.

    Cheap enough for every step: the head is asked ten times a second at most. Without a head on this
    machine it is False.
    """
    global _asked_at, _requested
    now = time.monotonic()
    if not _requested and now - _asked_at >= _AGAIN_S:
        _asked_at = now
        _requested = asks("suspend_requested") is True
    return _requested
