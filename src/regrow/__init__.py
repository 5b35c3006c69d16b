"""Stock JAX over slices that are separate processes and may die and return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from regrow.lazy import attributes

if TYPE_CHECKING:
    from regrow.client.connect import connect
    from regrow.cluster import LocalCluster
    from regrow.elastic.causes import explain

__version__ = "0.1.0"
__all__ = ["LocalCluster", "__version__", "connect", "explain"]

_HOMES: Final = {
    "LocalCluster": "regrow.cluster",
    "connect": "regrow.client.connect",
    "explain": "regrow.elastic.causes",
}
__getattr__, __dir__ = attributes(__name__, _HOMES)
