"""One program on every host of every slice (multi-controller JAX).

What training code imports; importing this package imports neither JAX nor grain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from regrow.lazy import attributes

if TYPE_CHECKING:
    from regrow.multihost.deadline import StepDeadline
    from regrow.multihost.distributed import initialize
    from regrow.multihost.loader import HostLoader
    from regrow.multihost.profiling import trace

__all__ = ["HostLoader", "StepDeadline", "initialize", "trace"]

_HOMES: Final = {
    "HostLoader": "regrow.multihost.loader",
    "StepDeadline": "regrow.multihost.deadline",
    "initialize": "regrow.multihost.distributed",
    "trace": "regrow.multihost.profiling",
}
__getattr__, __dir__ = attributes(__name__, _HOMES)
